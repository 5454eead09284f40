"""What a task is: labelled text with a fixed split, prepared once into files."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from dprc.results import write_result, write_text_atomic


@dataclass(frozen=True)
class Example:
    """One document, which is one privacy unit."""

    id: str
    text: str
    label: int


@dataclass(frozen=True)
class Dataset:
    """A split: train and test share no document.

    Attributes:
        train: Training examples; their number is a public constant of the task.
        test: Test examples.
        label_names: Name of each label.
        documents_read: Documents in the source, before duplicates were dropped.
    """

    train: tuple[Example, ...]
    test: tuple[Example, ...]
    label_names: tuple[str, ...]
    documents_read: int


class Task(Protocol):
    """A source of labelled text."""

    @property
    def name(self) -> str:
        """Name in settings and paths."""

    def read(self) -> Dataset:
        """Read, deduplicate and split the source."""


def normalised(text: str) -> str:
    """Return the form in which two texts count as the same document."""
    return " ".join(text.casefold().split())


def fingerprint(text: str) -> str:
    """Return a hash of the normalised text; it orders documents the same way everywhere."""
    return hashlib.sha256(normalised(text).encode()).hexdigest()


def without_duplicates(examples: Iterable[Example]) -> list[Example]:
    """Keep the first of equal documents, so that one document is one privacy unit.

    Raises:
        ValueError: Equal documents carry different labels.
    """
    kept: dict[str, Example] = {}
    for example in examples:
        first = kept.setdefault(fingerprint(example.text), example)
        if first.label != example.label:
            raise ValueError(
                f"documents {first.id!r} and {example.id!r} are equal but labelled "
                f"{first.label} and {example.label}"
            )
    return list(kept.values())


def _jsonl(examples: Iterable[Example]) -> str:
    return "".join(json.dumps(asdict(example), ensure_ascii=False) + "\n" for example in examples)


def save_dataset(task: Task, folder: Path) -> None:
    """Read a task's source and write train.jsonl, test.jsonl and, last, dataset.json."""
    dataset = task.read()
    for split in ("train", "test"):
        write_text_atomic(folder / f"{split}.jsonl", _jsonl(getattr(dataset, split)))
    write_result(
        folder / "dataset.json",
        config={"task": task.name, "label_names": list(dataset.label_names)},
        metrics={
            "documents_read": dataset.documents_read,
            "train_documents": len(dataset.train),
            "test_documents": len(dataset.test),
            "train_per_label": _per_label(dataset.train, dataset.label_names),
            "test_per_label": _per_label(dataset.test, dataset.label_names),
        },
        privacy=None,
    )


def _per_label(examples: Iterable[Example], names: tuple[str, ...]) -> dict[str, int]:
    labels = [example.label for example in examples]
    return {name: labels.count(index) for index, name in enumerate(names)}


def load_dataset(folder: Path, task: str) -> Dataset:
    """Load what ``save_dataset`` wrote.

    Args:
        folder: Where it lies.
        task: Name of the task it must be of.

    Raises:
        FileNotFoundError: The folder holds no prepared dataset.
        ValueError: It is another task's, or a file has lost lines.
    """
    about_file = folder / "dataset.json"
    if not about_file.is_file():
        raise FileNotFoundError(
            f"task.data: {folder} holds no prepared dataset (dataset.json is missing). Run: "
            f"dprc prepare-data --task {task} --out {folder}"
        )
    about = json.loads(about_file.read_text(encoding="utf-8"))
    if about["config"]["task"] != task:
        raise ValueError(
            f"task.data: {folder} holds {about['config']['task']!r}, settings ask for {task!r}"
        )
    splits = {}
    for split in ("train", "test"):
        lines = (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        splits[split] = tuple(Example(**json.loads(line)) for line in lines)
        expected = about["metrics"][f"{split}_documents"]
        if len(lines) != expected:
            raise ValueError(
                f"task.data: {folder / split}.jsonl has {len(lines)} documents, dataset.json "
                f"says {expected}; prepare the data again"
            )
    return Dataset(
        splits["train"],
        splits["test"],
        tuple(about["config"]["label_names"]),
        about["metrics"]["documents_read"],
    )
