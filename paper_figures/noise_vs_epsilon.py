"""Figure: noise multiplier against the privacy budget, and what it costs over exact clipping."""

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
    plain_numbers,
)
from paper_figures.paper_values import load_paper_values

PAPER_PROBES = 32


def plot_noise(rows: pd.DataFrame, paper: pd.DataFrame, run: str = "") -> Figure:
    """Draw two panels: the noise multiplier, and its ratio to that of exact clipping.

    Args:
        rows: Of ``noise_rows``.
        paper: The paper's values, drawn hollow.
        run: What the noise is for, of ``run_note``.

    Raises:
        ValueError: No row has the paper's number of probes.
    """
    own = rows[rows["num_probes"].isna() | (rows["num_probes"] == PAPER_PROBES)]
    if own["num_probes"].isna().all():
        raise ValueError(f"the noise swept has no row with {PAPER_PROBES} probes")
    own = own.assign(percent=100 * own["noise_overhead"])
    figure, (axes,) = make_panels(1, 2, width=4.2)
    draw_methods(axes[0], own, "epsilon", "noise_multiplier")
    axes[0].set(yscale="log", ylabel="noise multiplier σ", title=f"k = {PAPER_PROBES}")
    plain_numbers(axes[0])
    draw_methods(axes[1], own[own["method"] != "exact"], "epsilon", "percent")
    axes[1].set(ylabel="noise over exact clipping (%)", title="what estimating costs")
    axes[1].set_ylim(bottom=0)
    published = published_noise(paper)
    exact = published[published["method"] == "exact"].set_index("epsilon")["noise_multiplier"]
    for point in published.itertuples(index=False):
        draw_published(axes[0], point.epsilon, point.noise_multiplier, point.method)
        if point.method != "exact" and point.epsilon in exact.index:
            percent = 100 * (point.noise_multiplier / exact[point.epsilon] - 1)
            draw_published(axes[1], point.epsilon, percent, point.method)
    for axis in axes:
        axis.set_xlabel("privacy budget ε")
    figure.suptitle(run, fontsize="medium")
    method_legend(figure, own["method"], [hollow("hollow: the paper")])
    return figure


def _command(arguments: argparse.Namespace) -> None:
    result = load_result(arguments.noise)
    figure = plot_noise(noise_rows(result), load_paper_values(arguments.paper), run_note(result))
    save_figure(figure, arguments.png, arguments.pdf, source=inputs_note([result]))


if __name__ == "__main__":
    parser = make_parser("noise_vs_epsilon", "Draw noise against the privacy budget.")
    parser.add_argument("--noise", required=True, help="result of dprc sweep-noise")
    parser.add_argument("--paper", required=True, help="the paper's values")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
