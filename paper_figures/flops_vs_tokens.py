"""Figure: operations of one layer's norm against sequence length, and against probes."""

import argparse
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from paper_figures.files import (
    inputs_note,
    load_result,
    make_parser,
    run_command,
    save_figure,
)
from paper_figures.flops_table import flops_rows
from paper_figures.panels import draw_lines, estimator_legend, make_panels
from paper_figures.style import layer_name

# The setting of the paper's table, held fixed while the other varies.
PAPER_TOKENS, PAPER_PROBES = 4096, 32


def plot_flops(rows: pd.DataFrame) -> Figure:
    """Draw two panels for each layer: operations against tokens above, against probes below.

    Args:
        rows: Of ``flops_rows``.

    Raises:
        ValueError: No row has the paper's number of tokens, or of probes.
    """
    layers = _distinct(rows)
    figure, axes = make_panels(2, len(layers), width=2.7)
    views = (
        ("tokens", "tokens T", "num_probes", "k", PAPER_PROBES),
        ("num_probes", "probes k", "tokens", "T", PAPER_TOKENS),
    )
    for line, (x, label, fixed, symbol, value) in zip(axes, views, strict=True):
        chosen = rows[rows[fixed] == value]
        if chosen.empty:
            raise ValueError(f"the operations counted have no row with {fixed} = {value}")
        for axis, layer in zip(line, layers, strict=True):
            own = chosen[
                (chosen["in_features"] == layer.in_features)
                & (chosen["out_features"] == layer.out_features)
            ]
            draw_lines(axis, own.assign(gflop=own["flops_counted"] / 1e9), x, "gflop")
            axis.set(title=f"{layer_name(*layer)}\n{symbol} = {value}", xlabel=label)
        line[0].set_ylabel("GFLOP per sample")
    estimator_legend(figure, rows["estimator"])
    return figure


def _distinct(rows: pd.DataFrame) -> list[Any]:
    """List the layers, each only one way round: operations do not tell inputs from outputs."""
    layers = rows[["in_features", "out_features"]].drop_duplicates()
    sides = pd.Series([tuple(sorted(layer)) for layer in layers.to_numpy()], index=layers.index)
    return list(layers[~sides.duplicated()].itertuples(index=False))


def _command(arguments: argparse.Namespace) -> None:
    result = load_result(arguments.flops)
    figure = plot_flops(flops_rows(result))
    save_figure(figure, arguments.png, arguments.pdf, source=inputs_note([result]))


if __name__ == "__main__":
    parser = make_parser("flops_vs_tokens", "Draw operations against tokens and probes.")
    parser.add_argument("--flops", required=True, help="result file of dprc count-flops")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
