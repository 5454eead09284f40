"""What a run writes down on its way, and how it reads as CSV."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

STEP_COLUMNS = (
    "step",
    "learning_rate",
    "nonprivate_batch_size",
    "nonprivate_mean_loss",
    "nonprivate_seconds",
)

Row = dict[str, Any]


@dataclass
class RunLog:
    """Rows of steps and of evaluations.

    A step's number is the number of steps taken with it, so that the last one is the number of
    steps of the run. What depends on training data without noise is named ``nonprivate_*``; the
    time of a step is among it, for it depends on which documents were drawn.

    Attributes:
        steps: One row for each step, with ``STEP_COLUMNS``.
        evaluations: One row for each evaluation: step, epsilon, and the metrics of the workload.
    """

    steps: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)

    def total(self, column: str) -> Any:
        """Return the sum of a column of the steps."""
        return sum(row[column] for row in self.steps)

    def evaluated(self, step: int) -> bool:
        """Whether the model was evaluated after this step."""
        return any(row["step"] == step for row in self.evaluations)

    def steps_csv(self) -> str:
        """Return the steps as CSV; a loss of no sample is left empty."""
        return _csv(STEP_COLUMNS, self.steps)

    def evaluations_csv(self) -> str:
        """Return the evaluations as CSV; the epsilon of a run without privacy is left empty."""
        columns = list(dict.fromkeys(name for row in self.evaluations for name in row))
        return _csv(columns, self.evaluations)

    def to_json(self) -> str:
        """Return all of it as JSON; Python's, which writes a loss that is not a number as NaN."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote."""
        return cls(**json.loads(text))


def _csv(columns: Sequence[str], rows: Sequence[Row]) -> str:
    handle = io.StringIO()
    writer = csv.DictWriter(handle, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return handle.getvalue()
