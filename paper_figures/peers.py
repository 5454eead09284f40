"""Figure: time and peak memory of a training step in every mode, as ratios to plain training."""

import argparse
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from paper_figures.files import inputs_note, load_result, make_parser, run_command, save_figure
from paper_figures.panels import make_panels
from paper_figures.peers_table import peer_rows
from paper_figures.style import ESTIMATORS, MODES

_OPACUS_COLOR = "#AA4499"
_OPACUS_MARKERS = {"opacus_hooks": "X", "opacus_fast": "s", "opacus_ghost": "P"}


def plot_peers(rows: pd.DataFrame) -> Figure:
    """Draw a line of two panels for each setting and length.

    Left a point for each mode, time against memory; right its time on a line of its own, with
    quartiles, since modes that need the same memory lie on each other.

    Args:
        rows: Of ``peer_rows``; those without a time or a memory are left out.

    Raises:
        ValueError: None has both.
    """
    shown = rows[rows["time_ratio"].notna() & rows["peak_memory_ratio"].notna()]
    if shown.empty:
        raise ValueError("the comparison with peers has no row with both a time and a memory")
    groups = list(shown.groupby(["setting", "tokens"], sort=False))
    figure, axes = make_panels(len(groups), 2, width=4.6)
    for (plane, times), ((_, length), own) in zip(axes, groups, strict=True):
        own = own.sort_values("time_ratio", ascending=False)
        plain = own.loc[own["mode"] == "nonprivate", "time_seconds"].iloc[0]
        for place, (_, row) in enumerate(own.iterrows()):
            look = {"linestyle": "", **_look(row)}
            plane.plot(row["time_ratio"], row["peak_memory_ratio"], **look)
            ends = [row["time_seconds_low"] / plain, row["time_seconds_high"] / plain]
            times.plot(ends, [place, place], color="black", linewidth=1.0)
            times.plot(row["time_ratio"], place, **look)
        times.set_yticks(range(len(own)), own["label"], fontsize="small")
        for draw in (plane.axvline, plane.axhline, times.axvline):
            draw(1, color="black", linewidth=1.0, linestyle=":", zorder=1.5)
        plane.set(
            title=f"{_setting_label(own.iloc[0])}, {length} tokens",
            xlabel="time / time without privacy",
            ylabel="peak memory / without privacy",
        )
        times.set(title="time alone, with quartiles", xlabel="time / time without privacy")
        plane.margins(0.08)
    return figure


def _look(row: Any) -> dict[str, Any]:
    """Give a mode's colour by its estimator, and filled markers to two passes."""
    if row["library"] == "torch":
        return {"color": "black", "marker": "*", "markersize": 10}
    if row["library"] == "opacus":
        return {"color": _OPACUS_COLOR, "marker": _OPACUS_MARKERS[row["mode"]], "markersize": 7}
    name = row["estimator"] if pd.isna(row["head_rank"]) else "hutchpp_small_head"
    style, filled = ESTIMATORS[name], row["schedule"] == "two_pass"
    return {
        "color": style.color,
        "marker": style.marker,
        "markersize": 8,
        "markerfacecolor": style.color if filled else "white",
        "markeredgecolor": "white" if filled else style.color,
        "markeredgewidth": 0.8 if filled else 1.3,
    }


def _setting_label(row: Any) -> str:
    """Say in words what a row's model is and how it is trained."""
    parts = [MODES[row["training"]]]
    if row["architecture"] != "llama":
        parts.insert(0, row["architecture"])
    if row["tied"]:
        parts.append("tied head")
    if row["checkpointing"]:
        parts.append(f"{row['checkpointing'].replace('_', '-')} checkpointing")
    if row["micro_batches"] > 1:
        parts.append(f"{row['micro_batches']} micro-batches")
    return ", ".join(parts)


def _command(arguments: argparse.Namespace) -> None:
    result = load_result(arguments.peers)
    figure = plot_peers(peer_rows(result))
    save_figure(figure, arguments.png, arguments.pdf, source=inputs_note([result]))


if __name__ == "__main__":
    parser = make_parser("peers", "Draw time and memory of training steps in every mode.")
    parser.add_argument("--peers", required=True, help="result of dprc compare-peers")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
