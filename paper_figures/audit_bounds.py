"""Figure: claimed epsilon, and the lower bounds that attacks on the engine showed."""

import argparse

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures.audit_table import audit_rows, load_audits, mechanism_label
from paper_figures.files import inputs_note, make_parser, run_command, save_figure
from paper_figures.panels import make_panels


def plot_audit_bounds(rows: pd.DataFrame) -> Figure:
    """Draw a bar of each claim and a point of what was shown: one step, and one run.

    Args:
        rows: Of ``audit_rows``.
    """
    figure, (axes,) = make_panels(1, 2, width=4.2)
    labels = [mechanism_label(row) for row in rows.itertuples(index=False)]
    for axis, prefix, title in ((axes[0], "", "one noisy step"), (axes[1], "run_", "one run")):
        deltas = rows["delta" if not prefix else "run_delta"].dropna()
        shown = ", ".join(f"{delta:g}" for delta in sorted(set(deltas)))
        _draw(
            axis,
            rows[f"{prefix}epsilon_claimed"],
            rows[f"{prefix}epsilon_lower_bound"],
            labels if not prefix else [""] * len(labels),
        )
        axis.set(title=f"{title}, δ = {shown}" if shown else title, xlabel="ε")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw(axis: Axes, claimed: pd.Series, shown: pd.Series, labels: list[str]) -> None:
    places = np.arange(len(labels))
    axis.barh(places, claimed, height=0.55, color="#56B4E9", alpha=0.5, label="claimed")
    axis.plot(shown, places, "o", color="#D55E00", label="lower bound shown by attack")
    axis.set_yticks(places, labels)
    axis.invert_yaxis()
    axis.set_xlim(left=0)


def _command(arguments: argparse.Namespace) -> None:
    audits = load_audits(arguments.audits)
    figure = plot_audit_bounds(audit_rows(audits))
    source = inputs_note(result for _, result in audits)
    save_figure(figure, arguments.png, arguments.pdf, source=source)


if __name__ == "__main__":
    parser = make_parser("audit_bounds", "Draw claimed epsilon and audited lower bounds.")
    parser.add_argument("audits", nargs="+", help="result files of dprc audit")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
