"""Reading result files and writing tables and figures, whole or not at all."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from dprc.results import write_text_atomic

SECTIONS = ("config", "metrics", "privacy", "environment", "valid")


def load_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read one result file.

    Args:
        path: A file written by a ``dprc`` command.

    Returns:
        Its sections.

    Raises:
        ValueError: The file is not a result file, or says of itself that it is not valid.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    missing = [name for name in SECTIONS if name not in result]
    if missing:
        raise ValueError(f"{path}: not a result file: it lacks {', '.join(missing)}")
    if result["valid"] is not True:
        raise ValueError(f"{path}: the result is marked as not valid and enters no figure")
    return result


def load_runs(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read the table that ``collect_metrics`` wrote: one row for each training run."""
    return pd.read_csv(path, dtype={"epsilon": float})


def write_csv(path: str | os.PathLike[str], rows: pd.DataFrame) -> None:
    """Write a table as CSV."""
    write_text_atomic(path, rows.to_csv(index=False))


def write_markdown(
    path: str | os.PathLike[str], rows: pd.DataFrame, *, title: str, note: str = ""
) -> None:
    """Write a table as Markdown, under a title and a note."""
    table = rows.fillna("").astype(str).to_markdown(index=False, disable_numparse=True)
    write_text_atomic(
        path, "\n\n".join(part for part in (f"# {title}", note, table) if part) + "\n"
    )


def save_figure(figure: Any, *paths: str | os.PathLike[str]) -> None:
    """Save a matplotlib figure in the format of each path's suffix."""
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
        try:
            # Without a date in the file, the same results give the same bytes.
            metadata = {"CreationDate": None} if path.suffix == ".pdf" else None
            figure.savefig(temporary, dpi=200, bbox_inches="tight", metadata=metadata)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def run_command(
    parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], None]
) -> int:
    """Run one module as a command: bad input is told in one line, with exit code 2."""
    arguments = parser.parse_args()
    try:
        command(arguments)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def make_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Make the parser of a module's command line."""
    name = f"python -m paper_figures.{module}"
    return argparse.ArgumentParser(prog=name, description=description)
