"""Table: test scores of LoRA fine-tuning, and what randomized clipping loses against exact."""

import argparse

import pandas as pd

from paper_figures.accuracy_table import summarize_runs
from paper_figures.files import (
    load_runs,
    make_table_parser,
    run_command,
    runs_note,
    write_csv,
    write_markdown,
)
from paper_figures.paper_values import load_paper_values, utility_setting
from paper_figures.style import METHODS, TASKS
from paper_figures.utility_table import PRIVATE_METHODS, OurCells, runs_of


def lora_rows(summary: pd.DataFrame, paper: pd.DataFrame) -> pd.DataFrame:
    """Put what our LoRA runs lose against exact clipping beside what the paper says.

    Args:
        summary: Of ``summarize_runs``.
        paper: The paper's values.

    Returns:
        For each task of the paper's LoRA table, a row for each budget and method of ours with its
        drop (positive: worse than exact), and an empty one for the paper's method if we did not run
        it: the paper gives a drop for that alone.
    """
    rows = []
    for published in paper[paper["where"] == "LoRA table"].itertuples(index=False):
        task = utility_setting(published.method, published.setting).task
        bound = "less than" in published.setting
        own = runs_of(summary, task, "lora")
        own = own[own["method"].isin(PRIVATE_METHODS)]
        exact = own[own["method"] == "exact"].set_index("epsilon")["mean"]
        for run in own.itertuples(index=False):
            theirs = published.value if run.method == "hutchinson_paper" else float("nan")
            rows.append(
                {
                    "paper_is_bound": bound,
                    "task": task,
                    "epsilon": run.epsilon,
                    "method": run.method,
                    "our_mean": run.mean,
                    "our_std": run.std,
                    "our_seeds": run.seeds,
                    "our_drop": exact.get(run.epsilon, float("nan")) - run.mean,
                    "paper_drop": theirs,
                    "our_task": run.task,
                    "our_max_tokens": run.max_tokens,
                    "our_steps": run.steps,
                }
            )
        if "hutchinson_paper" not in set(own["method"]):
            theirs = {"paper_drop": published.value, "paper_is_bound": bound}
            rows.append({"task": task, "method": "hutchinson_paper", **theirs})
    columns = ["task", "epsilon", "method", "our_mean", "our_std", "our_seeds", "our_drop"]
    columns += ["paper_drop", "paper_is_bound", "our_task", "our_max_tokens", "our_steps"]
    return pd.DataFrame(rows, columns=columns)


def _for_readers(rows: pd.DataFrame) -> pd.DataFrame:
    def text(row: pd.Series) -> dict[str, str]:
        style = TASKS[row["task"]]
        digits = 2 if style.scale == 100 else 4
        ours = OurCells.of(row, style.scale)
        exact = row["method"] == "exact"
        sign = "< " if row["paper_is_bound"] else ""

        def drop(value: float) -> str:
            return "" if pd.isna(value) or exact else f"{value:.{digits}f}"

        return {
            "task": style.label,
            "measure": style.metric_label,
            "ε": "" if pd.isna(row["epsilon"]) else f"{row['epsilon']:g}",
            "method": METHODS[row["method"]].label,
            "ours": ours.score,
            "seeds": ours.seeds,
            "drop against exact": drop(row["our_drop"]),
            "the paper's drop": ""
            if pd.isna(row["paper_drop"])
            else sign + drop(row["paper_drop"]),
            "our run": ours.run,
        }

    return pd.DataFrame([text(row) for _, row in rows.iterrows()])


def _command(arguments: argparse.Namespace) -> None:
    runs = load_runs(arguments.metrics)
    rows = lora_rows(summarize_runs(runs), load_paper_values(arguments.paper))
    write_csv(arguments.csv, rows)
    write_markdown(
        arguments.markdown,
        _for_readers(rows),
        title="Test scores after LoRA fine-tuning",
        note="A drop is exact clipping's score minus the method's, in the unit of the measure. The"
        " paper gives drops without a budget, for BBC as a bound. An offline twin is a much smaller"
        " model on shorter texts, and no reproduction.",
        source=runs_note(runs),
    )


if __name__ == "__main__":
    parser = make_table_parser("lora_table", "Put what LoRA loses beside the paper's table.")
    parser.add_argument("--metrics", required=True, help="CSV of collect_metrics")
    parser.add_argument("--paper", required=True, help="the paper's values")
    raise SystemExit(run_command(parser, _command))
