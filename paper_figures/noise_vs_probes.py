"""Figure: noise multiplier against the number of probes, for each sketch and analysis."""

import argparse

import pandas as pd
from matplotlib.figure import Figure

from paper_figures.files import inputs_note, load_result, make_parser, run_command, save_figure
from paper_figures.noise_rows import noise_rows, published_noise, run_note
from paper_figures.panels import (
    draw_methods,
    draw_published,
    hollow,
    make_panels,
    method_legend,
)
from paper_figures.paper_values import load_paper_values
from paper_figures.style import METHODS

# As many panels as can be read side by side: the lowest budget, the middle, the highest.
_PANELS = 3


def plot_noise(rows: pd.DataFrame, paper: pd.DataFrame, run: str = "") -> Figure:
    """Draw a panel for each of a few budgets, exact clipping as a level line.

    Args:
        rows: Of ``noise_rows``.
        paper: The paper's values, drawn hollow.
        run: What the noise is for, of ``run_note``.
    """
    epsilons = panel_epsilons(rows, paper)
    figure, (axes,) = make_panels(1, len(epsilons), width=3.4)
    published = published_noise(paper)
    for axis, epsilon in zip(axes, epsilons, strict=True):
        own = rows[rows["epsilon"] == epsilon]
        draw_methods(axis, own[own["num_probes"].notna()], "num_probes", "noise_multiplier")
        exact = own[own["method"] == "exact"]["noise_multiplier"]
        for value in exact:
            axis.axhline(value, color=METHODS["exact"].color, linewidth=1.4)
        theirs = published[published["epsilon"] == epsilon]
        # An exact norm has no probes: its marker stands where the randomized one's does.
        probes = theirs["num_probes"].max()
        for point in theirs.itertuples(index=False):
            draw_published(axis, probes, point.noise_multiplier, point.method)
        axis.set(title=f"ε = {epsilon:g}", xlabel="probes k")
    axes[0].set_ylabel("noise multiplier σ")
    extra = [hollow("hollow: the paper")] if published["epsilon"].isin(epsilons).any() else []
    figure.suptitle(run, fontsize="medium")
    method_legend(figure, rows["method"], extra)
    return figure


def panel_epsilons(rows: pd.DataFrame, paper: pd.DataFrame) -> list[float]:
    """Choose the budgets that are drawn: the paper's, then ends and middle of the others."""
    there = sorted(rows["epsilon"].unique())
    published = [e for e in published_noise(paper)["epsilon"].unique() if e in there]
    middle = there[len(there) // 2]
    wanted = dict.fromkeys([*published, there[-1], middle, there[0]])
    return sorted(list(wanted)[:_PANELS])


def _command(arguments: argparse.Namespace) -> None:
    result = load_result(arguments.noise)
    figure = plot_noise(noise_rows(result), load_paper_values(arguments.paper), run_note(result))
    save_figure(figure, arguments.png, arguments.pdf, source=inputs_note([result]))


if __name__ == "__main__":
    parser = make_parser("noise_vs_probes", "Draw noise against the number of probes.")
    parser.add_argument("--noise", required=True, help="result of dprc sweep-noise")
    parser.add_argument("--paper", required=True, help="the paper's values")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
