"""The graph of every configuration is made without heavy imports, with and without conda."""

import json
import re

import pytest
import yaml

from tests.workflow.conftest import SMOKE, read_plan


@pytest.fixture
def poisoned_imports(tmp_path):
    """Give a path of Python modules where what the graph must not need cannot be imported."""
    for name in ("torch", "transformers", "dp_accounting"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the workflow must not need me')\n")
    return str(tmp_path)


# The paper's configuration is the largest, and has none of the default one's tasks.
def test_dry_run_imports_nothing_heavy(project, poisoned_imports):
    done = project.snakemake(
        "--dry-run",
        "--quiet",
        "rules",
        "--configfile",
        "workflows/config/paper.yaml",
        "--",
        "results/all",
        PYTHONPATH=poisoned_imports,
    )
    assert done.returncode == 0, done.stdout
    plan = read_plan(done.stdout)
    assert plan["prepare_dataset"] == 3
    # Four private methods at three, two and two budgets, Hutch++ at one; five at the low budget.
    assert plan["calibrate_noise"] == 4 * (3 + 2 + 2) + 1 + 5
    # Full fine-tuning of three tasks, LoRA of two with three private methods; three seeds.
    assert plan["train_model"] == 3 * ((1 + 13) + (1 + 8) + (1 + 8) + (1 + 9) + (1 + 6))
    assert plan["profile_layer"] == 2 * 3
    assert plan["measure_norm_error"] == 1
    assert plan["audit_privacy"] == 5
    assert plan["simulate_layer_memory"] == plan["simulate_step_memory"] == 1
    assert plan["compare_peers"] == plan["check_peers"] == 1


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
    plan = read_plan(done.stdout)
    # four private methods at three budgets and one at one, one for each task on papers, five for
    # the low budget; two seeds, LoRA with three methods, one run for each task on papers
    assert plan["calibrate_noise"] == 4 * 3 + 1 + 2 + 5
    assert plan["train_model"] == 2 * (1 + 4 * 3 + 1) + 3 + 2
    assert plan["prepare_dataset"] == 3
    assert plan["prepare_model"] == 2
    assert plan["profile_layer"] == 2 * 2
    assert plan["noise_by_work"] == 3
    created = [line for line in done.stdout.splitlines() if line.startswith("Conda environment")]
    names = ("accounting", "figures", "training")
    assert {line.split()[2] for line in created} == {f"envs/{name}.yaml" for name in names}


def test_nothing_runs_beside_a_timing_rule(project):
    rules = re.split(
        r"^rule ", (project.folder / "workflows/rules/profile.smk").read_text(), flags=re.M
    )
    timing = [text for text in rules if text.startswith(("profile_layer:", "compare_peers:"))]
    assert ["threads: workflow.cores" in text for text in timing] == [True, True]


def test_every_rule_names_its_environment_log_and_benchmark(project):
    text = (
        "".join(path.read_text() for path in [*project.folder.glob("workflows/rules/*.smk")])
        + (project.folder / "Snakefile").read_text()
    )
    rules = len(re.findall(r"^(?:rule|checkpoint) ", text, re.M))
    assert rules == 44
    for directive in ("log:", "benchmark:", "conda:", "threads:", "resources:"):
        assert text.count(f"\n    {directive}") == rules, directive


def test_a_task_of_several_processes_is_started_by_torchrun(project, configuration, tmp_path):
    config = configuration("smoke")
    task = config["tasks"]["bbc_offline"]
    task["parallel"] = {"processes": 3, "strategy": "shard"}
    path = tmp_path / "several.yaml"
    path.write_text(yaml.safe_dump(config))
    command = ("--dry-run", "--printshellcmds", "--forcerun", "train_model")
    several = project.snakemake(*command, "--configfile", str(path), "--", "results/all")
    assert several.returncode == 0, several.stdout
    alone = project.snakemake(*command, *SMOKE)
    started = (
        "| TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600 torchrun --standalone --nproc-per-node 3 "
        "-m dprc train --config - "
    )
    assert started in several.stdout
    assert '"parallel": {"strategy": "shard"}' in several.stdout
    assert "torchrun" not in alone.stdout
    assert "| dprc train --config - " in alone.stdout
