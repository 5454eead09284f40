"""Your own documents: files with a train and a test split, in one of three schemas."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dprc.tasks.base import Dataset, Example, Kind, Prompt, fixed_split, unique
from dprc.tasks.hub import read_splits


@dataclass(frozen=True)
class OwnClassification:
    """Documents and their classes; columns text, label. The metric is accuracy.

    Args:
        train_documents: Public size of the training split; 0 stands for "not declared".
        test_documents: Of the test split.
        labels: Public names of the classes: which ones occur is already a fact about the data.
    """

    train_documents: int = 0
    test_documents: int = 0
    labels: tuple[str, ...] = ()

    name: ClassVar[str] = "own_classification"
    kind: ClassVar[Kind] = "classification"
    prompt: ClassVar[Prompt | None] = None
    main_metric: ClassVar[str] = "accuracy"
    max_new_tokens: ClassVar[int] = 0

    def read(self, source: Path | None = None) -> Dataset:
        """Read the documents.

        Raises:
            ValueError: Sizes or labels are not declared; a label that was not; another schema.
        """
        if len(self.labels) < 2 or len(set(self.labels)) < len(self.labels):
            raise ValueError(
                f"task {self.name}: declare the classes with --labels, at least two and each once "
                f"(--labels sport,politics), got {','.join(self.labels) or 'none'}"
            )
        return _read(self, ("text", "label"), self._example, source, self.labels)

    def _example(self, name: str, row: Mapping[str, Any]) -> Example:
        label = str(row["label"])
        if label not in self.labels:
            raise ValueError(
                f"task {self.name}: {name} has label {label!r}, --labels declares: "
                f"{', '.join(self.labels)}"
            )
        return Example(name, row["text"], self.labels.index(label))


@dataclass(frozen=True)
class OwnSummary:
    """Documents and a summary of each; columns text, summary. The metric is ROUGE.

    Args:
        train_documents: Public size of the training split; 0 stands for "not declared".
        test_documents: Of the test split.
    """

    train_documents: int = 0
    test_documents: int = 0

    name: ClassVar[str] = "own_summary"
    kind: ClassVar[Kind] = "summarization"
    prompt: ClassVar[Prompt] = Prompt(
        before="Summarize the following text.\n\nText:\n", after="\n\nSummary:"
    )
    main_metric: ClassVar[str] = "rouge1"
    max_new_tokens: ClassVar[int] = 256

    def read(self, source: Path | None = None) -> Dataset:
        """Read the documents.

        Raises:
            ValueError: Sizes are not declared; another schema.
        """
        return _read(self, ("text", "summary"), self._example, source)

    def _example(self, name: str, row: Mapping[str, Any]) -> Example:
        return Example(name, row["text"], answers=(str(row["summary"]).strip(),))


@dataclass(frozen=True)
class OwnQa:
    """Documents, a question about each and its answer; columns text, question, answer.

    The metric is F1. Several questions about one text are one privacy unit: only one is kept.

    Args:
        train_documents: Public size of the training split; 0 stands for "not declared".
        test_documents: Of the test split.
    """

    train_documents: int = 0
    test_documents: int = 0

    name: ClassVar[str] = "own_qa"
    kind: ClassVar[Kind] = "question_answering"
    prompt: ClassVar[Prompt] = Prompt(
        before="Answer the question from the text.\n\nText:\n",
        after="\n\nQuestion: {question}\nAnswer:",
    )
    main_metric: ClassVar[str] = "f1"
    max_new_tokens: ClassVar[int] = 64

    def read(self, source: Path | None = None) -> Dataset:
        """Read the documents.

        Raises:
            ValueError: Sizes are not declared; another schema.
        """
        return _read(self, ("text", "question", "answer"), self._example, source)

    def _example(self, name: str, row: Mapping[str, Any]) -> Example:
        answers = (str(row["answer"]).strip(),)
        return Example(name, row["text"], question=str(row["question"]).strip(), answers=answers)


def _read(
    task: OwnClassification | OwnSummary | OwnQa,
    columns: tuple[str, ...],
    example_fn: Callable[[str, Mapping[str, Any]], Example],
    source: Path | None,
    label_names: tuple[str, ...] = (),
) -> Dataset:
    if source is None:
        raise ValueError(
            f"task {task.name}: give the folder of your files with --source; it holds "
            f"train.jsonl and test.jsonl (or CSV, Parquet) with the columns {', '.join(columns)}"
        )
    for side in ("train", "test"):
        if getattr(task, f"{side}_documents") < 1:
            raise ValueError(
                f"task {task.name}: declare the size of the {side} split with "
                f"--{side}-documents, as a public number that does not depend on any one document"
            )
    pools = read_splits(
        task.name, str(source), splits=("train", "test"), columns=columns, source=source
    )
    examples = [
        [_checked_text(task.name, example_fn(f"{split}/{i}", row)) for i, row in enumerate(rows)]
        for split, rows in zip(("train", "test"), pools, strict=True)
    ]
    # Of rows on one text the first is kept: by what they say, so that no order of a file matters.
    ordered = [sorted(pool, key=lambda one: (one.question, one.answers)) for pool in examples]
    train, test = fixed_split(task, *unique(*ordered))
    return Dataset(train, test, label_names, documents_read=sum(map(len, pools)))


def _checked_text(task: str, example: Example) -> Example:
    for what, value in (("text", example.text), *(("answer", one) for one in example.answers)):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"task {task}: {example.id} has {what} {value!r}; text is needed")
    return example
