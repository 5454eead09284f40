"""Figure: time and peak memory of a training step in every mode, as ratios to plain training."""

import argparse
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from paper_figures.files import load_result, make_parser, run_command, save_figure
from paper_figures.panels import make_panels
from paper_figures.peers_table import peer_rows
from paper_figures.style import ESTIMATORS

_OPACUS_COLOR = "#D55E00"
_OPACUS_MARKERS = {"opacus_hooks": "X", "opacus_fast": "s", "opacus_ghost": "P"}


def plot_peers(rows: pd.DataFrame) -> Figure:
    """Draw a panel for each setting (down) and length (across), a point for each mode.

    Args:
        rows: Of ``peer_rows``; those without a time or a memory are left out.

    Raises:
        ValueError: None has both.
    """
    shown = rows[rows["time_ratio"].notna() & rows["peak_memory_ratio"].notna()]
    if shown.empty:
        raise ValueError("the comparison with peers has no row with both a time and a memory")
    settings, lengths = list(dict.fromkeys(shown["setting"])), sorted(set(shown["tokens"]))
    figure, axes = make_panels(len(settings), len(lengths), width=5.2)
    entries: dict[str, Line2D] = {}
    for line, setting in zip(axes, settings, strict=True):
        for axis, length in zip(line, lengths, strict=True):
            own = shown[(shown["setting"] == setting) & (shown["tokens"] == length)]
            for _, row in own.iterrows():
                look = _look(row)
                axis.plot(row["time_ratio"], row["peak_memory_ratio"], linestyle="", **look)
                entries[row["label"]] = Line2D([], [], linestyle="", label=row["label"], **look)
            axis.axvline(1, color="black", linewidth=0.8, linestyle=":", zorder=0)
            axis.axhline(1, color="black", linewidth=0.8, linestyle=":", zorder=0)
            axis.set(title=f"{setting.replace('_', ' ')}, {length} tokens")
            axis.set_xlabel("time / time without privacy")
            axis.margins(0.08)
        line[0].set_ylabel("peak memory / without privacy")
    figure.legend(
        handles=list(entries.values()),
        loc="outside right center",
        frameon=False,
        fontsize="small",
    )
    return figure


def _look(row: Any) -> dict[str, Any]:
    """Give a mode's colour by its estimator, and filled markers to two passes."""
    if row["library"] == "torch":
        return {"color": "black", "marker": "*", "markersize": 10}
    if row["library"] == "opacus":
        return {"color": _OPACUS_COLOR, "marker": _OPACUS_MARKERS[row["mode"]], "markersize": 7}
    style = ESTIMATORS[row["estimator"]]
    return {
        "color": style.color,
        "marker": "<" if pd.notna(row["head_rank"]) else style.marker,
        "markersize": 7,
        "markerfacecolor": style.color if row["schedule"] == "two_pass" else "white",
        "markeredgewidth": 1.2,
    }


def _command(arguments: argparse.Namespace) -> None:
    figure = plot_peers(peer_rows(load_result(arguments.peers)))
    save_figure(figure, arguments.png, arguments.pdf)


if __name__ == "__main__":
    parser = make_parser("peers", "Draw time and memory of training steps in every mode.")
    parser.add_argument("--peers", required=True, help="result of dprc compare-peers")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
