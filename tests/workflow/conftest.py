"""A copy of the workflow with a stand-in for the `dprc` command, and Snakemake run in it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("Snakefile", "profiles", "workflows", "envs", "paper_figures", "dprc")
SMOKE = ("--configfile", "workflows/config/smoke.yaml", "--", "results/all")


class Project:
    """A copy of the parts of this project that the workflow reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "results" / "smoke"  # where the smoke configuration works
        self.bin = folder / "bin"

    def start_snakemake(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start Snakemake in the copy and in a process group of its own."""
        path = os.pathsep.join(
            [str(self.bin), str(Path(sys.executable).parent), os.environ["PATH"]]
        )
        return subprocess.Popen(
            [sys.executable, "-m", "snakemake", "--cores", "2", *arguments],
            cwd=self.folder,
            env={**os.environ, "PATH": path, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def snakemake(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run Snakemake in the copy; stdout of what it gives back holds standard error too."""
        process = self.start_snakemake(*arguments, **environment)
        output, _ = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    def planned_jobs(self, *arguments: str) -> dict[str, int]:
        """Ask for a dry run of results/all with the smoke configuration: jobs of each rule."""
        done = self.snakemake("--dry-run", "--quiet", "rules", *arguments, *SMOKE)
        assert done.returncode == 0, done.stdout
        return read_plan(done.stdout)

    def result(self, pattern: str) -> Path:
        """Find the one file of the smoke configuration that matches a pattern."""
        (path,) = self.run.glob(pattern)
        return path


def read_plan(output: str) -> dict[str, int]:
    """Read from a dry run how many jobs each rule has."""
    counts = {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", output, re.M)}
    counts.pop("total", None)
    return counts


def copy_project(folder: Path) -> Project:
    """Copy the workflow and put the stand-in for `dprc` on its PATH."""
    folder.mkdir(parents=True)
    for part in PARTS:
        source = ROOT / part
        if source.is_symlink():
            (folder / part).symlink_to(source.readlink())
        elif source.is_dir():
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / part)
    project = Project(folder)
    project.bin.mkdir()
    stub = Path(__file__).with_name("stub_dprc.py").read_text()
    command = project.bin / "dprc"
    command.write_text(f"#!{sys.executable}\n{stub}")
    command.chmod(0o755)
    return project


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Give a copy in which nothing was run; tests do not change it."""
    return copy_project(tmp_path_factory.mktemp("workflow") / "project")


@pytest.fixture(scope="session")
def finished_project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Give a copy in which the smoke configuration was run; tests put back what they change."""
    project = copy_project(tmp_path_factory.mktemp("finished") / "project")
    done = project.snakemake(*SMOKE)
    assert done.returncode == 0, done.stdout
    return project


@pytest.fixture
def configuration() -> Callable[[str], dict[str, object]]:
    """Read one of the shipped configurations."""

    def read(name: str) -> dict[str, object]:
        path = ROOT / "workflows" / "config" / f"{name}.yaml"
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert isinstance(loaded, dict)
        return loaded

    return read
