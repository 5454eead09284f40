"""Sweeps for figures give what single questions give, and the law of rank one."""

import json

import pytest
from scipy import stats

from dprc import accounting
from dprc.cli import main


def rows_of(path):
    return json.loads(path.read_text())["metrics"]["rows"]


@pytest.mark.slow
def test_a_sweep_holds_every_budget_probe_count_and_analysis(tmp_path):
    path = tmp_path / "noise.json"
    words = ["--epsilons", "2,9", "--num-probes", "32", "--delta", "1e-5"]
    words += ["--sample-rate", "0.1", "--steps", "20", "--out", str(path)]
    assert main(["sweep-noise", *words]) == 0
    rows = rows_of(path)
    assert [row["epsilon"] for row in rows] == [2.0] * 4 + [9.0] * 4
    kinds = [(row["num_probes"], row["sketch"], row["analysis"]) for row in rows[:4]]
    assert set(kinds) == {
        (None, None, "tight"),
        (32, "per_sample", "tight"),
        (32, "shared", "tight"),
        (32, "shared", "envelope"),
    }
    exact = next(row for row in rows[4:] if row["num_probes"] is None)["noise_multiplier"]
    for row in rows[4:]:
        assert row["noise_overhead"] == pytest.approx(row["noise_multiplier"] / exact - 1)
    envelope = next(row for row in rows[4:] if row["analysis"] == "envelope")
    alone = accounting.noise_multiplier(
        epsilon=9, delta=1e-5, sample_rate=0.1, steps=20, sketch="shared", analysis="envelope"
    )
    assert envelope["noise_multiplier"] == alone
    config = json.loads(path.read_text())["config"]
    assert (config["sample_rate"], config["steps"], config["delta"]) == (0.1, 20, 1e-5)


def test_the_envelope_of_rank_one_is_the_law_of_chi_squared(tmp_path):
    path = tmp_path / "envelope.json"
    words = ["--num-probes", "8", "--ranks", "1,4", "--lowest", "0.5", "--highest", "1.5"]
    assert main(["envelope", *words, "--points", "3", "--out", str(path)]) == 0
    rows = rows_of(path)
    assert [(row["rank"], row["ratio"]) for row in rows] == [
        (rank, ratio) for rank in (1, 4) for ratio in (0.5, 1.0, 1.5)
    ]
    for row in rows[:3]:
        assert row["cdf"] == pytest.approx(stats.chi2(8).cdf(8 * row["ratio"]))
    # Up to 1 no rank is worse than the first; beyond, more ranks are.
    assert [row["cdf"] for row in rows[3:5]] == [row["cdf"] for row in rows[:2]]
    assert rows[5]["cdf"] > rows[2]["cdf"]


def test_both_print_when_they_write_nothing(capsys):
    assert main(["envelope", "--ranks", "1", "--points", "2"]) == 0
    assert "rank 1" in capsys.readouterr().out
    words = ["--epsilons=9", "--delta=1e-5", "--sample-rate=0.1", "--steps=5", "--json"]
    assert main(["sweep-noise", *words]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 4
