"""Figure and table of the comparison with peers, and the documents that quote it."""

import json

import pytest
from matplotlib import pyplot as plt

from paper_figures.files import load_result
from paper_figures.peers import plot_peers
from paper_figures.peers_table import blocks, costs_table, faults_table, fill, peer_rows
from tests.workflow.conftest import ROOT

MEASUREMENTS = ROOT / "docs" / "measurements"


def make_row(mode, library, estimator, schedule, time, **changes):
    return {
        "mode": mode,
        "library": library,
        "estimator": estimator,
        "schedule": schedule,
        "num_probes": None,
        "head_rank": None,
        "setting": "full",
        "architecture": "llama",
        "training": "full",
        "tied": False,
        "checkpointing": None,
        "micro_batches": 1,
        "tokens": 64,
        "batch": 2,
        "status": "ok",
        "message": None,
        "max_norm_error": 3e-7,
        "clipped_sum_error": 1e-5,
        "time_seconds": None if time is None else 2 * time,
        "time_seconds_low": None if time is None else 1.8 * time,
        "time_seconds_high": None if time is None else 2.4 * time,
        "time_ratio": time,
        "peak_memory_ratio": None if time is None else 1.25,
    } | changes


@pytest.fixture
def result():
    refused = {"status": "refused", "message": "NoError: why"}
    probes = {"num_probes": 26, "head_rank": 2}
    rows = [
        make_row("nonprivate", "torch", None, None, 1.0, max_norm_error=None),
        make_row("opacus_fast", "opacus", "exact", "two_pass", 2.0),
        make_row("hutchpp_r2_k26_two_pass", "dprc", "hutchpp", "two_pass", 1.5, **probes),
        make_row("exact_book_keeping", "dprc", "exact", "book_keeping", 1.25),
        make_row("opacus_ghost", "opacus", "ghost", "two_pass", None, **refused),
        make_row("opacus_ghost", "opacus", "ghost", "two_pass", None, setting="gpt2", **refused),
    ]
    measurement = {
        "machine": "a machine",
        "date": "2001-02-03",
        "threads": 2,
        "dtype": "float32",
        "clock": "a clock",
        "memory_source": "a scale",
        "noise": True,
    }
    versions = {"torch": "9.8", "opacus": None}
    return {
        "metrics": {"rows": rows, "measurement": measurement},
        "environment": {"versions": versions},
    }


def test_costs_are_those_of_the_rows_that_were_timed(result):
    table = costs_table(peer_rows(result))
    assert list(table["step"]) == [
        "without privacy",
        "Opacus, fast gradient clipping",
        "Hutch++ (r = 2, k = 26), two passes",
        "exact, book-keeping",
    ]
    assert list(table["time"]) == ["1.00", "2.00", "1.50", "1.25"]
    assert set(table["peak memory"]) == {"1.25"}
    chosen = costs_table(peer_rows(result), ["exact_book_keeping", "opacus_fast"])
    assert list(chosen["time"]) == ["1.25", "2.00"]


def test_faults_are_listed_once_with_all_their_settings(result):
    table = faults_table(peer_rows(result))
    assert table.values.tolist() == [
        ["Opacus, ghost clipping", "full, gpt2", "refused", "NoError: why"]
    ]


def test_blocks_say_machine_and_date_and_go_between_their_marks(result):
    written = blocks(result, result)
    assert written.keys() == {"peers-short", "peers-measured", "peers-checked"}
    for text in written.values():
        assert "a machine" in text
        assert "2001-02-03" in text
        assert "torch 9.8;" in text
    assert "dprc: 2 of 2 right; opacus: 1 of 3 right." in written["peers-checked"]
    before = "above\n<!-- peers-short -->\nold\n<!-- /peers-short -->\nbelow\n"
    after = fill(before, written)
    assert "old" not in after
    assert after.startswith("above\n")
    assert after.endswith("below\n")
    assert fill(after, written) == after
    with pytest.raises(ValueError, match="no mark of peers-short"):
        fill("nothing", written)


def test_figure_has_a_point_for_each_mode_twice(result):
    figure = plot_peers(peer_rows(result))
    plane, times = figure.axes

    def points(axis, size):
        drawn = [line for line in axis.get_lines() if line.get_linestyle() == "None"]
        assert len(drawn) == size
        return sorted(line.get_xdata()[0] for line in drawn)

    assert points(plane, 4) == points(times, 4) == [1, 1.25, 1.5, 2]
    assert {line.get_ydata()[0] for line in plane.get_lines()[:4]} == {1.25}
    # The slowest at the bottom, its quartiles over the plain step's median.
    assert times.get_yticklabels()[0].get_text() == "Opacus, fast gradient clipping"
    assert times.get_lines()[0].get_xdata().tolist() == pytest.approx([1.8, 2.4])
    plt.close(figure)
    untimed = {**result, "metrics": {**result["metrics"], "rows": result["metrics"]["rows"][4:]}}
    with pytest.raises(ValueError, match="no row with both"):
        plot_peers(peer_rows(untimed))
    with pytest.raises(ValueError, match="has no rows"):
        peer_rows({"metrics": {"rows": []}})


@pytest.mark.parametrize("name", ["README.md", "docs/peers.md"])
def test_documents_quote_the_measurements(name):
    measured, checked = (
        load_result(MEASUREMENTS / f"peers_{part}.json", any_code=True)
        for part in ("cpu", "checked")
    )
    text = (ROOT / name).read_text(encoding="utf-8")
    assert fill(text, blocks(measured, checked)) == text


def test_measurements_are_of_right_steps_with_noise():
    for part in ("cpu", "checked"):
        result = json.loads((MEASUREMENTS / f"peers_{part}.json").read_text())
        assert result["metrics"]["measurement"]["noise"] is True
        rows = [row for row in result["metrics"]["rows"] if row["library"] == "dprc"]
        assert rows
        assert {row["status"] for row in rows} == {"ok"}
