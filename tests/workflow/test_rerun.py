"""After a change, what depends on it is made again and nothing else."""

import json
import os
import re
import signal
import time
from contextlib import contextmanager

import pytest

from tests.workflow.conftest import SMOKE, copy_project, read_plan

UTILITY = {"plot_accuracy_vs_epsilon", *(f"table_{n}" for n in ("accuracy", "lora", "utility"))}
FIGURES = {"collect_metrics", "compare_paper", "table_low_budget", *UTILITY}
TIMED = {"profile_layer", "table_layer_latency", "table_efficiency"}
TIMED |= {"plot_layer_latency", "plot_layer_memory_time"}


@contextmanager
def changed_file(path, text):
    """Change a file, or delete it with None; put it back afterwards, with its time."""
    content, stat = path.read_bytes(), path.stat()
    try:
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        yield
    finally:
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_results_all_lists_the_files_that_were_made(finished_project):
    files = (finished_project.run / "results" / "all").read_text().split()
    assert "results/paper_comparison.md" in files
    assert "results/figures/accuracy_vs_epsilon.pdf" in files
    assert all((finished_project.run / file).stat().st_size for file in files)


def test_the_settings_of_every_run_are_those_that_dprc_train_takes(finished_project):
    from dprc.settings import parse_settings

    runs = {}
    for file in finished_project.run.glob("results/train/**/settings.yaml"):
        task, mode, method = file.relative_to(finished_project.run).parts[2:5]
        runs[task, mode, method] = parse_settings(file.read_text(), origin=file.name)
    assert len(runs) == 6
    lora = runs["bbc_offline", "lora", "hutchinson"].model
    assert (lora.mode, lora.lora.rank, lora.lora.targets) == ("lora", 64, "qv")
    assert runs["bbc_offline", "full", "exact"].task.evaluation_batch == 128
    papers = runs["aclsum_qa", "full", "hutchinson"].task
    assert (papers.evaluation_documents, papers.max_new_tokens) == (2, 8)
    assert runs["bbc_offline", "full", "nonprivate"].privacy is None


def test_nothing_is_done_twice(finished_project):
    assert finished_project.planned_jobs() == {}


def test_training_goes_on_where_it_can_and_starts_anew_where_it_cannot(finished_project):
    calls = (finished_project.bin / "calls.log").read_text().splitlines()
    runs = [call.split() for call in calls if call.startswith("train ")]
    assert runs
    assert all({"--resume", "--overwrite"} < set(words) for words in runs)


def test_deleting_results_remakes_only_what_depends_on_them(finished_project):
    run = finished_project.result("results/train/*/*/exact/eps9/seed0/metrics.json")
    table = finished_project.result("results/tables/flops.csv")
    with changed_file(run, None), changed_file(table, None):
        jobs = finished_project.planned_jobs()
    assert jobs == dict.fromkeys({*FIGURES, "train_model", "table_flops", "results_all"}, 1)


def test_editing_a_module_repeats_only_the_rules_that_use_it(finished_project):
    source = finished_project.folder / "dprc" / "profiling" / "flops.py"
    with changed_file(source, source.read_text() + "\n# edited\n"):
        jobs = finished_project.planned_jobs()
    counted = {"count_flops", "table_flops", "plot_flops_vs_tokens", "plot_long_context"}
    # Both import its LayerShape.
    weighed = {"simulate_layer_memory", "table_layer_memory", "plot_layer_memory"}
    changed = {*counted, *TIMED, *weighed, "table_complexity", "compare_paper", "results_all"}
    assert jobs == dict.fromkeys(changed, 1)


def test_editing_the_accountant_repeats_accounting_and_no_training(finished_project):
    source = finished_project.folder / "dprc" / "accounting" / "step.py"
    with changed_file(source, source.read_text() + "\n# edited\n"):
        jobs = finished_project.planned_jobs()
    assert "train_model" not in jobs
    assert jobs["calibrate_noise"] == 4
    drawn = {f"plot_noise_{name}" for name in ("overhead", "vs_epsilon", "vs_probes")}
    assert {"sweep_noise", *drawn} < set(jobs)
    assert "envelope_cdf" not in jobs  # it does not use that module
    # What counts, weighs or times norms does not ask what they cost in privacy.
    assert not {rule for rule in jobs if rule.split("_")[0] in ("count", "simulate", "profile")}


