"""A prepared dataset as files: written whole, refused when damaged."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dprc.results import write_result, write_text_atomic
from dprc.tasks.base import Dataset, Example, Task


def save_dataset(task: Task, folder: Path, source: Path | None = None) -> None:
    """Read a task's source and write train.jsonl, test.jsonl and, last, dataset.json.

    Args:
        task: What is read.
        folder: Where the files go.
        source: A folder that replaces the task's usual source.
    """
    dataset = task.read() if source is None else task.read(source)
    for split in ("train", "test"):
        write_text_atomic(folder / f"{split}.jsonl", _jsonl(getattr(dataset, split)))
    metrics: dict[str, Any] = {
        "documents_read": dataset.documents_read,
        "train_documents": len(dataset.train),
        "test_documents": len(dataset.test),
    }
    if dataset.label_names:
        metrics["train_per_label"] = _per_label(dataset.train, dataset.label_names)
        metrics["test_per_label"] = _per_label(dataset.test, dataset.label_names)
    write_result(
        folder / "dataset.json",
        config={"task": task.name, "label_names": list(dataset.label_names)},
        metrics=metrics,
        privacy=None,
        made_by="data",
    )


def _jsonl(examples: Iterable[Example]) -> str:
    return "".join(json.dumps(asdict(example), ensure_ascii=False) + "\n" for example in examples)


def _example(line: str) -> Example:
    fields = json.loads(line)
    return Example(**fields | {"answers": tuple(fields["answers"])})


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
        rest = f"--out {folder}"
        if task.startswith("own_"):  # perhaps the folder of the files themselves
            rest = "--source FILES --out FOLDER, and name FOLDER here"
        raise FileNotFoundError(
            f"task.data: {folder} holds no prepared dataset (dataset.json is missing). Run: "
            f"dprc prepare-data --task {task} {rest}"
        )
    about = json.loads(about_file.read_text(encoding="utf-8"))
    if about["config"]["task"] != task:
        raise ValueError(
            f"task.data: {folder} holds {about['config']['task']!r}, settings ask for {task!r}"
        )
    splits = {}
    for split in ("train", "test"):
        # By line feeds alone: a text may hold other characters that end a line.
        lines = (folder / f"{split}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        splits[split] = tuple(_example(line) for line in lines)
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
