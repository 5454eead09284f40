"""The script for a GPU: its parts at a small size on a CPU, and its answer without a GPU."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from dprc import estimators

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_checks.py"
CPU = torch.device("cpu")


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("gpu_checks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so_in_one_line(script, capsys, tmp_path, monkeypatch):
    out = tmp_path / "checks.json"
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", "--out", str(out)])
    assert script.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cuda was asked for" in line
    assert not out.exists()


def test_layers_are_profiled_with_every_estimator_and_both_dtypes(script):
    found = script.profile_layers(CPU, layers=((32, 16),), tokens=(20,), repeats=1)
    assert len(found["rows"]) == 2 * len(estimators.names())
    assert found["not_exclusive_because"] == []


@pytest.mark.slow
def test_training_compares_norms_and_notices_a_wrong_one(script, monkeypatch):
    sizes = {"tokens": 24, "repeats": 1, "hidden_size": 64, "chosen": ("exact", "hutchinson")}
    rows = {row["mode"]: row for row in script.take_steps(CPU, **sizes)["rows"]}
    assert len(rows) == 1 + 2 * 2
    assert rows["exact/book_keeping"]["max_norm_error"] < 1e-2
    assert 0 < rows["hutchinson/two_pass"]["max_norm_error"] < 1
    assert rows["nonprivate"]["max_norm_error"] is None

    right = script._private_step
    norms = iter([1.0, 1.0])  # for the first engine, then for the second

    def wrong(engine, batch):
        step, factor = right(engine, batch), next(norms) * (1 + (engine.schedule == "book_keeping"))
        return lambda: step() * factor

    monkeypatch.setattr(script, "_private_step", wrong)
    with pytest.raises(ValueError, match=r"exact/book_keeping: norms are off by 0\.414"):
        script.take_steps(CPU, **(sizes | {"chosen": ("exact",)}))


def test_a_part_that_fails_is_recorded_and_stops_no_other(script, capsys):
    def fail():
        raise RuntimeError("lost the device")

    found = script.run_parts({"first": fail, "second": lambda: {"rows": [1]}})
    assert found["first"]["ok"] is False
    assert "lost the device" in found["first"]["error"]
    assert found["second"]["rows"] == [1]
    assert "first: FAILED" in capsys.readouterr().err
