"""What the figures about one layer share: panels, a line for each estimator, one legend."""

from collections.abc import Iterable

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from paper_figures.style import ESTIMATORS, METHODS


def make_panels(rows: int, columns: int, *, width: float = 3.6) -> tuple[Figure, np.ndarray]:
    """Make a grid of panels in the style of all figures."""
    sns.set_theme(context="paper", style="whitegrid", font_scale=1.1)
    return plt.subplots(
        rows,
        columns,
        figsize=(width * columns + 0.8, 3.3 * rows + 0.7),
        squeeze=False,
        layout="constrained",
    )


def draw_lines(
    axis: Axes, rows: pd.DataFrame, x: str, y: str, *, spread: tuple[str, str] | None = None
) -> None:
    """Draw a line for each estimator on logarithmic axes.

    Args:
        axis: Where.
        rows: With a column ``estimator``.
        x: Column of the horizontal axis; its values become the ticks.
        y: Column of the vertical axis.
        spread: Columns of the lower and the upper end of an error bar.
    """
    for name, style in ESTIMATORS.items():
        own = rows[rows["estimator"] == name].sort_values(x)
        if own.empty:
            continue
        bars = None
        if spread is not None:
            bars = [(own[y] - own[spread[0]]).tolist(), (own[spread[1]] - own[y]).tolist()]
        axis.errorbar(
            own[x],
            own[y],
            yerr=bars,
            color=style.color,
            marker=style.marker,
            # Equal costs lie on each other: the exact norm shows behind the tiled one.
            linestyle="--" if name == "tiled" else "-",
            markersize=3 if name == "tiled" else 5,
            linewidth=1.4,
            elinewidth=1.0,
            capsize=2.5,
        )
    axis.set(xscale="log", yscale="log")
    logarithmic_ticks(axis, rows[x])


def draw_methods(axis: Axes, rows: pd.DataFrame, x: str, y: str) -> None:
    """Draw a line for each clipping method, on a logarithmic horizontal axis.

    Args:
        axis: Where.
        rows: With a column ``method``.
        x: Column of the horizontal axis; its values become the ticks.
        y: Column of the vertical axis.
    """
    for name, style in METHODS.items():
        own = rows[rows["method"] == name].sort_values(x)
        if not own.empty:
            look = {"color": style.color, "marker": style.marker, "markersize": 5}
            axis.plot(own[x], own[y], linewidth=1.4, **look)
    axis.set(xscale="log")
    logarithmic_ticks(axis, rows[x].dropna())


def method_legend(
    figure: Figure, shown: Iterable[str], extra: Iterable[Line2D] = (), *, columns: int = 2
) -> None:
    """Put one legend under all panels: each method once, in order, then what else there is."""
    names = set(shown)
    entries = [
        Line2D([], [], color=style.color, marker=style.marker, label=style.label)
        for name, style in METHODS.items()
        if name in names
    ]
    figure.legend(
        handles=[*entries, *extra],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize="small",
    )


def draw_published(axis: Axes, x: float, y: float, method: str) -> None:
    """Draw one of the paper's values hollow, in its method's colour and marker."""
    style = METHODS[method]
    look = {"color": style.color, "markerfacecolor": "none", "markersize": 9}
    axis.plot(x, y, marker=style.marker, **look)


def hollow(label: str) -> Line2D:
    """Make the legend's entry of the paper's values."""
    look = {"marker": "o", "markersize": 7, "markerfacecolor": "none", "linestyle": "none"}
    return Line2D([], [], color="#555555", label=label, **look)


def logarithmic_ticks(axis: Axes, values: Iterable[float]) -> None:
    """Put a tick at each power of two, 4096 written as 4k; at every other one if they are many."""
    ticks = sorted(set(values))
    ticks = ticks[:: 2 if len(ticks) > 6 else 1]
    axis.set_xticks(ticks, [_short(tick) for tick in ticks])
    axis.minorticks_off()


def plain_numbers(axis: Axes, *, horizontal: bool = False) -> None:
    """Put ticks at 1, 2 and 5 times powers of ten on a log axis, the vertical by default."""
    ticks = axis.xaxis if horizontal else axis.yaxis
    ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    ticks.set_minor_locator(NullLocator())


def _short(number: float) -> str:
    return f"{number / 1024:g}k" if number >= 1024 and number % 1024 == 0 else f"{number:g}"


def estimator_legend(
    figure: Figure,
    shown: Iterable[str],
    extra: Iterable[Line2D] = (),
    *,
    columns: int = 5,
    lines: bool = True,
) -> None:
    """Put one legend under all panels: each estimator once, then whatever else there is."""
    names = set(shown)
    entries = [
        Line2D(
            [],
            [],
            color=style.color,
            marker=style.marker,
            linestyle=("--" if name == "tiled" else "-") if lines else "none",
            label=style.label,
        )
        for name, style in ESTIMATORS.items()
        if name in names
    ]
    figure.legend(
        handles=[*entries, *extra],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize="small",
    )
