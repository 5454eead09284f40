"""Figure: simulated peak memory of a whole training step against sequence length."""

import argparse
from collections.abc import Iterator
from typing import Any

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
from paper_figures.panels import logarithmic_ticks, make_panels, plain_numbers
from paper_figures.style import ESTIMATORS, MODELS, SCHEDULES

_LINES = {"two_pass": "-", "book_keeping": "--"}
_PLAIN = {"color": "black", "marker": "", "linestyle": ":", "linewidth": 1.6}


def step_rows(result: dict[str, Any]) -> pd.DataFrame:
    """Read the steps of a result file of ``dprc simulate-memory --model``."""
    return pd.DataFrame(result["metrics"]["rows"])


def plot_step_memory(rows: pd.DataFrame) -> Figure:
    """Draw peaks of all modes: whole, and as a ratio to the step without privacy.

    Args:
        rows: Of ``step_rows``, all of one model, batch and dtype.

    Raises:
        ValueError: No step is without privacy.
    """
    plain = rows[rows["mode"] == "nonprivate"].set_index("tokens")["peak_bytes"]
    if plain.empty:
        raise ValueError("the memory simulated has no step without privacy to compare with")
    figure, (axes,) = make_panels(1, 2, width=4.4)
    entries = draw_step_memory(axes[0], rows)
    for own, look, _ in _looks(rows):
        axes[1].plot(own["tokens"], own["peak_bytes"] / own["tokens"].map(plain), **look)
    axes[1].set(xlabel="tokens T", xscale="log")
    logarithmic_ticks(axes[1], rows["tokens"])
    axes[1].set(ylabel="peak / peak without privacy", title="as a ratio")
    figure.legend(
        handles=entries, loc="outside lower center", ncols=3, frameon=False, fontsize="small"
    )
    return figure


def draw_step_memory(axis: Axes, rows: pd.DataFrame) -> list[Line2D]:
    """Draw the peak of a step in every mode.

    Args:
        axis: Where.
        rows: Of ``step_rows``, all of one model, batch and dtype.

    Returns:
        Entries for a legend.
    """
    entries = []
    for own, look, label in _looks(rows):
        axis.plot(own["tokens"], own["peak_bytes"] / 2**30, **look)
        entries.append(Line2D([], [], label=label, **look))
    first = rows.iloc[0]
    title = (
        f"{MODELS.get(first['model'], first['model'])}, batch {first['batch']}, {first['dtype']}"
    )
    if first["checkpointing"]:
        title += ", checkpointing"
    axis.set(title=title, xlabel="tokens T", xscale="log", yscale="log")
    axis.set_ylabel("peak memory of a step (GiB)")
    logarithmic_ticks(axis, rows["tokens"])
    plain_numbers(axis)
    return entries


def _looks(rows: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, dict[str, Any], str]]:
    """Yield the rows of each mode with how they look and what they are called."""
    order = ["", *ESTIMATORS]
    modes = rows[["mode", "estimator", "schedule"]].drop_duplicates().fillna("")
    # Two passes before one.
    ranks = modes["estimator"].map(order.index) + 0.5 * (modes["schedule"] != "two_pass")
    for mode in modes.loc[ranks.sort_values(kind="stable").index, "mode"]:
        own = rows[rows["mode"] == mode].sort_values("tokens")
        if mode == "nonprivate":
            yield own, _PLAIN, "without privacy"
        elif own["estimator"].notna().any():  # not a forward pass alone
            style = ESTIMATORS[own["estimator"].iloc[0]]
            schedule = own["schedule"].iloc[0]
            look = {"color": style.color, "marker": style.marker, "linewidth": 1.4}
            look |= {"linestyle": _LINES[schedule], "markersize": 5}
            if style is ESTIMATORS["exact"]:  # seen around those that need the same
                look |= {"markersize": 10, "markerfacecolor": "none", "linewidth": 3.0}
            yield own, look, f"{style.label}, {SCHEDULES[schedule]}"


def _command(arguments: argparse.Namespace) -> None:
    result = load_result(arguments.memory)
    figure = plot_step_memory(step_rows(result))
    save_figure(figure, arguments.png, arguments.pdf, source=inputs_note([result]))


if __name__ == "__main__":
    parser = make_parser("step_memory", "Draw the memory of a training step.")
    parser.add_argument("--memory", required=True, help="result of dprc simulate-memory --model")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
