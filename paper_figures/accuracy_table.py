"""Table: test score by task, method and privacy budget."""

import argparse

import pandas as pd

from paper_figures.files import (
    load_runs,
    make_table_parser,
    run_command,
    runs_note,
    write_csv,
    write_markdown,
)
from paper_figures.style import METHODS, MODES, TASKS, sort_rows

GROUPS = ["task", "mode", "method", "epsilon", "metric"]


def summarize_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Average over seeds.

    Returns:
        One row for each task, mode, method and epsilon: mean and sample standard deviation (empty
        for one seed) in the unit of the paper, number of seeds, noise multiplier, longest text.
    """
    scores = runs.assign(score=runs["score"] * runs["task"].map(lambda task: TASKS[task].scale))
    summary = scores.groupby(GROUPS, as_index=False).agg(
        mean=("score", "mean"),
        std=("score", "std"),
        seeds=("seed", "nunique"),
        noise_multiplier=("noise_multiplier", "first"),
        max_tokens=("max_tokens", "first"),
        steps=("steps", "first"),
        mean_train_seconds=("train_seconds", "mean"),
    )
    return sort_rows(summary)


def format_score(mean: float, std: float, scale: float) -> str:
    """Write a mean, and a standard deviation where several seeds give one.

    Args:
        mean: In the unit of the paper.
        std: Likewise; NaN for none.
        scale: 100 for percent.
    """
    digits = 1 if scale == 100 else 4
    return f"{mean:.{digits}f}" if pd.isna(std) else f"{mean:.{digits}f} ± {std:.{digits}f}"


def format_published(mean: float, std: float, scale: float) -> str:
    """Write a mean and a standard deviation of the paper, with its digits; nothing for none.

    Args:
        mean: As printed; NaN for none.
        std: Likewise.
        scale: 100 for percent.
    """
    digits = 2 if scale == 100 else 4
    return "" if pd.isna(mean) else f"{mean:.{digits}f} ± {std:.{digits}f}"


def _for_readers(summary: pd.DataFrame) -> pd.DataFrame:
    """Write the summary with names and units that a reader needs no key for."""
    scores = [
        format_score(mean, std, TASKS[task].scale)
        for task, mean, std in zip(summary["task"], summary["mean"], summary["std"], strict=True)
    ]
    return pd.DataFrame(
        {
            "task": summary["task"].map(lambda task: TASKS[task].label),
            "mode": summary["mode"].map(MODES),
            "method": summary["method"].map(lambda method: METHODS[method].label),
            "ε": summary["epsilon"].map("{:g}".format).replace("inf", "∞"),
            "noise multiplier": summary["noise_multiplier"].map("{:.3f}".format).replace("nan", ""),
            "measure": summary["task"].map(lambda task: TASKS[task].metric_label),
            "mean ± std": scores,
            "seeds": summary["seeds"],
        }
    )


def _command(arguments: argparse.Namespace) -> None:
    runs = load_runs(arguments.metrics)
    summary = summarize_runs(runs)
    write_csv(arguments.csv, summary)
    write_markdown(
        arguments.markdown,
        _for_readers(summary),
        title="Test score by method and ε",
        source=runs_note(runs),
    )


if __name__ == "__main__":
    parser = make_table_parser("accuracy_table", "Average test scores over seeds.")
    parser.add_argument("--metrics", required=True, help="CSV of collect_metrics")
    raise SystemExit(run_command(parser, _command))
