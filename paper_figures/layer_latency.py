"""Figure: time of one layer's norm against sequence length, on the device at hand."""

import argparse

import pandas as pd
from matplotlib.figure import Figure

from paper_figures.files import (
    inputs_note,
    load_result,
    make_parser,
    run_command,
    save_figure,
)
from paper_figures.layer_latency_table import profile_rows
from paper_figures.panels import draw_lines, estimator_legend, make_panels
from paper_figures.style import layer_name


def plot_latency(rows: pd.DataFrame) -> Figure:
    """Draw a panel for each layer: medians, with quartiles as error bars.

    Args:
        rows: Of ``profile_rows``.
    """
    layers = list(rows[["in_features", "out_features"]].drop_duplicates().itertuples(index=False))
    figure, axes = make_panels(1, len(layers))
    in_ms = rows.assign(
        median=1e3 * rows["latency_seconds"],
        low=1e3 * rows["latency_low_seconds"],
        high=1e3 * rows["latency_high_seconds"],
    )
    for axis, layer in zip(axes[0], layers, strict=True):
        own = in_ms[
            (in_ms["in_features"] == layer.in_features)
            & (in_ms["out_features"] == layer.out_features)
        ]
        draw_lines(axis, own, "tokens", "median", spread=("low", "high"))
        setting = own.iloc[0]
        axis.set(
            title=f"{layer_name(*layer)}\n{setting['device']}, {setting['dtype']}",
            xlabel="tokens T",
        )
    axes[0][0].set_ylabel("milliseconds")
    estimator_legend(figure, rows["estimator"], columns=3)
    return figure


def _command(arguments: argparse.Namespace) -> None:
    results = [load_result(path) for path in arguments.profiles]
    figure = plot_latency(profile_rows(results))
    save_figure(figure, arguments.png, arguments.pdf, source=inputs_note(results))


if __name__ == "__main__":
    parser = make_parser("layer_latency", "Draw the time of one layer's norm.")
    parser.add_argument("profiles", nargs="+", help="result files of dprc profile-layer")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
