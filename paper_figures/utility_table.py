"""Table: the paper's main table of test scores, ours beside it."""

import argparse
from typing import NamedTuple

import pandas as pd

from paper_figures.accuracy_table import format_published, format_score, summarize_runs
from paper_figures.files import (
    load_runs,
    make_table_parser,
    run_command,
    runs_note,
    write_csv,
    write_markdown,
)
from paper_figures.paper_values import load_paper_values, published_scores
from paper_figures.style import METHODS, TASKS

PAPER_TASKS = ("bbc", "billsum", "hotpotqa")
EPSILONS = (float("inf"), 9.0, 2.0)
# The last two are ours; the paper has no such rows.
PRIVATE_METHODS = ("exact", "hutchinson_paper", "hutchinson", "hutchpp_small_head")
NOT_RUN = "not run here"


def runs_of(summary: pd.DataFrame, task: str, mode: str) -> pd.DataFrame:
    """Select our runs for a task of the paper: those of the task itself, else of its offline twin.

    Args:
        summary: Of ``summarize_runs``.
        task: Of the paper.
        mode: ``full`` or ``lora``.
    """
    chosen = summary[summary["mode"] == mode]
    own = chosen[chosen["task"] == task]
    return own if not own.empty else chosen[chosen["task"] == f"{task}_offline"]


def utility_rows(summary: pd.DataFrame, paper: pd.DataFrame) -> pd.DataFrame:
    """Put our mean scores beside the paper's.

    Args:
        summary: Of ``summarize_runs``.
        paper: The paper's values.

    Returns:
        A row for each task, budget and method of the main table, and for our variants; empty where
        nobody ran it.
    """
    published = published_scores(paper).set_index(["task", "mode", "method", "epsilon"])
    rows = []
    for task in PAPER_TASKS:
        own = runs_of(summary, task, "full").set_index(["method", "epsilon"])
        for epsilon in EPSILONS:
            for method in ("nonprivate",) if epsilon == float("inf") else PRIVATE_METHODS:
                row = {"task": task, "epsilon": epsilon, "method": method}
                if (method, epsilon) in own.index:
                    found = own.loc[(method, epsilon)]
                    names = ("task", "mean", "std", "seeds", "max_tokens", "steps")
                    row |= {f"our_{name}": found[name] for name in names}
                if (task, "full", method, epsilon) in published.index:
                    theirs = published.loc[(task, "full", method, epsilon)]
                    row |= {"paper_mean": theirs["mean"], "paper_std": theirs["std"]}
                rows.append(row)
    columns = ["task", "epsilon", "method", "paper_mean", "paper_std"]
    columns += [f"our_{n}" for n in ("mean", "std", "seeds", "task", "max_tokens", "steps")]
    return pd.DataFrame(rows, columns=columns)


def describe_run(task: object, max_tokens: object, steps: object) -> str:
    """Say which of our runs a score is of.

    >>> describe_run("bbc_offline", 64, 100)
    'BBC news, offline twin: 64 tokens, 100 steps'
    """
    return f"{TASKS[str(task)].label}: {max_tokens:g} tokens, {steps:g} steps"


class OurCells(NamedTuple):
    """What a table for readers says of our runs behind one of its rows."""

    score: str
    seeds: str
    run: str

    @classmethod
    def of(cls, row: pd.Series, scale: float) -> "OurCells":
        """Read ``our_mean``, ``our_std``, ``our_seeds``, ``our_task``, and so on, of a row."""
        if pd.isna(row["our_mean"]):
            return cls(NOT_RUN, "", "")
        return cls(
            format_score(row["our_mean"], row["our_std"], scale),
            f"{row['our_seeds']:.0f}",
            describe_run(row["our_task"], row["our_max_tokens"], row["our_steps"]),
        )


def _for_readers(rows: pd.DataFrame) -> pd.DataFrame:
    def text(row: pd.Series) -> dict[str, str]:
        style = TASKS[row["task"]]
        ours = OurCells.of(row, style.scale)
        return {
            "task": style.label,
            "measure": style.metric_label,
            "ε": f"{row['epsilon']:g}".replace("inf", "∞"),
            "method": METHODS[row["method"]].label,
            "the paper": format_published(row["paper_mean"], row["paper_std"], style.scale),
            "ours": ours.score,
            "seeds": ours.seeds,
            "our run": ours.run,
        }

    return pd.DataFrame([text(row) for _, row in rows.iterrows()])


def _command(arguments: argparse.Namespace) -> None:
    runs = load_runs(arguments.metrics)
    rows = utility_rows(summarize_runs(runs), load_paper_values(arguments.paper))
    write_csv(arguments.csv, rows)
    write_markdown(
        arguments.markdown,
        _for_readers(rows),
        title="Test scores after full fine-tuning",
        note="Mean ± standard deviation over seeds. The paper trained Llama-3.2-1B on 4096 tokens;"
        " an offline twin is a much smaller model on shorter texts, and no reproduction."
        " Per-sample sketches and the small head are ours: the paper has no such rows.",
        source=runs_note(runs),
    )


if __name__ == "__main__":
    parser = make_table_parser(
        "utility_table", "Put our test scores beside the paper's main table."
    )
    parser.add_argument("--metrics", required=True, help="CSV of collect_metrics")
    parser.add_argument("--paper", required=True, help="the paper's values")
    raise SystemExit(run_command(parser, _command))
