"""Timing in turns by a fake clock, and profiles of a layer against hand-computed sizes."""

import json
import re
import time

import pytest
import torch

from dprc import estimators
from dprc.cli import main
from dprc.profiling import latency
from dprc.profiling.device import Occupancy
from dprc.profiling.flops import LayerShape
from dprc.profiling.latency import profile_layer
from dprc.profiling.timing import Timing, time_interleaved

CPU = torch.device("cpu")
LAYER = ["profile-layer", "--in-features", "48", "--out-features", "32", "--tokens", "20"]


class FakeClock:
    """A clock that only the work moves."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "process_time", lambda: self.now)

    def work(self, calls, name, seconds):
        taken = iter(seconds)

        def run():
            calls.append(name)
            self.now += next(taken)

        return run


def test_rounds_take_turns_and_warm_up_does_not_count(monkeypatch):
    clock, calls = FakeClock(monkeypatch), []
    work = {
        "a": clock.work(calls, "a", [100, 100, 3, 1, 2, 10]),
        "b": clock.work(calls, "b", [100, 100, 7, 7, 7, 7]),
    }
    timings = time_interleaved(work, CPU, repeats=4, warm_up=2)
    assert "".join(calls) == "abba" * 3
    assert timings["a"] == Timing(2.5, (1.75, 4.75), 4)
    assert timings["b"] == Timing(7, (7, 7), 4)


def test_one_repeat_has_no_spread_and_none_is_refused():
    assert Timing.of([3.0]) == Timing(3.0, (3.0, 3.0), 1)
    with pytest.raises(ValueError, match="repeats: must be at least 1, got 0"):
        time_interleaved({}, CPU, repeats=0)


def test_workspace_of_a_layer_is_what_its_tensors_weigh():
    batch, tokens, d, p, k = 2, 200, 96, 160, 4
    chosen = [estimators.get(name, num_probes=k, sketch="shared") for name in estimators.names()]
    profile = profile_layer(LayerShape(d, p, tokens, batch), chosen, device=CPU, repeats=1)
    rows = {row["estimator"]: row for row in profile.rows}
    inputs = 4 * batch * tokens * (d + p)
    thin, block = k * batch * tokens, batch * d * 128
    least_and_most = {
        "exact": (batch * d * p, batch * d * p),
        "ghost": (2 * batch * tokens**2, 2 * batch * tokens**2),
        # the next block of 128 rows may be made before the last is dropped
        "tiled": (block, batch * d * p),
        # the thin product, perhaps a second time, and the sketch
        "hutchinson": (thin, 2 * thin + k * p),
    }
    for name, row in rows.items():
        assert row["input_bytes"] == inputs
        assert row["peak_memory_bytes"] == inputs + row["workspace_bytes"]
        assert row["flops"] == estimators.get(name, num_probes=k).flops(batch, tokens, d, p)
        if name in least_and_most:
            least, most = (4 * floats for floats in least_and_most[name])
            few = 64  # bytes: a number for each sample
            assert least <= row["workspace_bytes"] <= most + few, name
    assert rows["hutchinson"]["workspace_bytes"] < rows["hutchpp"]["workspace_bytes"]
    assert rows["tiled"]["num_probes"] is None
    assert rows["hutchinson"]["num_probes"] == k


def test_a_head_and_its_probes_may_stand_in_the_name(capsys):
    names = "hutchpp,hutchpp_r2_k6,hutchpp_r1_k6"
    assert (
        main([*LAYER, "--estimator", names, "--num-probes", "8", "--repeats", "1", "--json"]) == 0
    )
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["estimator"] for row in rows] == ["hutchpp"] * 3
    assert [row["head_rank"] for row in rows] == [None, 2, 1]
    assert [row["num_probes"] for row in rows] == [8, 6, 6]
    flops = [row["flops"] for row in rows]
    assert flops == sorted(flops, reverse=True)
    assert len(set(flops)) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--estimator", "hutchpp_r2_k6,hutchpp_r2_k6"], "one or several different ones"),
        (["--estimator", "hutchpp_r0_k6"], "head_rank: must be at least 1, got 0"),
        (["--estimator", "exact,hutchison"], "estimator: must be one of .* got 'hutchison'"),
        (["--estimator", "exact,exact"], "one or several different ones"),
        (["--num-probes", "49"], "no more than 48 rows or columns to project, got 49"),
        (["--dtype", "float16"], "--dtype: must be one of .* got 'float16'"),
        (["--head-rank", "2"], "--head-rank: is for hutchpp, which --estimator does not name"),
        (
            ["--estimator", "exact,hutchpp_r2_k6", "--num-probes", "8"],
            "--num-probes: is for hutchinson and hutchpp, .* got 8",
        ),
        (["--repeats", "0"], "repeats: must be at least 1"),
        (["--threads", "0"], "threads: must be at least 1"),
        (["--batch", "0"], "batch: must be at least 1"),
        (["--estimator", "ghost", "--batch", "999999999"], "GiB are free. Use fewer tokens"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, capsys, tmp_path):
    out = tmp_path / "r.json"
    assert main([*LAYER, *words, "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
    assert not out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_cuda_without_a_gpu_is_one_line_and_exit_code_2(capsys):
    assert main([*LAYER, "--device", "cuda"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cuda was asked for" in line


def test_the_number_of_threads_is_put_back(monkeypatch):
    seen = []
    monkeypatch.setattr(latency, "time_interleaved", lambda *_, **__: seen.append(1) or {})
    before = torch.get_num_threads()
    with pytest.raises(KeyError):  # whatever happens within
        profile_layer(
            LayerShape(8, 8, 4), [estimators.get("exact")], device=CPU, threads=before + 1
        )
    assert seen
    assert torch.get_num_threads() == before


def test_one_estimator_prints_its_numbers_at_the_top(capsys, tmp_path):
    out = tmp_path / "r.json"
    assert main([*LAYER, "--json", "--out", str(out), "--dtype", "bfloat16"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {"latency_seconds", "peak_memory_bytes", "flops"} <= printed.keys()
    assert printed["flops"] == 2 * 20 * 32 * (48 + 32)
    result = json.loads(out.read_text())
    assert result["valid"] is True
    assert result["config"]["dtype"] == "bfloat16"
    assert result["metrics"]["rows"] == printed["rows"]
    assert printed["input_bytes"] == 2 * 20 * (48 + 32)


def test_a_device_in_use_gives_a_result_that_is_not_valid(capsys, tmp_path, monkeypatch):
    busy = Occupancy(False, "another process uses the device: 7")
    monkeypatch.setattr(latency, "_occupancy", lambda device: busy)
    out = tmp_path / "r.json"
    assert main([*LAYER, "--estimator", "exact,tiled", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["valid"] is False
    assert result["metrics"]["not_exclusive_because"] == busy.reason
    assert busy.reason in capsys.readouterr().err
