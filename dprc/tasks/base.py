"""What a task is: documents, what is to be said about them, and a fixed split."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from dprc.tasks.duplicates import fingerprint, near_duplicates

Kind = Literal["classification", "summarization", "question_answering"]


@dataclass(frozen=True)
class Example:
    """One document and what is to be said about it: one privacy unit.

    Attributes:
        id: Names it in messages.
        text: The document. Only this is cut to the context length.
        label: Index of its class, for classification.
        question: Asked about it, for question answering.
        answers: What the model should write: the first is learned, any of them counts as right.
    """

    id: str
    text: str
    label: int | None = None
    question: str = ""
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """The words around a document.

    Attributes:
        before: Stands before the document.
        after: Stands after it; ``{question}`` is replaced by the example's.
    """

    before: str
    after: str

    def around(self, example: Example) -> tuple[str, str]:
        """Return the words before and after the example's document."""
        return self.before, self.after.replace("{question}", example.question)


@dataclass(frozen=True)
class Dataset:
    """A split: train and test share no document.

    Attributes:
        train: Training examples; their number is a public constant of the task.
        test: Test examples.
        label_names: Name of each label; none where text is written.
        documents_read: Documents in the source, before duplicates were dropped.
    """

    train: tuple[Example, ...]
    test: tuple[Example, ...]
    label_names: tuple[str, ...]
    documents_read: int


class Task(Protocol):
    """A source of documents and the words that a model is asked with."""

    @property
    def name(self) -> str:
        """Name in settings and paths."""

    @property
    def kind(self) -> Kind:
        """What is learned; it decides the model's head, the loss and the metrics."""

    @property
    def prompt(self) -> Prompt | None:
        """The words around the document; None where a classification head reads it alone."""

    @property
    def main_metric(self) -> str:
        """The metric that a run is judged by."""

    @property
    def max_new_tokens(self) -> int:
        """How long a written answer may get; 0 where none is written."""

    @property
    def train_documents(self) -> int:
        """Size of the training split: a constant, so that it tells of no document."""

    @property
    def test_documents(self) -> int:
        """Size of the test split."""

    def read(self, source: Path | None = None) -> Dataset:
        """Read, deduplicate and split the source: the usual one, or the files of a folder."""


def unique(*pools: Iterable[Example]) -> list[list[Example]]:
    """Keep one of equal or almost equal documents, so that one document is one privacy unit.

    Args:
        *pools: What is in an earlier pool is dropped from the later ones.

    Returns:
        What is kept of each pool, ordered by fingerprint: no order of a source matters.

    Raises:
        ValueError: Equal documents carry different labels.
    """
    seen: dict[str, Example] = {}
    kept = []
    for pool in pools:
        new: dict[str, Example] = {}
        for example in pool:
            key = fingerprint(example.text)
            first = seen.setdefault(key, example)
            if first is example:
                new[key] = example
            elif first.label != example.label:
                raise ValueError(
                    f"documents {first.id!r} and {example.id!r} are equal but labelled "
                    f"{first.label} and {example.label}"
                )
        kept.append([new[key] for key in sorted(new)])
    dropped = near_duplicates([example.text for pool in kept for example in pool])
    number = itertools.count()
    return [[example for example in pool if next(number) not in dropped] for pool in kept]


def fixed_split(
    task: Task, train: Sequence[Example], test: Sequence[Example]
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Cut what ``unique`` kept to the task's public sizes.

    Raises:
        ValueError: Fewer documents than the split needs.
    """
    for side, pool, size in (
        ("train", train, task.train_documents),
        ("test", test, task.test_documents),
    ):
        if len(pool) < size:
            raise ValueError(
                f"task {task.name}: the source has {len(pool)} distinct {side} documents, the "
                f"split needs {size}; choose a smaller one with --{side}-documents"
            )
    return tuple(train[: task.train_documents]), tuple(test[: task.test_documents])
