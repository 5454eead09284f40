"""``dprc train`` on several processes: the same run, also when their number changes on the way."""

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from torch import distributed, nn

import dprc.parallel
import dprc.train
from dprc.generation import generate
from dprc.saved_models import load_classifier_folder
from dprc.termination import Terminated
from dprc.train import train
from tests import runs
from tests.articles import save_few_articles
from tests.test_distributed import JOIN, WAYS, Block, assert_close, seeded
from tests.tiny import causal_lm

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parent.parent
SECONDS = 300  # for a job of torchrun, on a machine that has much else to do


class Deep(nn.Module):
    """A classifier of a few parts, without dropout, whose masks go by process.

    Nor does a document's score depend on how far its batch was padded.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(runs.VOCABULARY, 24).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(24), Block(24)])
        self.head = nn.Linear(24, runs.CLASSES)

    def forward(self, input_ids):
        hidden = self.embedding(nn.functional.pad(input_ids, (0, 12 - input_ids.shape[1])))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))


def settings(strategy="replicate", private=True, **changes):
    make = runs.settings if private else runs.plain
    options = {"training__steps": 9, "output__log_every": 9, "output__evaluate_every": 9}
    return make(parallel={"strategy": strategy}, **options | changes)


def run(folder, *arguments, stop_at=None, resume=False, documents=None, **changes):
    """Train in this process, alone or as one of several; give parameters and metrics."""
    models = []

    def prepare(its_settings):
        work = runs.workload(its_settings, model=seeded(Deep), train=documents)
        models.append(work.model)
        return work

    def stop(step):
        # One process is told to stop; all must.
        last = not distributed.is_initialized() or distributed.get_rank() == 1
        if step == stop_at and last:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setattr(dprc.train, "prepare_workload", prepare)
        runs.remember_epsilons(patched)
        listener = runs.Listener(stop)
        try:
            metrics = train(
                settings(*arguments, **changes), folder, resume=resume, reporter=listener
            )
        except Terminated as terminated:
            return terminated.step, listener.notes
    values = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in models[-1].named_parameters()
    }
    return values, metrics


def resumed(folder, stop_at, *arguments):
    return run(folder, *arguments, stop_at=stop_at, resume=True)


def without_times(metrics):
    return {name: value for name, value in metrics.items() if name != "train_seconds"}


@pytest.fixture(scope="module", params=[True, False], ids=["private", "plain"])
def alone(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return request.param, folder, run(folder, "replicate", request.param)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_two_processes_is_that_of_one(two, alone, way, tmp_path):
    private, folder, (expected, metrics) = alone
    for values, found in two.ask(run, tmp_path, way, private):
        assert_close(values, expected, 1e-4)
        assert without_times(found) == pytest.approx(without_times(metrics), abs=1e-6)
    result = json.loads((tmp_path / "metrics.json").read_text())
    assert result["environment"]["processes"] == 2
    assert result["config"]["parallel"] == {"strategy": way}
    its, ours = (
        [line.split(",")[2] for line in (place / "steps.csv").read_text().splitlines()]
        for place in (folder, tmp_path)
    )
    assert its == ours  # samples of each step
    assert json.loads((folder / "metrics.json").read_text())["environment"]["processes"] == 1


@pytest.mark.parametrize("private", [True, False], ids=["private", "plain"])
def test_a_run_goes_on_in_another_number_of_processes(two, three, private, tmp_path):
    expected, metrics = run(tmp_path / "whole", "replicate", private)
    folder = tmp_path / "parts"
    for step, _ in two.ask(resumed, folder, 3, "shard", private):
        assert step == 3
    for step, notes in three.ask(resumed, folder, 5, "replicate", private):
        assert step == 5
        assert any("parallel.strategy was 'shard' and is 'replicate' now" in n for n in notes) or (
            notes == []  # told to process 0 alone
        )
    step, _ = resumed(folder, 6, "replicate", private)
    assert step == 6
    for values, found in three.ask(resumed, folder, None, "shard", private):
        assert_close(values, expected, 1e-4)
        assert without_times(found) == pytest.approx(without_times(metrics), abs=1e-6)


def held_folder(folder):
    with pytest.raises(FileExistsError, match="holds a finished run") as refused:
        run(folder, "replicate", True)
    return str(refused.value)


def other_settings(folder):
    with pytest.raises(dprc.PrivacyError) as refused:
        run(folder, "replicate", True, training__learning_rate=0.1 + distributed.get_rank())
    return str(refused.value)


def other_documents(folder):
    """Neither the first nor the last."""
    documents = runs.Documents(runs.DOCUMENTS, 0)
    documents.ids[5] = torch.full((4,), 1 + distributed.get_rank())
    with pytest.raises(dprc.PrivacyError) as refused:
        run(folder, "replicate", True, documents=documents)
    return str(refused.value)


def test_bad_input_is_refused_by_all(two, alone, tmp_path):
    private, folder, _ = alone
    if private:
        first, second = two.ask(held_folder, folder)
        assert first == second
        first, second = two.ask(other_settings, tmp_path / "other")
        assert first == second
        assert "training.learning_rate: differs between processes: 0.1 in process 0" in first
        first, second = two.ask(other_documents, tmp_path / "documents")
        assert first == second
        assert "content of the documents: differs between processes" in first


def written(way):
    model = causal_lm()
    prompts = [[5, 6, 7], [9, 10], [200]]
    JOIN[way](model)
    options = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": 2, "batch_size": 2}
    if way != "alone" and distributed.get_rank() == 1:
        prompts = [[2, 2], *prompts[1:]]  # another answer, which may end at another time
    return generate(model, prompts, **options)


def test_a_sharded_model_writes_what_a_whole_one_does(two):
    expected = written("alone")
    first, second = two.ask(written, "shard")
    assert first == expected
    assert second[1:] == expected[1:]


# --- torchrun ------------------------------------------------------------------------------------


def torchrun(*words, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         *words],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


SCRIPT = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch
import dprc
from dprc import distributed

distributed.start(timeout_seconds=120)
rank = torch.distributed.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
processes = getattr(distributed, sys.argv[1])(model)
engine = dprc.PrivacyEngine(
    model, torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0, noise_multiplier=1.0,
    sample_rate=1.0, expected_batch_size=4, processes=processes)
for logical_batch in engine.poisson_loader(torch.ones(4, 4), steps=9, max_physical_batch=2):
    for x in logical_batch:
        losses = model(x).sum(1)
        if rank == 1 and logical_batch.step == 2:
            if sys.argv[2] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            losses = losses.mean()
        engine.backward(losses)
    engine.step()
print("finished")
"""


