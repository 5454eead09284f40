"""How a run is told to whoever watches: a bar on a terminal, lines elsewhere, TensorBoard."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from dprc.run_log import Row


class Reporter(Protocol):
    """Hears of a run as it goes on."""

    def started(self, done: int, steps: int) -> None:
        """Hear that steps ``done`` + 1 to ``steps`` are to come."""

    def stepped(self, row: Row, *, log: bool, epsilon: float | None) -> None:
        """Hear of a step: whether it is to be logged, and then epsilon if the run is private."""

    def evaluated(self, row: Row, main_metric: str) -> None:
        """Hear of an evaluation."""

    def noted(self, text: str) -> None:
        """Hear of something unusual."""

    def finished(self) -> None:
        """Hear that nothing more will come, whatever the reason."""


def summary(row: Row, main_metric: str) -> str:
    """Return an evaluation in a few words."""
    words = f"{main_metric} {row[main_metric]:.4f}"
    return words if row.get("epsilon") is None else f"{words}, epsilon {row['epsilon']:.4g}"


class Reporters:
    """Several reporters as one.

    Args:
        reporters: Told in this order.
    """

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = reporters

    def started(self, done: int, steps: int) -> None:
        """Hear that steps ``done`` + 1 to ``steps`` are to come."""
        for reporter in self._reporters:
            reporter.started(done, steps)

    def stepped(self, row: Row, *, log: bool, epsilon: float | None) -> None:
        """Hear of a step."""
        for reporter in self._reporters:
            reporter.stepped(row, log=log, epsilon=epsilon)

    def evaluated(self, row: Row, main_metric: str) -> None:
        """Hear of an evaluation."""
        for reporter in self._reporters:
            reporter.evaluated(row, main_metric)

    def noted(self, text: str) -> None:
        """Hear of something unusual."""
        for reporter in self._reporters:
            reporter.noted(text)

    def finished(self) -> None:
        """Hear that nothing more will come."""
        for reporter in self._reporters:
            reporter.finished()


class Lines:
    """Plain lines, for logs.

    Args:
        stream: Where they go; standard error when None.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream, self._steps = stream, 0
        self.last_evaluation = ""

    def started(self, done: int, steps: int) -> None:
        """Remember the length of the run."""
        self._steps = steps

    def stepped(self, row: Row, *, log: bool, epsilon: float | None) -> None:
        """Print a line where one is due."""
        if log:
            cost = "" if epsilon is None else f"  epsilon {epsilon:.4g}"
            self._print(
                f"step {row['step']}/{self._steps}  nonprivate loss {_loss(row)}  "
                f"{row['nonprivate_seconds']:.3g} s{cost}"
            )

    def evaluated(self, row: Row, main_metric: str) -> None:
        """Print the metric that the run is judged by."""
        self.last_evaluation = summary(row, main_metric)
        self._print(f"step {row['step']}/{self._steps}  {self.last_evaluation}")

    def noted(self, text: str) -> None:
        """Print it."""
        self._print(text)

    def finished(self) -> None:
        """Do nothing: each line was complete."""

    def _print(self, text: str) -> None:
        stream = self._stream or sys.stderr
        stream.write(f"dprc train: {text}\n")
        stream.flush()


class Bar:
    """A progress bar with loss, time of a step and epsilon, on standard error."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            BarColumn(bar_width=12),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("nonprivate loss {task.fields[loss]}"),
            TextColumn("{task.fields[seconds]:.3g} s/step"),
            TextColumn("{task.fields[epsilon]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: Any = None
        self.last_evaluation = ""

    def started(self, done: int, steps: int) -> None:
        """Show the bar."""
        self._task = self._progress.add_task(
            "training", completed=done, total=steps, loss="-", seconds=0.0, epsilon=""
        )
        self._progress.start()

    def stepped(self, row: Row, *, log: bool, epsilon: float | None) -> None:
        """Move the bar."""
        fields = {"loss": _loss(row), "seconds": row["nonprivate_seconds"]}
        if epsilon is not None:
            fields["epsilon"] = f"epsilon {epsilon:.4g}"
        self._progress.update(self._task, completed=row["step"], **fields)

    def evaluated(self, row: Row, main_metric: str) -> None:
        """Print the metric that the run is judged by, above the bar."""
        self.last_evaluation = summary(row, main_metric)
        self.noted(f"step {row['step']}: {self.last_evaluation}")

    def noted(self, text: str) -> None:
        """Print it above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def finished(self) -> None:
        """Give the terminal back."""
        self._progress.stop()


class TensorBoard:
    """Scalars for TensorBoard; what is not private is filed under ``nonprivate``.

    Args:
        folder: Where the event files go.

    Raises:
        ImportError: The package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError(
                "output.tensorboard: needs the package 'tensorboard', which is not installed. "
                "Run: pip install tensorboard, or leave the setting out"
            ) from None
        self._make_writer, self._folder = SummaryWriter, folder
        self._writer: Any = None

    def started(self, done: int, steps: int) -> None:
        """Open the event file; points of steps that are repeated are dropped."""
        self._writer = self._make_writer(str(self._folder), purge_step=done + 1)

    def stepped(self, row: Row, *, log: bool, epsilon: float | None) -> None:
        """Write the scalars of a step."""
        step = row["step"]
        self._writer.add_scalar("learning_rate", row["learning_rate"], step)
        for name in ("batch_size", "mean_loss", "seconds"):
            value = row[f"nonprivate_{name}"]
            if value is not None:
                self._writer.add_scalar(f"nonprivate/{name}", value, step)
        if epsilon is not None:
            self._writer.add_scalar("privacy/epsilon", epsilon, step)

    def evaluated(self, row: Row, main_metric: str) -> None:
        """Write the metrics."""
        for name, value in row.items():
            if name not in ("step", "epsilon") and value is not None:
                group = "nonprivate" if name.startswith("nonprivate_") else "evaluation"
                tag = f"{group}/{name.removeprefix('nonprivate_')}"
                self._writer.add_scalar(tag, value, row["step"])

    def noted(self, text: str) -> None:
        """Leave it out: event files hold numbers."""

    def finished(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


def _loss(row: Row) -> str:
    loss = row["nonprivate_mean_loss"]
    return "-" if loss is None else f"{loss:.4f}"
