"""Table: claimed epsilon, and what attacks on the engine could show of it."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from paper_figures.files import (
    inputs_note,
    load_result,
    make_table_parser,
    run_command,
    write_csv,
    write_markdown,
)
from paper_figures.style import ESTIMATORS, RANDOMIZED


def audit_rows(results: Iterable[tuple[str, dict[str, Any]]]) -> pd.DataFrame:
    """Make a row of each audit.

    Args:
        results: Name and result file of ``dprc audit``.

    Returns:
        The mechanism, claims and bounds of one step and of a run (empty where there was no run),
        and the detectors that asked.
    """
    rows = []
    for name, result in results:
        found, config = result["metrics"], result["config"]
        randomized = config["estimator"] in RANDOMIZED
        run = found["one_run"] or {}
        rows.append(
            {
                "mechanism": name,
                "estimator": config["estimator"],
                "num_probes": config["num_probes"] if randomized else None,
                "head_rank": config["head_rank"],
                "sketch": config["sketch"] if randomized else None,
                "sample_rate": config["sample_rate"],
                "delta": found["delta"],
                "epsilon_claimed": found["epsilon_claimed"],
                "epsilon_lower_bound": found["epsilon_lower_bound"],
                "tightness": found["tightness"],
                "trials": config["trials"],
                "run_delta": run.get("delta"),
                "run_epsilon_claimed": run.get("epsilon_claimed"),
                "run_epsilon_lower_bound": run.get("epsilon_lower_bound"),
                "confidence": found["confidence"],
                "detectors": len(found["detectors"]),
            }
        )
    return pd.DataFrame(rows)


def load_audits(paths: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """Read result files; an audit is called as its file."""
    return [(Path(path).stem, load_result(path)) for path in paths]


def mechanism_label(row: Any) -> str:
    """Write a mechanism as figures and tables call it."""
    parts = [ESTIMATORS[row.estimator].label]
    if row.estimator in RANDOMIZED:
        parts.append(f"k = {row.num_probes:.0f}")
        if not pd.isna(row.head_rank):
            parts.append(f"head {row.head_rank:.0f}")
        parts.append(row.sketch.replace("_", "-"))
    return ", ".join([*parts, f"q = {row.sample_rate:g}"])


def _for_readers(rows: pd.DataFrame) -> pd.DataFrame:
    def bound(claimed: float, shown: float) -> str:
        return "" if pd.isna(claimed) else f"{shown:.2f} of {claimed:.2f}"

    each = list(rows.itertuples(index=False))
    return pd.DataFrame(
        {
            "mechanism": [mechanism_label(row) for row in each],
            "one step: ε shown of claimed": [
                bound(row.epsilon_claimed, row.epsilon_lower_bound) for row in each
            ],
            "share": [f"{100 * row.tightness:.0f} %" for row in each],
            "trials": rows["trials"],
            "one run: ε shown of claimed": [
                bound(row.run_epsilon_claimed, row.run_epsilon_lower_bound) for row in each
            ],
            "detectors that found nothing": rows["detectors"],
        }
    )


def _command(arguments: argparse.Namespace) -> None:
    audits = load_audits(arguments.audits)
    rows = audit_rows(audits)
    write_csv(arguments.csv, rows)
    deltas = ", ".join(f"{delta:g}" for delta in sorted(set(rows["delta"])))
    run_deltas = ", ".join(f"{delta:g}" for delta in sorted(set(rows["run_delta"].dropna())))
    note = f"Steps at δ = {deltas}" + (f", runs at δ = {run_deltas}" if run_deltas else "")
    confidence = " or ".join(f"{value:g}" for value in sorted(set(rows["confidence"])))
    write_markdown(
        arguments.markdown,
        _for_readers(rows),
        title="What attacks on the engine could show",
        note=f"{note}. All bounds of a row hold together with confidence {confidence}.",
        source=inputs_note(result for _, result in audits),
    )


if __name__ == "__main__":
    parser = make_table_parser("audit_table", "Tabulate claimed epsilon and audited lower bounds.")
    parser.add_argument("audits", nargs="+", help="result files of dprc audit")
    raise SystemExit(run_command(parser, _command))
