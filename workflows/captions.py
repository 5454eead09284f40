"""What the captions of the report say about the files a figure is made from."""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dprc.provenance import describe


def describe_files(paths: Iterable[str]) -> str:
    """Say on which devices and by which code files were made.

    Args:
        paths: Result files, and tables with the columns device and code; other files, and files
            that are not there yet, say nothing.
    """
    return describe(environment for path in paths for environment in _environments(Path(path)))


def _environments(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    if path.suffix == ".json":
        yield json.loads(path.read_text(encoding="utf-8"))["environment"]
    elif path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as handle:
            for row in csv.DictReader(handle):
                if row.get("code"):
                    yield {"device": row["device"], "code": json.loads(row["code"])}
