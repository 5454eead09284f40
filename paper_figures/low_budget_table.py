"""Table: noise and accuracy at the paper's low budget, for exact and both randomized methods."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from paper_figures.accuracy_table import format_published, summarize_runs
from paper_figures.files import (
    inputs_note,
    load_result,
    load_runs,
    make_table_parser,
    run_command,
    runs_note,
    write_csv,
    write_markdown,
)
from paper_figures.paper_values import load_paper_values, utility_setting
from paper_figures.style import METHODS, TASKS
from paper_figures.utility_table import NOT_RUN, OurCells, runs_of

EPSILON, TASK = 0.7, "bbc"
_COLUMNS = {"noise_multiplier": "paper_noise", "accuracy": "paper_mean"}


def low_budget_rows(
    noise: dict[str, float], summary: pd.DataFrame, paper: pd.DataFrame
) -> pd.DataFrame:
    """Put noise multipliers and accuracies at the low budget beside the paper's.

    Args:
        noise: Our noise multiplier of each method, at the paper's budget.
        summary: Of ``summarize_runs``.
        paper: The paper's values.
    """
    published: dict[str, dict[str, float]] = {}
    theirs = paper[(paper["where"] == "low-budget ablation") & paper["quantity"].isin(_COLUMNS)]
    for row in theirs.itertuples(index=False):
        cells = published.setdefault(utility_setting(row.method, row.setting).method, {})
        cells[_COLUMNS[row.quantity]] = row.value
        if row.quantity == "accuracy":
            cells["paper_std"] = row.std
    own = runs_of(summary, TASK, "full")
    own = own[own["epsilon"] == EPSILON].set_index("method")
    rows = []
    for method in METHODS:
        if method == "nonprivate" or not {method} & {*published, *noise, *own.index}:
            continue
        row: dict[str, Any] = {"method": method, **published.get(method, {})}
        row["our_noise"] = noise.get(method)
        if method in own.index:
            names = ("mean", "std", "seeds", "task", "max_tokens", "steps", "noise_multiplier")
            row |= {f"our_{name}": own.loc[method, name] for name in names}
        rows.append(row)
    columns = ["method", "paper_noise", "our_noise", "paper_mean", "paper_std"]
    columns += [f"our_{n}" for n in ("mean", "std", "seeds", "task", "max_tokens", "steps")]
    columns.append("our_noise_multiplier")
    return pd.DataFrame(rows, columns=columns)


def noise_by_method(paths: Sequence[str]) -> dict[str, float]:
    """Read calibrations ``…/<target>/<method>/eps<epsilon>.json`` at the low budget."""
    found = {}
    for path in paths:
        privacy = load_result(path)["privacy"]
        if privacy["epsilon"] == EPSILON:
            found[Path(path).parts[-2]] = privacy["noise_multiplier"]
    return found


def _for_readers(rows: pd.DataFrame) -> pd.DataFrame:
    scale = TASKS[TASK].scale

    def text(row: pd.Series) -> dict[str, str]:
        ours = OurCells.of(row, scale)
        return {
            "method": METHODS[row["method"]].label,
            "noise multiplier, the paper": _number(row["paper_noise"], 3),
            "noise multiplier, ours": _number(row["our_noise"], 3) or NOT_RUN,
            "accuracy (%), the paper": format_published(row["paper_mean"], row["paper_std"], scale),
            "accuracy (%), ours": ours.score,
            "seeds": ours.seeds,
            "our run": ours.run,
            "noise multiplier of our run": _number(row["our_noise_multiplier"], 3),
        }

    return pd.DataFrame([text(row) for _, row in rows.iterrows()])


def _number(value: float | None, digits: int) -> str:
    return "" if pd.isna(value) else f"{value:.{digits}f}"


def _command(arguments: argparse.Namespace) -> None:
    runs = load_runs(arguments.metrics)
    noise = noise_by_method(arguments.calibrations)
    rows = low_budget_rows(noise, summarize_runs(runs), load_paper_values(arguments.paper))
    write_csv(arguments.csv, rows)
    sources = [inputs_note([load_result(path) for path in arguments.calibrations]), runs_note(runs)]
    write_markdown(
        arguments.markdown,
        _for_readers(rows),
        title=f"Noise and accuracy at ε = {EPSILON:g}",
        note="BBC, δ = 1e-5. Noise multipliers are for a sample rate and a number of steps that the"
        " paper does not give, chosen so that exact clipping needs what it reports; our accuracies"
        " are those of an offline twin where it says so, which needs noise of its own.",
        source=" ".join(filter(None, sources)),
    )


if __name__ == "__main__":
    parser = make_table_parser(
        "low_budget_table", "Put noise and accuracy at ε = 0.7 beside the paper."
    )
    parser.add_argument("--metrics", required=True, help="CSV of collect_metrics")
    parser.add_argument("--calibrations", nargs="*", default=[], help="at the paper's budget")
    parser.add_argument("--paper", required=True, help="the paper's values")
    raise SystemExit(run_command(parser, _command))
