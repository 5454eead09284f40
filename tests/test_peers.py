"""The side-by-side measurement: right norms, ratios to the non-private step, refusals."""

import json

import pytest

from dprc.cli import main
from dprc.profiling import peers


@pytest.fixture(autouse=True)
def _small_model(monkeypatch):
    original = peers.build_model
    monkeypatch.setattr(peers, "build_model", lambda: original(hidden_size=64, layers=1))


def test_every_mode_is_measured_and_its_norms_are_right(capsys):
    words = ["compare-peers", "--tokens", "41", "--rounds", "1", "--no-memory", "--json"]
    assert main([*words, "--modes", ",".join(peers.MODES)]) == 0
    rows = {row["mode"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows.keys() == peers.MODES.keys()
    assert rows["nonprivate"]["time_ratio"] == 1
    assert rows["nonprivate"]["max_norm_error"] is None
    for name, row in rows.items():
        assert row["time_seconds"] > 0
        if row["estimator"] in ("exact", "tiled", "ghost"):
            assert row["max_norm_error"] < 1e-5, name
        elif row["estimator"]:
            assert 1e-5 < row["max_norm_error"] < 0.5, name


@pytest.mark.slow
def test_memory_is_that_of_a_step_over_the_model():
    small, large = (peers._peak_bytes("nonprivate", tokens) for tokens in (256, 768))
    activations = 2 * 4 * 512 * peers.VOCABULARY * peers.BATCH  # logits and their gradient
    assert large - small > 0.5 * activations


def test_an_unknown_mode_is_named(capsys):
    assert main(["compare-peers", "--modes", "opacus"]) == 2
    assert "got 'opacus'" in capsys.readouterr().err
    assert main(["compare-peers", "--rounds", "0"]) == 2
