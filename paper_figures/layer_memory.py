"""Figure: simulated memory of one layer's norm against tokens, and against probes."""

import argparse

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
from paper_figures.layer_memory_table import as_trained, memory_rows
from paper_figures.panels import draw_lines, estimator_legend, make_panels
from paper_figures.style import ESTIMATORS, RANDOMIZED, layer_name

# The setting of the paper's table, held fixed while the other varies.
PAPER_TOKENS, PAPER_PROBES = 4096, 32
_INPUTS = {"color": "black", "linestyle": ":", "linewidth": 1.2}
_WHOLE = {"linestyle": ":", "linewidth": 1.6}


def plot_memory(rows: pd.DataFrame) -> Figure:
    """Draw two panels for each layer: bytes beyond the inputs against tokens, and against probes.

    Args:
        rows: Of ``memory_rows``.

    Raises:
        ValueError: No row has the paper's number of tokens, or of probes.
    """
    layers = list(rows[["in_features", "out_features"]].drop_duplicates().itertuples(index=False))
    figure, axes = make_panels(2, len(layers), width=2.7)
    mebibytes = rows.assign(mebibytes=rows["workspace_bytes"] / 2**20)
    trained = as_trained(mebibytes)
    by_tokens = trained[trained["num_probes"].isna() | (trained["num_probes"] == PAPER_PROBES)]
    at_length = mebibytes[mebibytes["tokens"] == PAPER_TOKENS]
    if at_length.empty or by_tokens["num_probes"].isna().all():
        raise ValueError(
            f"the memory simulated has no row with {PAPER_TOKENS} tokens, or none with"
            f" {PAPER_PROBES} probes"
        )
    for place, layer in enumerate(layers):
        above, below = axes[0][place], axes[1][place]
        own = _of_layer(by_tokens, layer)
        draw_lines(above, own, "tokens", "mebibytes")
        inputs = own.drop_duplicates("tokens").sort_values("tokens")
        above.plot(inputs["tokens"], inputs["input_bytes"] / 2**20, **_INPUTS)
        above.set(title=f"{layer_name(*layer)}\nk = {PAPER_PROBES}", xlabel="tokens T")
        _draw_probes(below, _of_layer(at_length, layer))
        below.set(title=f"T = {PAPER_TOKENS}", xlabel="probes k")
    for line in axes:
        line[0].set_ylabel("MiB beyond the inputs")
    extra = [
        Line2D([], [], label="the inputs themselves", **_INPUTS),
        Line2D([], [], label="projection matrix formed whole", color="#555555", **_WHOLE),
    ]
    estimator_legend(figure, rows["estimator"], extra, columns=4)
    return figure


def _of_layer(rows: pd.DataFrame, layer: tuple[int, int]) -> pd.DataFrame:
    return rows[(rows["in_features"] == layer[0]) & (rows["out_features"] == layer[1])]


def _draw_probes(axis: Axes, rows: pd.DataFrame) -> None:
    """Draw randomized norms against probes, exact ones as level lines, whole sketches dotted."""
    trained = as_trained(rows)
    sketched = trained[trained["estimator"].isin(RANDOMIZED)]
    draw_lines(axis, sketched, "num_probes", "mebibytes")
    for row in trained[~trained["estimator"].isin(RANDOMIZED)].itertuples(index=False):
        style = "--" if row.estimator == "tiled" else "-"
        color = ESTIMATORS[row.estimator].color
        axis.axhline(row.mebibytes, color=color, linestyle=style, linewidth=1.4)
    whole = rows[(rows["projection"] == "whole") & (rows["sketch"] == "shared")]
    for name in RANDOMIZED:
        own = whole[whole["estimator"] == name].sort_values("num_probes")
        axis.plot(own["num_probes"], own["mebibytes"], color=ESTIMATORS[name].color, **_WHOLE)


def _command(arguments: argparse.Namespace) -> None:
    result = load_result(arguments.memory)
    figure = plot_memory(memory_rows(result))
    save_figure(figure, arguments.png, arguments.pdf, source=inputs_note([result]))


if __name__ == "__main__":
    parser = make_parser("layer_memory", "Draw the memory of one layer's norm.")
    parser.add_argument("--memory", required=True, help="result of dprc simulate-memory --layers")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
