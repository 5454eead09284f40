"""Rows of a dataset in the format of the Hugging Face hub: from the hub, or from local files."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = list[Mapping[str, Any]]


def read_splits(
    task: str,
    repository: str,
    *,
    splits: Sequence[str],
    columns: Sequence[str],
    configuration: str | None = None,
    source: Path | None = None,
) -> list[Rows]:
    """Read splits of a dataset.

    Args:
        task: Name of the task, for messages.
        repository: On the hub.
        splits: Names of the splits.
        columns: What every row must have.
        configuration: Of the repository; of a local copy, the folder of that name if there is one.
        source: A folder of files of the same schema (``train.jsonl``,
            ``data/train-00000-of-00001.parquet``, CSV): then nothing is looked up on the hub.

    Returns:
        The rows of each split.

    Raises:
        ValueError: A split or a column is missing, or the files cannot be read.
        OSError: The hub cannot be reached or has no such dataset.
    """
    if source is not None and not source.is_dir():
        raise FileNotFoundError(f"--source: {source} is not a folder")
    found = (
        _from_hub(task, repository, configuration)
        if source is None
        else _from_files(task, source, configuration)
    )
    missing = [split for split in splits if split not in found]
    if missing:
        raise ValueError(
            f"task {task}: {source or repository} has no split {missing[0]!r} (it has: "
            f"{', '.join(found)})"
        )
    return [_checked(task, split, found[split], columns) for split in splits]


def _from_hub(task: str, repository: str, configuration: str | None) -> Mapping[str, Any]:
    import datasets

    try:
        loaded: Mapping[str, Any] = datasets.load_dataset(repository, configuration)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise OSError(
            f"task {task}: cannot load {repository} from the hub ({_line(error)}). Give a folder "
            "of its files with --source"
        ) from None
    return loaded


def _from_files(task: str, source: Path, configuration: str | None) -> Mapping[str, Any]:
    import datasets

    if configuration is not None and (source / configuration).is_dir():
        source = source / configuration
    try:
        # Streamed, so that no second copy lands in a cache.
        loaded: Mapping[str, Any] = datasets.load_dataset(str(source), streaming=True)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"task {task}: cannot read {source} ({_line(error)})") from None
    return loaded


def _checked(task: str, split: str, rows: Iterable[Any], columns: Sequence[str]) -> Rows:
    try:
        read = list(rows)  # local files are read only here
    except (ValueError, OSError) as error:
        raise ValueError(
            f"task {task}: cannot read {split}; all files must have the same columns "
            f"({_line(error)})"
        ) from None
    for number, row in enumerate(read):
        for column in columns:
            if row.get(column) is None:
                raise ValueError(f"task {task}: row {number} of {split} has no {column!r}")
    return read


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
