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
from paper_figures.paper_values import load_paper_values, published_scores
from paper_figures.style import METHODS, MODES, TASKS

# Markers at the same epsilon stand side by side on the logarithmic axis: a step for each method,
# ours first and the paper's half a step behind it. No line joins them, since one through places
# beside the epsilon would put one method below another that scores the same.
_STEP = 1.07
# The least part of all possible scores that a panel shows.
_LEAST_SPAN = 0.05
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
    columns = min(len(panels), 2)
    lines = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(4.6 * columns + 0.6, 3.5 * lines + 1.3),
        squeeze=False,
        layout="constrained",
    )
    axes = grid.flat[: len(panels)]
    for unused in grid.flat[len(panels) :]:
        unused.remove()
    published = published_scores(paper)
    for axis, (task, mode) in zip(axes, panels, strict=True):
        own = summary[(summary["task"] == task) & (summary["mode"] == mode)]
        theirs = published[
            (published["task"] == TASKS[task].paper_task) & (published["mode"] == mode)
        ]
        _draw_panel(axis, own, theirs, TASKS[task].scale)
        axis.set(
            title=f"{TASKS[task].label}, {MODES[mode]}",
            xlabel="privacy budget ε",
            ylabel=f"test {TASKS[task].metric_label}",
        )
    shown = published[published["task"].isin({TASKS[task].paper_task for task, _ in panels})]
    _draw_legend(figure, set(summary["method"]), set(shown["method"]))
    return figure


def _draw_panel(axis: Axes, own: pd.DataFrame, theirs: pd.DataFrame, scale: float) -> None:
    """Draw our means, then the paper's values, on an axis that makes no mountain of a molehill."""
    there = {*own["method"], *theirs["method"]} - {"nonprivate"}
    places = {method: place for place, method in enumerate(m for m in METHODS if m in there)}
    _draw_scores(axis, own, places, filled=True)
    _draw_scores(axis, theirs, places, filled=False)
    epsilons = sorted({*own["epsilon"], *theirs["epsilon"]} - {float("inf")})
    axis.set_xscale("log")
    axis.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axis.minorticks_off()
    if epsilons:
        axis.set_xlim(min(epsilons) / 1.5, max(epsilons) * 1.5)
    low, high = axis.get_ylim()
    lack = scale * _LEAST_SPAN - (high - low)
    if lack > 0:
        axis.set_ylim(low - lack / 2, high + lack / 2)


def _draw_scores(axis: Axes, scores: pd.DataFrame, places: dict[str, int], *, filled: bool) -> None:
    """Draw each method at its own side of the epsilon, and training without privacy as a line."""
    middle = len(places) / 2 - 0.25
    for method, style in METHODS.items():
        rows = scores[scores["method"] == method].sort_values("epsilon")
        if rows.empty:
            continue
        if method == "nonprivate":
            axis.axhline(rows["mean"].iloc[0], color=style.color, **_LINES[filled])
            continue
        axis.errorbar(
            rows["epsilon"] * _STEP ** (places[method] - middle + (0.0 if filled else 0.5)),
            rows["mean"],
            yerr=rows["std"].fillna(0.0),
            color=style.color,
            linestyle="none",
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
            marker = _marker(method, filled=method in own)
            entries.append(
                Line2D([], [], color=style.color, linestyle="none", label=style.label, **marker)
            )
    if theirs:
        label = "hollow and dotted: the paper (Llama-3.2-1B, 4096 tokens)"
        hollow = {"marker": "o", "markersize": 6, "markerfacecolor": "white"}
        entries.append(Line2D([], [], color="#555555", label=label, **_LINES[False], **hollow))
    figure.legend(
        handles=entries, loc="outside lower center", ncols=2, frameon=False, fontsize="small"
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
