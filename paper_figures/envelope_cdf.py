"""Figure: the paper's envelope, the largest CDF of an estimated squared norm, by rank."""

import argparse
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from paper_figures.files import inputs_note, load_result, make_parser, run_command, save_figure
from paper_figures.panels import make_panels

# Where the envelope leaves the law of rank one.
_CLOSE = (0.98, 1.12)


def envelope_rows(result: dict[str, Any]) -> pd.DataFrame:
    """Read a result of ``dprc envelope``: num_probes, rank, ratio, cdf."""
    return pd.DataFrame(result["metrics"]["rows"])


def plot_envelope(rows: pd.DataFrame) -> Figure:
    """Draw the whole range of ratios, and close to 1.

    Args:
        rows: Of ``envelope_rows``, all of one number of probes.
    """
    figure, (axes,) = make_panels(1, 2, width=4.2)
    ranks = sorted(rows["rank"].unique())
    colors = mpl.colormaps["viridis"]
    entries = []
    for place, rank in enumerate(ranks):
        look = {"color": colors(0.9 * place / max(len(ranks) - 1, 1)), "linewidth": 1.6}
        own = rows[rows["rank"] == rank].sort_values("ratio")
        for axis in axes:
            axis.plot(own["ratio"], own["cdf"], **look)
        label = "rank 1: the law of χ²/k" if rank == 1 else f"rank {rank}"
        entries.append(Line2D([], [], label=label, **look))
    for axis in axes:
        axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        axis.set(xlabel="estimate / truth of the squared norm", ylim=(-0.02, 1.02))
    axes[0].set(ylabel="largest probability to be below", title=f"k = {rows['num_probes'].iloc[0]}")
    axes[1].set(xlim=_CLOSE, title="close to 1")
    figure.legend(
        handles=entries, loc="outside lower center", ncols=3, frameon=False, fontsize="small"
    )
    return figure


def _command(arguments: argparse.Namespace) -> None:
    result = load_result(arguments.envelope)
    figure = plot_envelope(envelope_rows(result))
    save_figure(figure, arguments.png, arguments.pdf, source=inputs_note([result]))


if __name__ == "__main__":
    parser = make_parser("envelope_cdf", "Draw the paper's envelope by rank.")
    parser.add_argument("--envelope", required=True, help="result of dprc envelope")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
