"""The graph of every configuration is made in seconds, with and without conda."""

import json
import re
import resource
import time

import pytest

# What the graph may take on an idle machine; tests share theirs, so processor time is measured.
DRY_RUN_SECONDS = 3.0


@pytest.fixture
def poisoned_imports(tmp_path):
    """Give a PATH entry of Python whose torch and transformers cannot be imported."""
    for name in ("torch", "transformers", "dp_accounting"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the workflow must not need me')\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("name", "runs"), [("smoke", 3), ("default", 3 * (1 + 3 * 3)), ("paper", 3 * (10 + 10 + 7 * 3))]
)
def test_dry_run_is_quick_and_imports_nothing_heavy(project, poisoned_imports, name, runs):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = project.snakemake(
        "--dry-run",
        "--quiet",
        "rules",
        "--configfile",
        f"workflows/config/{name}.yaml",
        "--",
        "results/all",
        PYTHONPATH=poisoned_imports,
    )
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout
    assert f"train_model {runs:>20}".split() in [line.split() for line in done.stdout.splitlines()]
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert min(used, wall) < DRY_RUN_SECONDS


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