@pytest.mark.parametrize(
    ("way", "end", "message"),
    [("replicate", "die", "Signal 9 (SIGKILL)"), ("shard", "fail", "must have shape (batch,)")],
)
def test_a_process_that_ends_ends_the_job_with_a_message(tmp_path, way, end, message):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    job = torchrun(str(script), way, end)
    said, errors = job.communicate(timeout=SECONDS)
    assert job.returncode != 0
    assert message in errors
    assert "finished" not in said


def test_torchrun_starts_dprc_train_and_it_goes_on_after_sigterm(tmp_path):
    save_few_articles(tmp_path)
    raw = {
        "task": {"name": "bbc_offline", "data": str(tmp_path / "data"), "max_tokens": 40},
        "model": {"path": str(tmp_path / "model")},
        "method": {"estimator": "hutchinson", "num_probes": 16},
        "privacy": {
            "epsilon": 50.0, "delta": 1e-5, "max_grad_norm": 1.0, "noise_multiplier": 1.5,
        },
        "training": {"sample_rate": 0.2, "steps": 200, "learning_rate": 0.01},
        "output": {"log_every": 200, "checkpoint_every": 1},
        "parallel": {"strategy": "shard"},
        "seed": 0,
    }  # fmt: skip
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(raw))
    words = ("-m", "dprc", "train", "--config", str(file), "--out", str(tmp_path / "out"))
    job = torchrun(*words)
    checkpoints = tmp_path / "out" / "checkpoints"
    while not list(checkpoints.glob("step_0000000[2-9]")):
        assert job.poll() is None, job.communicate()
        try:
            job.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    job.send_signal(signal.SIGTERM)
    said, errors = job.communicate(timeout=SECONDS)
    assert job.returncode != 0
    assert said == ""
    assert errors.count("dprc train: terminated after step") == 1, errors
    saved = max(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*"))
    assert f"terminated after step {saved}, which is saved. Go on with: torchrun" in errors

    # Fewer steps are another run.
    raw["training"]["steps"] = 3
    job = torchrun(*words[:4], "-", *words[5:], "--resume", stdin=subprocess.PIPE)
    said, errors = job.communicate(yaml.safe_dump(raw), timeout=SECONDS)
    assert "training.steps was 200 and is 3 now" in errors
    assert errors.count("dprc train: error: ") == 1
    job = torchrun(*words[:4], "-", *words[5:], "--resume", "--overwrite", stdin=subprocess.PIPE)
    said, errors = job.communicate(yaml.safe_dump(raw), timeout=SECONDS)
    assert job.returncode == 0, errors
    assert said.count("\n") == 1
    assert said.endswith(f"-> {tmp_path}/out/metrics.json\n")
    result = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert result["environment"]["processes"] == 2
    assert result["privacy"]["releasable"] is True
    assert result["privacy"]["steps"] == 3
    model, _ = load_classifier_folder(tmp_path / "out" / "model")
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
    assert type(next(model.parameters())) is torch.nn.Parameter
