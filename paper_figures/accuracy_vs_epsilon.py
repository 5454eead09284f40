"""Figure: test score against the privacy budget, with the paper's values as hollow markers."""

import argparse
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from paper_figures.accuracy_table import summarize_runs
from paper_figures.files import load_runs, make_parser, run_command, runs_note, save_figure
from paper_figures.paper_values import Setting, load_paper_values, utility_setting
from paper_figures.style import METHODS, MODES, TASKS

# Markers at the same epsilon stand side by side on the logarithmic axis: a step for each method,
# ours first and the paper's half a step behind it.
_STEP = 1.09
_LINES = {
    True: {"linestyle": "--", "linewidth": 1.2},
    False: {"linestyle": ":", "linewidth": 1.4},
}


def plot_accuracy(runs: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw one panel for each task and mode.

    Args:
        runs: The table of ``collect_metrics``.
        paper: The paper's values.

    Returns:
        The figure: means over seeds, error bars of one standard deviation, training without
        privacy as a line.
    """
    sns.set_theme(context="paper", style="whitegrid", font_scale=1.1)
    summary = summarize_runs(runs)
    panels = list(summary[["task", "mode"]].drop_duplicates().itertuples(index=False))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.4 * len(panels) + 1.0, 4.6), squeeze=False, layout="constrained"
    )
    published = _published_scores(paper)
    for axis, (task, mode) in zip(axes[0], panels, strict=True):
        own = summary[(summary["task"] == task) & (summary["mode"] == mode)]
        theirs = published[
            (published["task"] == TASKS[task].paper_task) & (published["mode"] == mode)
        ]
        _draw_panel(axis, own, theirs)
        axis.set(
            title=f"{TASKS[task].label}, {MODES[mode]}",
            xlabel="privacy budget ε",
            ylabel=f"test {TASKS[task].metric_label}",
        )
    shown = published[published["task"].isin({TASKS[task].paper_task for task, _ in panels})]
    _draw_legend(figure, set(summary["method"]), set(shown["method"]))
    return figure


def _published_scores(paper: pd.DataFrame) -> pd.DataFrame:
    """Select the paper's scores and say which task, mode, method and epsilon each belongs to."""
    scores = paper[paper["quantity"].isin({task.metric for task in TASKS.values()})]
    settings = pd.DataFrame(
        [utility_setting(m, s) for m, s in zip(scores["method"], scores["setting"], strict=True)],
        columns=list(Setting._fields),
    )
    return settings.assign(mean=scores["value"].to_numpy(), std=scores["std"].to_numpy())


def _draw_panel(axis: Axes, own: pd.DataFrame, theirs: pd.DataFrame) -> None:
    """Draw our means, then the paper's values."""
    _draw_scores(axis, own, filled=True)
    _draw_scores(axis, theirs, filled=False)
    epsilons = sorted({*own["epsilon"], *theirs["epsilon"]} - {float("inf")})
    axis.set_xscale("log")
    axis.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axis.minorticks_off()
    if epsilons:
        axis.set_xlim(min(epsilons) / 1.5, max(epsilons) * 1.5)


def _draw_scores(axis: Axes, scores: pd.DataFrame, *, filled: bool) -> None:
    """Draw each method at its own side of the epsilon, and training without privacy as a line."""
    for place, (method, style) in enumerate(METHODS.items()):
        rows = scores[scores["method"] == method].sort_values("epsilon")
        if rows.empty:
            continue
        if method == "nonprivate":
            axis.axhline(rows["mean"].iloc[0], color=style.color, **_LINES[filled])
            continue
        axis.errorbar(
            rows["epsilon"] * _STEP ** (place - 2.25 + (0.0 if filled else 0.5)),
            rows["mean"],
            yerr=rows["std"].fillna(0.0),
            color=style.color,
            linestyle="-" if filled else "none",
            linewidth=1.4,
            elinewidth=1.0,
            capsize=2.5,
            **_marker(method, filled=filled),
        )


def _marker(method: str, *, filled: bool) -> dict[str, Any]:
    """Give the marker of a method: filled for ours, hollow for the paper's."""
    style = METHODS[method]
    face = style.color if filled else "white"
    return {"marker": style.marker, "markersize": 6, "markerfacecolor": face}


def _draw_legend(figure: Figure, own: set[str], theirs: set[str]) -> None:
    """Put one legend under all panels: each method once, then what hollow and dotted mean."""
    entries = []
    for method, style in METHODS.items():
        if method == "nonprivate":
            entries.append(Line2D([], [], color=style.color, label=style.label, **_LINES[True]))
        elif method in own | theirs:
            line = "-" if method in own else "none"
            marker = _marker(method, filled=method in own)
            entries.append(
                Line2D([], [], color=style.color, linestyle=line, label=style.label, **marker)
            )
    if theirs:
        label = "hollow and dotted: the paper (Llama-3.2-1B, 4096 tokens)"
        hollow = {"marker": "o", "markersize": 6, "markerfacecolor": "white"}
        entries.append(Line2D([], [], color="#555555", label=label, **_LINES[False], **hollow))
    figure.legend(
        handles=entries, loc="outside lower center", ncols=1, frameon=False, fontsize="small"
    )


def _command(arguments: argparse.Namespace) -> None:
    runs = load_runs(arguments.metrics)
    figure = plot_accuracy(runs, load_paper_values(arguments.paper))
    save_figure(figure, arguments.png, arguments.pdf, source=runs_note(runs))


if __name__ == "__main__":
    parser = make_parser("accuracy_vs_epsilon", "Draw test score against epsilon.")
    parser.add_argument("--metrics", required=True, help="CSV of collect_metrics")
    parser.add_argument("--paper", required=True, help="the paper's values")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
