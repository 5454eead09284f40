"""What a task is: documents, what is to be said about them, and a fixed split."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

_NO_WORD = re.compile(r"[\W_]+")
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


def normalised(text: str) -> str:
    """Return the form in which two texts count as the same document.

    Letters and digits only, without case, Unicode's variants of a character made one: texts that
    differ in punctuation, quotes, spacing or line breaks are the same document.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _NO_WORD.sub(" ", folded).strip()


def fingerprint(text: str) -> str:
    """Return a hash of the normalised text; it orders documents the same way everywhere."""
    return hashlib.sha256(normalised(text).encode()).hexdigest()


def distinct(
    examples: Iterable[Example], known: Mapping[str, Example] | None = None
) -> dict[str, Example]:
    """Keep the first of equal documents, so that one document is one privacy unit.

    Args:
        examples: In order.
        known: Documents that are not to be kept again, by fingerprint.

    Returns:
        What is kept, by fingerprint.

    Raises:
        ValueError: Equal documents carry different labels.
    """
    known = known or {}
    kept: dict[str, Example] = {}
    for example in examples:
        key = fingerprint(example.text)
        first = known.get(key) or kept.setdefault(key, example)
        if first.label != example.label:
            raise ValueError(
                f"documents {first.id!r} and {example.id!r} are equal but labelled "
                f"{first.label} and {example.label}"
            )
    return kept


def fixed_split(
    task: Task, train: Iterable[Example], test: Iterable[Example]
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Drop duplicates within and across two pools and cut each to the task's public size.

    A test document that is also among the training documents is dropped from the test side. Each
    side is ordered by fingerprint, so neither depends on the order of the source.

    Raises:
        ValueError: Fewer distinct documents than the split needs.
    """
    learned = distinct(train)
    held_out = distinct(test, known=learned)
    sides = []
    for side, pool, size in (
        ("train", learned, task.train_documents),
        ("test", held_out, task.test_documents),
    ):
        if len(pool) < size:
            raise ValueError(
                f"task {task.name}: the source has {len(pool)} distinct {side} documents, the "
                f"split needs {size}; choose a smaller one with --{side}-documents"
            )
        sides.append(tuple(pool[key] for key in sorted(pool)[:size]))
    return sides[0], sides[1]
