"""Figure: how much more noise than exact clipping each sketch and analysis needs, run by run."""

import argparse
from collections.abc import Iterable
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from paper_figures.files import inputs_note, load_result, make_parser, run_command, save_figure
from paper_figures.noise_rows import noise_rows
from paper_figures.panels import make_panels, method_legend
from paper_figures.style import METHODS

PAPER_PROBES = 32


def overhead_rows(results: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Collect the overheads of several runs at the paper's number of probes.

    Args:
        results: Of ``dprc sweep-noise``.

    Returns:
        ``noise_rows`` of randomized methods with the run's sample_rate, steps and delta, in the
        order of the results; of budgets, those that all runs have, if there are any.

    Raises:
        ValueError: None has the paper's number of probes.
    """
    parts = []
    for result in results:
        rows = noise_rows(result)
        settings = {name: result["config"][name] for name in ("sample_rate", "steps", "delta")}
        parts.append(rows[rows["num_probes"] == PAPER_PROBES].assign(**settings))
    together = pd.concat(parts, ignore_index=True)
    if together.empty:
        raise ValueError(f"the noise swept has no row with {PAPER_PROBES} probes")
    shared = set.intersection(*(set(part["epsilon"]) for part in parts))
    return together[together["epsilon"].isin(shared or together["epsilon"])]


def plot_overhead(rows: pd.DataFrame) -> Figure:
    """Draw a line of markers for each run and budget.

    Args:
        rows: Of ``overhead_rows``.
    """
    keys = ["sample_rate", "steps", "delta", "epsilon"]
    places = rows[keys].drop_duplicates().reset_index(drop=True)
    figure, ((axis,),) = make_panels(1, 1, width=6.5)
    figure.set_figheight(1.6 + 0.3 * len(places))
    at = rows.merge(places.assign(place=places.index), on=keys)
    for name, style in METHODS.items():
        own = at[at["method"] == name]
        look = {"color": style.color, "marker": style.marker, "linestyle": "none"}
        axis.plot(100 * own["noise_overhead"], own["place"], markersize=7, **look)
    labels = [
        f"q = {p.sample_rate:.3g}, {p.steps:,} steps, δ = {p.delta:.0e}, ε = {p.epsilon:g}".replace(
            "e-0", "e-"
        )
        for p in places.itertuples(index=False)
    ]
    axis.set_yticks(places.index, labels)
    axis.set_ylim(len(places) - 0.5, -0.5)
    # A line between runs of different length.
    changes = places[keys[:3]].ne(places[keys[:3]].shift()).any(axis=1)
    for place in places.index[changes][1:]:
        axis.axhline(place - 0.5, color="#999999", linewidth=0.8)
    axis.set(xlabel=f"more noise than exact clipping (%), k = {PAPER_PROBES}")
    axis.set_xlim(left=0)
    method_legend(figure, rows["method"], columns=1)
    return figure


def _command(arguments: argparse.Namespace) -> None:
    results = [load_result(path) for path in arguments.noise]
    figure = plot_overhead(overhead_rows(results))
    save_figure(figure, arguments.png, arguments.pdf, source=inputs_note(results))


if __name__ == "__main__":
    parser = make_parser("noise_overhead", "Draw what each sketch and analysis costs in noise.")
    parser.add_argument("noise", nargs="+", help="results of dprc sweep-noise")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
