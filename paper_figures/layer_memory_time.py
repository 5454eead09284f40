"""Figure: memory against time of one layer's norm, every estimator a point."""

import argparse

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from paper_figures.files import inputs_note, load_result, make_parser, run_command, save_figure
from paper_figures.layer_latency_table import profile_rows
from paper_figures.panels import estimator_legend, make_panels, plain_numbers
from paper_figures.style import ESTIMATORS, layer_name

_INPUTS = {"color": "black", "linestyle": ":", "linewidth": 1.2}


def plot_plane(rows: pd.DataFrame) -> Figure:
    """Draw a panel for each layer, at its longest sequence: nearer to the corner is better.

    Args:
        rows: Of ``profile_rows``.
    """
    layers = list(rows[["in_features", "out_features"]].drop_duplicates().itertuples(index=False))
    figure, axes = make_panels(1, len(layers), width=4.0)
    for axis, layer in zip(axes[0], layers, strict=True):
        own = rows[
            (rows["in_features"] == layer.in_features)
            & (rows["out_features"] == layer.out_features)
        ]
        own = own[own["tokens"] == own["tokens"].max()]
        for name, style in ESTIMATORS.items():
            point = own[own["estimator"] == name]
            milliseconds = 1e3 * point["latency_seconds"]
            spread = [
                1e3 * (point["latency_seconds"] - point["latency_low_seconds"]),
                1e3 * (point["latency_high_seconds"] - point["latency_seconds"]),
            ]
            mebibytes = point["workspace_bytes"] / 2**20
            look = {"color": style.color, "marker": style.marker, "markersize": 9}
            axis.errorbar(milliseconds, mebibytes, xerr=spread, linestyle="none", **look)
        axis.axhline(own["input_bytes"].iloc[0] / 2**20, **_INPUTS)
        setting = own.iloc[0]
        axis.set(
            title=f"{layer_name(*layer)}, T = {setting['tokens']}\n{setting['device']},"
            f" {setting['dtype']}",
            xlabel="milliseconds",
            xscale="log",
            yscale="log",
        )
        plain_numbers(axis)
        plain_numbers(axis, horizontal=True)
    axes[0][0].set_ylabel("MiB beyond the inputs")
    estimator_legend(
        figure,
        rows["estimator"],
        [Line2D([], [], label="the inputs themselves", **_INPUTS)],
        columns=3,
        lines=False,
    )
    return figure


def _command(arguments: argparse.Namespace) -> None:
    results = [load_result(path) for path in arguments.profiles]
    figure = plot_plane(profile_rows(results))
    save_figure(figure, arguments.png, arguments.pdf, source=inputs_note(results))


if __name__ == "__main__":
    parser = make_parser("layer_memory_time", "Draw memory against time of one layer's norm.")
    parser.add_argument("profiles", nargs="+", help="result files of dprc profile-layer")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
