"""Figure: error of estimated norms against the number of probes, on real gradients."""

import argparse
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from paper_figures.files import (
    inputs_note,
    load_result,
    make_parser,
    run_command,
    save_figure,
)
from paper_figures.panels import estimator_legend, logarithmic_ticks, make_panels
from paper_figures.style import ESTIMATORS, RANDOMIZED

ALL_LAYERS = "all layers together"
# An exact norm's only error is rounding, far below the axis of the others.
_FLOOR = 1e-7


def error_rows(result: dict[str, Any]) -> pd.DataFrame:
    """Read the rows of ``dprc measure-norm-error``, quantiles as columns of their own."""
    rows = pd.DataFrame(result["metrics"]["rows"])
    quantiles = pd.json_normalize(rows["norm_error_quantiles"].tolist()).add_prefix("norm_q")
    return rows.join(quantiles)


def plot_norm_error(rows: pd.DataFrame) -> Figure:
    """Draw two panels: deviation of the squared norm with its bound, and the norm's quantiles.

    Args:
        rows: Of ``error_rows``.
    """
    figure, (axes,) = make_panels(1, 2, width=4.2)
    _draw_deviations(axes[0], rows)
    _draw_quantiles(axes[1], rows)
    extra = [
        Line2D([], [], color="black", linestyle="--", label="√(2/k), the most for any gradient"),
        Line2D([], [], color="#666666", linewidth=0.7, label="single layers"),
    ]
    estimator_legend(figure, RANDOMIZED, extra, columns=4)
    return figure


def _draw_deviations(axis: Axes, rows: pd.DataFrame) -> None:
    """Draw each layer thin, the layers together thick, and what theory allows."""
    estimated = rows[rows["estimator"].isin(RANDOMIZED)]
    for (name, layer, _), own in estimated.groupby(["estimator", "layer", "document"]):
        together = layer == ALL_LAYERS
        own = own.sort_values("num_probes")
        axis.plot(
            own["num_probes"],
            own["squared_error_std"].clip(lower=_FLOOR),
            color=ESTIMATORS[name].color,
            marker=ESTIMATORS[name].marker if together else None,
            linewidth=1.6 if together else 0.7,
            alpha=1.0 if together else 0.45,
        )
    probes = np.array(sorted(estimated["num_probes"].unique()), dtype=float)
    axis.plot(probes, np.sqrt(2 / probes), color="black", linestyle="--", linewidth=1.2)
    rounding = rows.loc[rows["estimator"] == "tiled", "squared_error_mean"].abs().max()
    axis.set(
        title=f"squared norm (tiled: within {rounding:.0e})",
        xlabel="probes k",
        ylabel="relative deviation",
        xscale="log",
        yscale="log",
    )
    logarithmic_ticks(axis, probes)


def _draw_quantiles(axis: Axes, rows: pd.DataFrame) -> None:
    """Draw mean and the middle 90 % of the norm's error, all layers together, first document."""
    together = rows[(rows["layer"] == ALL_LAYERS) & (rows["document"] == 0)]
    for name in RANDOMIZED:
        own = together[together["estimator"] == name].sort_values("num_probes")
        style = ESTIMATORS[name]
        axis.plot(
            own["num_probes"], 100 * own["norm_error_mean"], color=style.color, marker=style.marker
        )
        axis.fill_between(
            own["num_probes"],
            100 * own["norm_q0.05"],
            100 * own["norm_q0.95"],
            color=style.color,
            alpha=0.25,
            linewidth=0,
        )
    axis.axhline(0.0, color="black", linewidth=0.8)
    axis.set(
        title="norm, all layers: mean, 5–95 % band",
        xlabel="probes k",
        ylabel="error (%)",
        xscale="log",
    )
    logarithmic_ticks(axis, together["num_probes"])


def _command(arguments: argparse.Namespace) -> None:
    result = load_result(arguments.errors)
    figure = plot_norm_error(error_rows(result))
    save_figure(figure, arguments.png, arguments.pdf, source=inputs_note([result]))


if __name__ == "__main__":
    parser = make_parser("norm_error_vs_probes", "Draw errors of estimated norms against probes.")
    parser.add_argument("--errors", required=True, help="result file of dprc measure-norm-error")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
