"""Reading result files and writing tables and figures, whole or not at all."""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from dprc.provenance import code_hash, describe
from dprc.results import write_text_atomic

SECTIONS = ("config", "metrics", "privacy", "environment", "valid")


def load_result(path: str | os.PathLike[str], *, any_code: bool = False) -> dict[str, Any]:
    """Read one result file.

    Args:
        path: A file written by a ``dprc`` command.
        any_code: Take results of other code too: of a committed measurement, which says its commit.

    Returns:
        Its sections.

    Raises:
        ValueError: The file is not a result file, says of itself that it is not valid, or was made
            by other code than is there now.
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
    if not any_code:
        check_code(path, result["environment"].get("code"))
    return result


def check_code(path: str | os.PathLike[str], code: Mapping[str, Any] | None) -> None:
    """Refuse a result of other code: of the modules that made it, not of any newer commit.

    Args:
        path: Of the result.
        code: ``environment.code`` of the result.

    Raises:
        ValueError: There is none, or its modules have changed since.
    """
    again = f"make it again: snakemake --cores all --force {path}, with the same configuration"
    if not code:
        raise ValueError(f"{path}: does not say which code made it; {again}")
    modules = ", ".join(code["modules"])
    try:
        now = code_hash(*code["modules"], without=code["without"])
    except ModuleNotFoundError as error:
        raise ValueError(f"{path}: was made by {modules}, which is gone; {again}") from error
    if now != code["hash"]:
        raise ValueError(
            f"{path}: made by other code of {modules} (was {code['hash']}, is {now}); {again}"
        )


def inputs_note(results: Iterable[Mapping[str, Any]]) -> str:
    """Say on which devices and by which code these results were made."""
    return describe(result["environment"] for result in results)


def load_runs(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read the table that ``collect_metrics`` wrote: one row for each training run.

    Raises:
        ValueError: A run was made by other code than is there now.
    """
    runs = pd.read_csv(path, dtype={"epsilon": float})
    for code in runs["code"].unique():
        check_code(path, json.loads(code))
    return runs


def runs_note(runs: pd.DataFrame) -> str:
    """Say on which devices and by which code training runs were made."""
    pairs = runs[["device", "code"]].drop_duplicates().itertuples(index=False)
    return describe({"device": pair.device, "code": json.loads(pair.code)} for pair in pairs)


def write_csv(path: str | os.PathLike[str], rows: pd.DataFrame) -> None:
    """Write a table as CSV."""
    write_text_atomic(path, rows.to_csv(index=False))


def write_markdown(
    path: str | os.PathLike[str],
    rows: pd.DataFrame,
    *,
    title: str,
    note: str = "",
    source: str = "",
) -> None:
    """Write a table as Markdown, under a title and a note; below it, where its numbers are from."""
    table = rows.fillna("").astype(str).to_markdown(index=False, disable_numparse=True)
    write_text_atomic(
        path, "\n\n".join(part for part in (f"# {title}", note, table, source) if part) + "\n"
    )


def save_figure(figure: Any, *paths: str | os.PathLike[str], source: str = "") -> None:
    """Save a matplotlib figure in the format of each path's suffix.

    Args:
        figure: The figure.
        paths: Where it goes.
        source: Where its numbers are from, in small print below it.
    """
    if source:
        _write_below(figure, source)
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


def _write_below(figure: Any, text: str) -> None:
    """Write small print under everything there is on a figure."""
    figure.draw_without_rendering()
    # The layout is fixed now, and legends with it, which hang on the page: text below must not move
    # what is above.
    figure.set_layout_engine("none")
    for legend in figure.legends:
        corner = figure.transFigure.inverted().transform(legend.get_window_extent().p0)
        legend.set_loc("lower left")
        legend.borderaxespad = 0
        legend.set_bbox_to_anchor(corner, figure.transFigure)
    drawn = figure.get_tightbbox()  # in inches
    width, height = figure.get_size_inches()
    # About 24 such letters are an inch.
    lines = textwrap.fill(text, int(24 * drawn.width))
    look = {"fontsize": 6, "color": "#666666", "ha": "center", "va": "top"}
    figure.text((drawn.x0 + drawn.x1) / 2 / width, (drawn.y0 - 0.08) / height, lines, **look)


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


def make_table_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Make the parser of a module that writes a table, with its two files."""
    parser = make_parser(module, description)
    parser.add_argument("--csv", required=True, help="CSV to write")
    parser.add_argument("--markdown", required=True, help="Markdown to write")
    return parser
