"""The audit's table and figure, from small result files."""

import json

import pytest
from matplotlib import pyplot as plt

from paper_figures.audit_bounds import plot_audit_bounds
from paper_figures.audit_table import audit_rows, load_audits, mechanism_label
from tests.workflow.test_figures import write_result


def write_audit(path, *, run=True, valid=True, **config):
    defaults = {
        "estimator": "hutchinson",
        "num_probes": 32,
        "head_rank": None,
        "sketch": "per_sample",
        "sample_rate": 1.0,
        "trials": 500,
    }
    metrics = {
        "epsilon_claimed": 2.0,
        "epsilon_lower_bound": 1.5,
        "tightness": 0.75,
        "delta": 0.01,
        "confidence": 0.95,
        "one_run": None,
        "detectors": [{}] * 12,
    }
    if run:
        metrics["one_run"] = {"epsilon_claimed": 1.9, "epsilon_lower_bound": 0.5, "delta": 1e-5}
    return write_result(
        path, metrics=metrics, config=defaults | config, valid=valid, made_by="audit"
    )


@pytest.fixture
def audits(tmp_path):
    return [
        write_audit(tmp_path / "plain.json", estimator="exact", run=False),
        write_audit(tmp_path / "head.json", estimator="hutchpp", head_rank=2, sketch="shared"),
        write_audit(tmp_path / "rare.json", sample_rate=0.2),
    ]


def test_each_audit_is_a_row_with_claims_and_bounds(audits):
    rows = audit_rows(load_audits(audits))
    assert rows["mechanism"].tolist() == ["plain", "head", "rare"]
    assert rows["epsilon_lower_bound"].tolist() == [1.5] * 3
    assert rows["run_epsilon_lower_bound"].isna().tolist() == [True, False, False]
    assert [mechanism_label(row) for row in rows.itertuples(index=False)] == [
        "exact, q = 1",
        "Hutch++, k = 32, head 2, shared, q = 1",
        "Hutchinson, k = 32, per-sample, q = 0.2",
    ]


def test_bars_are_claims_and_points_are_bounds(audits):
    figure = plot_audit_bounds(audit_rows(load_audits(audits)))
    step, run = figure.axes
    assert [bar.get_width() for bar in step.patches] == [2.0] * 3
    assert step.get_lines()[0].get_xdata().tolist() == [1.5] * 3
    assert run.get_lines()[0].get_xdata().tolist()[1:] == [0.5, 0.5]
    assert "0.01" in step.get_title()
    assert "1e-05" in run.get_title()
    plt.close(figure)


def test_a_refuted_audit_enters_no_figure(tmp_path):
    path = write_audit(tmp_path / "a.json", valid=False)
    with pytest.raises(ValueError, match="not valid"):
        load_audits([path])


def test_a_row_holds_what_the_command_wrote(tmp_path):
    from dprc.cli import main

    path = tmp_path / "real.json"
    words = "audit --estimator exact --trials 200 --structure-steps 20 --canaries 0 --seed 1"
    assert main([*words.split(), "--out", str(path)]) == 0
    found = json.loads(path.read_text())
    (row,) = audit_rows(load_audits([str(path)])).to_dict("records")
    assert row["epsilon_lower_bound"] == found["metrics"]["epsilon_lower_bound"]
    assert (row["estimator"], row["trials"], row["sample_rate"]) == ("exact", 200, 1.0)
