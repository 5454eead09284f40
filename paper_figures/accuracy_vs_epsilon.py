"""Figure: test score against the privacy budget, with the paper's values as hollow markers."""

import argparse

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures.accuracy_table import summarize_runs
from paper_figures.files import load_runs, make_parser, run_command, save_figure
from paper_figures.paper_values import load_paper_values, utility_setting
from paper_figures.style import METHODS, MODES, TASKS

# Markers of methods at the same epsilon stand side by side on the logarithmic axis.
_SPREAD = 1.07


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
        1, len(panels), figsize=(4.6 * len(panels) + 0.8, 4.0), squeeze=False, layout="constrained"
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
    _draw_legend(figure, axes[0])
    return figure


def _published_scores(paper: pd.DataFrame) -> pd.DataFrame:
    """Select the paper's scores and say which task, mode, method and epsilon each belongs to."""
    scores = paper[paper["quantity"].isin({task.metric for task in TASKS.values()})]
    settings = pd.DataFrame(
        [utility_setting(m, s) for m, s in zip(scores["method"], scores["setting"], strict=True)]
    )
    return settings.assign(mean=scores["value"].to_numpy(), std=scores["std"].to_numpy())


def _draw_panel(axis: Axes, own: pd.DataFrame, theirs: pd.DataFrame) -> None:
    """Draw our means, then the paper's values."""
    _draw_scores(axis, own, label="{}", filled=True)
    _draw_scores(axis, theirs, label="{}: value of the paper", filled=False)
    epsilons = sorted(set(own["epsilon"]) | set(theirs["epsilon"]))
    ticks = [epsilon for epsilon in epsilons if epsilon != float("inf")]
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{epsilon:g}" for epsilon in ticks])
    axis.minorticks_off()
    if ticks:
        axis.set_xlim(min(ticks) / 1.5, max(ticks) * 1.5)


def _draw_scores(axis: Axes, scores: pd.DataFrame, *, label: str, filled: bool) -> None:
    """Draw each method at its own side of the epsilon, and training without privacy as a line."""
    for place, (method, style) in enumerate(METHODS.items()):
        rows = scores[scores["method"] == method].sort_values("epsilon")
        if rows.empty:
            continue
        name = label.format(style.label)
        if method == "nonprivate":
            axis.axhline(
                rows["mean"].iloc[0],
                color=style.color,
                linestyle="--" if filled else ":",
                linewidth=1.2,
                label=name,
            )
            continue
        axis.errorbar(
            rows["epsilon"] * _SPREAD ** (place - 2),
            rows["mean"],
            yerr=rows["std"].fillna(0.0),
            color=style.color,
            marker=style.marker,
            markersize=6,
            markerfacecolor=style.color if filled else "none",
            linestyle="-" if filled else "none",
            linewidth=1.4,
            elinewidth=1.0,
            capsize=3,
            label=name,
        )


def _draw_legend(figure: Figure, axes: list[Axes]) -> None:
    """Put one legend under all panels."""
    entries = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower center",
        ncols=1 if len(axes) == 1 else 2,
        frameon=False,
        fontsize="small",
    )


def _command(arguments: argparse.Namespace) -> None:
    figure = plot_accuracy(load_runs(arguments.metrics), load_paper_values(arguments.paper))
    save_figure(figure, arguments.png, arguments.pdf)


if __name__ == "__main__":
    parser = make_parser("accuracy_vs_epsilon", "Draw test score against epsilon.")
    parser.add_argument("--metrics", required=True, help="CSV of collect_metrics")
    parser.add_argument("--paper", required=True, help="the paper's values")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
