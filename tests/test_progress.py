"""What a watcher of a run is told."""

import io
import sys
import types

import pytest

from dprc.progress import Bar, Lines, Reporters, TensorBoard

ROW = {
    "step": 10,
    "learning_rate": 0.1,
    "nonprivate_batch_size": 3,
    "nonprivate_mean_loss": 1.25,
    "nonprivate_seconds": 0.5,
}
EVALUATION = {"step": 10, "epsilon": 1.5, "test_accuracy": 0.75, "nonprivate_train_accuracy": 0.8}


def tell(reporter):
    reporter.started(4, 20)
    reporter.stepped({**ROW, "step": 9, "nonprivate_mean_loss": None}, log=False, epsilon=None)
    reporter.stepped(ROW, log=True, epsilon=1.5)
    reporter.evaluated(EVALUATION, "test_accuracy")
    reporter.noted("something [unusual]")
    reporter.finished()


def test_lines_are_written_at_logging_points():
    stream = io.StringIO()
    reporter = Lines(stream)
    tell(reporter)
    assert stream.getvalue().splitlines() == [
        "dprc train: step 10/20  nonprivate loss 1.2500  0.5 s  epsilon 1.5",
        "dprc train: step 10/20  test_accuracy 0.7500, epsilon 1.5",
        "dprc train: something [unusual]",
    ]
    assert reporter.last_evaluation == "test_accuracy 0.7500, epsilon 1.5"


def test_a_run_without_privacy_has_no_epsilon():
    stream = io.StringIO()
    reporter = Lines(stream)
    reporter.started(0, 20)
    reporter.stepped(ROW, log=True, epsilon=None)
    reporter.evaluated({**EVALUATION, "epsilon": None}, "test_accuracy")
    assert "epsilon" not in stream.getvalue()


def test_the_bar_shows_loss_time_and_epsilon(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    reporter = Bar()
    tell(reporter)
    shown = stream.getvalue()
    for words in ("10/20", "nonprivate loss 1.2500", "0.5 s/step", "epsilon 1.5"):
        assert words in shown.replace("\n", " "), words
    assert "something [unusual]" in shown
    assert reporter.last_evaluation == "test_accuracy 0.7500, epsilon 1.5"


def test_several_hear_the_same():
    streams = io.StringIO(), io.StringIO()
    tell(Reporters([Lines(stream) for stream in streams]))
    assert streams[0].getvalue() == streams[1].getvalue() != ""


class TestTensorBoard:
    def test_without_its_package_says_what_to_do(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(ImportError, match="pip install tensorboard, or leave the setting out"):
            TensorBoard(tmp_path)

    def test_scalars_that_are_not_private_say_so(self, monkeypatch, tmp_path):
        scalars, calls = {}, []

        class Writer:
            def __init__(self, folder, purge_step):
                calls.append((folder, purge_step))

            def add_scalar(self, tag, value, step):
                scalars[tag] = (value, step)

            def close(self):
                calls.append("closed")

        module = types.SimpleNamespace(SummaryWriter=Writer)
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
        tell(TensorBoard(tmp_path))
        assert calls == [(str(tmp_path), 5), "closed"]
        assert scalars == {
            "learning_rate": (0.1, 10),
            "nonprivate/batch_size": (3, 10),
            "nonprivate/mean_loss": (1.25, 10),
            "nonprivate/seconds": (0.5, 10),
            "privacy/epsilon": (1.5, 10),
            "evaluation/test_accuracy": (0.75, 10),
            "nonprivate/train_accuracy": (0.8, 10),
        }
