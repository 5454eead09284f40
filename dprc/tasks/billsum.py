"""BillSum: summaries of bills of the United States Congress."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dprc.tasks.base import Dataset, Example, Kind, Prompt, fixed_split, unique
from dprc.tasks.hub import Rows, read_splits


@dataclass(frozen=True)
class Billsum:
    """Bills and their official summaries, as ``FiscalNote/billsum`` has them; the metric is ROUGE.

    Split: the source's own for Congress (18949 and 3269 bills; the Californian test split is not
    used) without duplicates, each side cut to a public constant. The title is not shown: it often
    says what the summary says.
    """

    train_documents: int = 17000
    test_documents: int = 2800

    name: ClassVar[str] = "billsum"
    kind: ClassVar[Kind] = "summarization"
    prompt: ClassVar[Prompt] = Prompt(
        before="Summarize the following bill.\n\nBill:\n", after="\n\nSummary:"
    )
    main_metric: ClassVar[str] = "rouge1"
    max_new_tokens: ClassVar[int] = 256

    def read(self, source: Path | None = None) -> Dataset:
        """Read the bills: columns text, summary.

        Raises:
            OSError: The hub cannot be reached.
            ValueError: Another schema, or too few bills.
        """
        pools = read_splits(
            self.name,
            "FiscalNote/billsum",
            splits=("train", "test"),
            columns=("text", "summary"),
            source=source,
        )
        train, test = fixed_split(
            self, *unique(_bills("train", pools[0]), _bills("test", pools[1]))
        )
        return Dataset(train, test, (), documents_read=sum(map(len, pools)))


def _bills(split: str, rows: Rows) -> list[Example]:
    return [
        Example(f"{split}/{number}", row["text"], answers=(row["summary"].strip(),))
        for number, row in enumerate(rows)
    ]
