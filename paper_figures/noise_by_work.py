"""Figure: noise over that of exact clipping, for equal operations of the norm pass."""

import argparse
from collections.abc import Iterable
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures.files import inputs_note, load_result, make_parser, run_command, save_figure
from paper_figures.panels import logarithmic_ticks, make_panels, method_legend, plain_numbers
from paper_figures.style import METHODS

_METHODS = {
    ("hutchinson", "shared", "envelope"): "hutchinson_paper",
    ("hutchinson", "shared", "tight"): "hutchinson_shared",
    ("hutchinson", "per_sample", "tight"): "hutchinson",
    ("hutchpp", "per_sample", "tight"): "hutchpp_small_head",
}
_RUN = ["sample_rate", "steps", "delta"]


def work_rows(results: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Collect the randomized mechanisms of results of ``dprc noise-by-work``.

    Returns:
        Their rows with ``method``, and the run's ``sample_rate``, ``steps`` and ``delta``.
    """
    parts = []
    for result in results:
        rows = pd.DataFrame(result["metrics"]["rows"])
        rows = rows[rows["estimator"] != "exact"]
        kinds = rows[["estimator", "sketch", "analysis"]].itertuples(index=False, name=None)
        run = {name: result["config"][name] for name in _RUN}
        parts.append(rows.assign(method=[_METHODS[kind] for kind in kinds], **run))
    return pd.concat(parts, ignore_index=True)


def plot_noise_by_work(rows: pd.DataFrame) -> Figure:
    """Draw a row of panels for each run, a column for each budget.

    Args:
        rows: Of ``work_rows``.
    """
    runs = rows[_RUN].drop_duplicates().reset_index(drop=True)
    epsilons = sorted(rows["epsilon"].unique())
    figure, axes = make_panels(len(runs), len(epsilons), width=3.2)
    for run, line in zip(runs.itertuples(index=False), axes, strict=True):
        same_run = (rows[_RUN] == pd.Series(run._asdict())).all(axis=1)
        for epsilon, axis in zip(epsilons, line, strict=True):
            _draw(axis, rows[same_run & (rows["epsilon"] == epsilon)])
            axis.set_title(f"q = {run.sample_rate:.3g}, {run.steps:,} steps, ε = {epsilon:g}")
        line[0].set_ylabel("noise over exact clipping (%)")
    for axis in axes[-1]:
        axis.set_xlabel("work, in probes: k, or 3r + k")
    method_legend(figure, rows["method"])
    return figure


def _draw(axis: Axes, rows: pd.DataFrame) -> None:
    """Draw a line for each Hutchinson mechanism, and a point with its (r, k) for each head."""
    for name, own in rows.groupby("method"):
        style = METHODS[str(name)]
        heads = own["head_rank"].notna().any()
        own = own.sort_values("work")
        axis.plot(
            own["work"],
            100 * own["noise_overhead"],
            color=style.color,
            marker=style.marker,
            markersize=8 if heads else 5,
            linestyle="none" if heads else "-",
            linewidth=1.4,
        )
        for row in own[own["head_rank"].notna()].itertuples(index=False):
            at = (row.work, 100 * row.noise_overhead)
            # The text of two heads of equal work stands on both sides.
            side = -1 if row.head_rank == 1 else 1
            axis.annotate(
                f"{row.head_rank:.0f}, {row.num_probes:.0f}",
                at,
                xytext=(6 * side, -2),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                fontsize=6,
            )
    axis.set(xscale="log", yscale="log")
    logarithmic_ticks(axis, rows.loc[rows["head_rank"].isna(), "work"])
    plain_numbers(axis)


def _command(arguments: argparse.Namespace) -> None:
    results = [load_result(path) for path in arguments.noise]
    figure = plot_noise_by_work(work_rows(results))
    save_figure(figure, arguments.png, arguments.pdf, source=inputs_note(results))


if __name__ == "__main__":
    parser = make_parser("noise_by_work", "Draw noise against the work of the norm pass.")
    parser.add_argument("noise", nargs="+", help="results of dprc noise-by-work")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