def test_a_timed_layer_that_is_deleted_is_timed_again_and_no_other(finished_project):
    path = finished_project.result("results/layer_profiles/2048x512/tokens512.json")
    with changed_file(path, None):
        jobs = finished_project.planned_jobs()
    assert jobs == dict.fromkeys({*TIMED, "compare_paper", "results_all"}, 1)


def test_a_changed_noise_multiplier_repeats_the_runs_that_use_it(finished_project):
    path = finished_project.result("results/calibration/bbc_offline/exact/eps9.json")
    result = json.loads(path.read_text())
    result["privacy"]["noise_multiplier"] *= 1.01
    with changed_file(path, json.dumps(result)):
        jobs = finished_project.planned_jobs()
    assert jobs == dict.fromkeys({*FIGURES, "train_model", "results_all"}, 1)


@pytest.mark.slow
def test_the_report_holds_every_figure_and_table_with_the_origin_of_its_inputs(finished_project):
    done = finished_project.snakemake("--report", "report.html", *SMOKE)
    assert done.returncode == 0, done.stdout
    added = set(re.findall(r"^Adding (\S+) ", done.stdout, re.M))
    made = (finished_project.run / "results" / "all").read_text().split()
    shown = [
        path for path in made if re.search(r"figures/.*png|(tables|results)/[a-z_]+\.csv", path)
    ]
    assert added == {path.rsplit("/", 1)[1] for path in shown}
    page = (finished_project.run / "report.html").read_text()
    # A caption ends with where its inputs are from.
    assert page.count("Made on a stand-in by") >= len(shown)


@pytest.mark.slow
def test_an_edit_of_the_accountant_trains_again_only_where_the_noise_changed(tmp_path):
    project = copy_project(tmp_path / "project")
    assert project.snakemake(*SMOKE).returncode == 0
    calls = project.bin / "calls.log"
    source = project.folder / "dprc" / "accounting" / "step.py"
    for scale, trained in (("1.0", 0), ("1.5", 5)):
        (project.bin / "noise_scale.txt").write_text(scale)
        source.write_text(source.read_text() + "\n# edited\n")
        calls.unlink()
        done = project.snakemake(*SMOKE)
        assert done.returncode == 0, done.stdout
        commands = [line.split()[0] for line in calls.read_text().splitlines()]
        assert commands.count("calibrate") == 4
        assert commands.count("sweep-noise") == 1
        assert commands.count("train") == trained
        assert project.planned_jobs() == {}


def test_configurations_do_not_mix(finished_project):
    done = finished_project.snakemake("--dry-run", "--quiet", "rules", "--", "results/all")
    assert done.returncode == 0, done.stdout
    # The default configuration finds nothing of what the smoke one made, and would overwrite none.
    plan = read_plan(done.stdout)
    assert plan["results_all"] == plan["count_flops"] == plan["compare_paper"] == 1
    assert not (finished_project.folder / "results" / "all").exists()


@pytest.mark.slow
def test_a_killed_run_continues_and_takes_nothing_half_written_for_done(tmp_path):
    project = copy_project(tmp_path / "project")
    (project.bin / "train_seconds.txt").write_text("600")
    process = project.start_snakemake(*SMOKE)
    deadline = time.monotonic() + 60
    while not list(project.run.glob("results/train/**/steps.csv")):
        assert time.monotonic() < deadline, "training never started"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not list(project.run.glob("results/train/**/metrics.json"))

    (project.bin / "train_seconds.txt").unlink()
    done = project.snakemake(*SMOKE)
    assert done.returncode == 0, done.stdout
    assert len(list(project.run.glob("results/train/**/metrics.json"))) == 6
