"""The estimate of GPU hours: worked out by hand, and for the whole grid of the paper."""

import pytest

from workflows.gpu_hours import (
    SHAPES,
    Device,
    Shape,
    estimate_runs,
    main,
    step_units,
    write_estimate,
)

EXACT = {"estimator": "exact", "schedule": "two_pass"}
HUTCHINSON = {"estimator": "hutchinson", "schedule": "two_pass"}
BOOK = {"estimator": "hutchinson", "schedule": "book_keeping"}


@pytest.mark.parametrize(
    ("method", "mode", "checkpointing", "units"),
    [
        (None, "full", False, 3),  # forward, gradients of inputs, gradients of weights
        (None, "full", True, 4),
        (None, "lora", False, 2),
        (EXACT, "full", False, 5),  # gradients of inputs twice, of weights in norm and sum
        (HUTCHINSON, "full", False, 4.1),
        (HUTCHINSON, "full", True, 6.1),
        (BOOK, "full", False, 3.1),
    ],
)
def test_a_step_is_counted_in_forward_passes(method, mode, checkpointing, units):
    assert step_units(method, mode, checkpointing=checkpointing) == pytest.approx(units)


def test_hours_are_work_over_speed(configuration, monkeypatch):
    config = configuration("paper")
    monkeypatch.setitem(SHAPES, "llama-3.2-1b", Shape(parameters=1000, layers=2, width=10))
    slow = Device("a GPU", operations=1e6, bytes_read=1e6, used=0.5)
    estimates = estimate_runs(config, slow)
    plain = next(e for e in estimates if (e.task, e.method) == ("bbc", "nonprivate"))
    forward = 4096 * (2 * 1000 + 2 * 4096 * 10 * 2)
    trained = 1060 * (64 / 1225) * 208 * 4 * forward  # with checkpointing
    assert plain.hours_each == pytest.approx((trained + 840 * forward) / 0.5e6 / 3600)
    assert plain.runs == 3
    # BillSum's summaries of 256 tokens read the weights once for each token and batch of 8.
    written = next(e for e in estimates if (e.task, e.method) == ("billsum", "nonprivate"))
    trained = 17000 * 0.0135 * 222 * 4 * forward
    reads = 2800 / 8 * 256 * 4 * 1000
    assert written.hours_each == pytest.approx((trained + 2800 * forward + reads) / 0.5e6 / 3600)


def test_the_whole_grid_of_the_paper_is_estimated_with_its_assumptions(configuration):
    estimates = estimate_runs(configuration("paper"))
    assert sum(e.runs for e in estimates) == 3 * (14 + 9 + 9 + 10 + 7)
    text = write_estimate(estimates)
    assert "147 training runs, at most about" in text
    assert "A100 80GB at 60% of 19.5 TFLOP/s" in text
    assert "Nothing of it was measured on a GPU" in text


def test_a_model_of_unknown_size_is_refused_by_name(capsys):
    assert main(["workflows/config/default.yaml"]) == 2
    error = capsys.readouterr().err
    assert "models.tiny-llama: the size of 'tiny-llama' is not known here" in error
    assert len(error.splitlines()) == 1
