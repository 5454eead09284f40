"""The graph of every configuration is made in seconds, with and without conda."""

import json
import re
import resource

import pytest

from tests.workflow.conftest import read_plan

# In units of `snakemake --version`, about a second on an idle machine: both slow down alike when
# tests share the machine.
DRY_RUN_LIMIT = 3.0


@pytest.fixture(scope="session")
def poisoned_imports(tmp_path_factory):
    """Give a path of Python modules where what the graph must not need cannot be imported."""
    folder = tmp_path_factory.mktemp("poisoned")
    for name in ("torch", "transformers", "dp_accounting"):
        (folder / f"{name}.py").write_text("raise ImportError('the workflow must not need me')\n")
    return str(folder)


def processor_seconds(project, *arguments, **environment):
    """Run Snakemake and measure the processor time it takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = project.snakemake(*arguments, **environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# A configuration inherits nothing from the default one, which has more calibrations and more runs.
@pytest.mark.parametrize(
    ("name", "calibrations", "runs"),
    [("smoke", 2, 3), ("default", 9 + 3, 3 * (1 + 9)), ("paper", 21 + 3, 3 * (10 + 10 + 7 * 3))],
)
def test_dry_run_is_quick_and_imports_nothing_heavy(
    project, poisoned_imports, name, calibrations, runs
):
    _, unit = processor_seconds(project, "--version")
    done, used = processor_seconds(
        project,
        "--dry-run",
        "--quiet",
        "rules",
        "--configfile",
        f"workflows/config/{name}.yaml",
        "--",
        "results/all",
        PYTHONPATH=poisoned_imports,
    )
    assert read_plan(done.stdout)["calibrate_noise"] == calibrations
    assert read_plan(done.stdout)["train_model"] == runs
    assert used < DRY_RUN_LIMIT * unit


def test_use_conda_finds_the_environment_of_every_rule(project, tmp_path):
    # A stand-in that answers what Snakemake asks before it makes environments.
    conda = tmp_path / "conda"
    answers = {
        "info --json": json.dumps({"conda_prefix": "/opt/conda", "platform": "linux-64"}),
        "--version": "conda 25.3.0",
        "config --get channel_priority --json": '{"get": {"channel_priority": "strict"}}',
    }
    cases = "".join(f"  {words!r}) echo {answer!r} ;;\n" for words, answer in answers.items())
    conda.write_text(f'#!/usr/bin/env bash\ncase "$*" in\n{cases}  *) exit 1 ;;\nesac\n')
    conda.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    done = project.snakemake(
        "--use-conda", "results/all", "--dry-run", "--quiet", "rules", PATH=path
    )
    assert done.returncode == 0, done.stdout
    created = [line for line in done.stdout.splitlines() if line.startswith("Conda environment")]
    names = ("accounting", "figures", "training")
    assert {line.split()[2] for line in created} == {f"envs/{name}.yaml" for name in names}


def test_every_rule_names_its_environment_log_and_benchmark(project):
    text = (
        "".join(path.read_text() for path in [*project.folder.glob("workflows/rules/*.smk")])
        + (project.folder / "Snakefile").read_text()
    )
    rules = len(re.findall(r"^(?:rule|checkpoint) ", text, re.M))
    assert rules == 11
    for directive in ("log:", "benchmark:", "conda:", "threads:", "resources:"):
        assert text.count(f"\n    {directive}") == rules, directive
