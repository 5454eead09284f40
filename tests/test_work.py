"""`dprc noise-by-work`: equal work compared, certified heads alone, and the noise of accounting."""

import json

import pytest

from dprc import accounting
from dprc.accounting.small_head import certified_pairs
from dprc.cli import main
from dprc.estimators import get

RUN = {"delta": 1e-5, "sample_rate": 0.05, "steps": 100}
WORDS = ["noise-by-work", "--delta", "1e-5", "--sample-rate", "0.05", "--steps", "100"]


@pytest.mark.slow
def test_every_mechanism_of_equal_work_and_no_dearer_head(tmp_path):
    out = tmp_path / "noise.json"
    assert main([*WORDS, "--epsilons", "4", "--work", "32", "--out", str(out)]) == 0
    exact, *rows = json.loads(out.read_text())["metrics"]["rows"]
    assert exact["estimator"] == "exact"
    assert exact["noise_overhead"] == 0
    heads = [(r["head_rank"], r["num_probes"]) for r in rows if r["estimator"] == "hutchpp"]
    assert heads == [(1, 29), (2, 26)]
    assert set(heads) < set(certified_pairs())
    for row in rows:
        options = {k: row[k] for k in ("num_probes", "head_rank", "sketch")}
        name, analysis = row["estimator"], row["analysis"]
        # What passes the tokens, in units of 2BT(d+p): T large, so that nothing else counts.
        assert get(name, **options).flops(1, 10**6, 40, 60) == pytest.approx(
            2 * 10**6 * 100 * row["work"], rel=1e-3
        )
        overhead = row["noise_multiplier"] / exact["noise_multiplier"] - 1
        assert row["noise_overhead"] == pytest.approx(overhead)
        if row["head_rank"] == 2 or analysis == "envelope":
            assert row["noise_multiplier"] == accounting.noise_multiplier(
                epsilon=4, **RUN, estimator=name, analysis=analysis, **options
            )
    overheads = [row["noise_overhead"] for row in rows]
    assert max(overheads[3:]) < min(overheads[:3]), "a head needs less noise than 32 probes"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epsilons", "2,x"], "--epsilons: must be numbers separated by commas, got '2,x'"),
        (["--epsilons", "2", "--work", "0"], "--work"),
        (["--epsilons", "-2", "--work", "32"], "epsilon"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, capsys):
    assert main([*WORDS, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
