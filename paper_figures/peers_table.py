"""Tables: training steps in every mode, what each costs, and which are refused or wrong.

With ``--write`` the tables go between the marks ``<!-- NAME -->`` and ``<!-- /NAME -->`` of
documents instead, for each name of ``BLOCKS`` that a document has.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dprc.results import write_text_atomic
from paper_figures.files import inputs_note, load_result, make_parser, run_command, write_csv
from paper_figures.style import ESTIMATORS, SCHEDULES

OPACUS = {
    "opacus_hooks": "Opacus, per-sample gradients",
    "opacus_fast": "Opacus, fast gradient clipping",
    "opacus_ghost": "Opacus, ghost clipping",
}
# What a short table shows; the whole one has all modes.
CHOSEN = (
    "nonprivate",
    "hutchpp_r2_k26_book_keeping",
    "hutchpp_r2_k26_two_pass",
    "hutchinson_book_keeping",
    "hutchinson_two_pass",
    "exact_book_keeping",
    "exact_two_pass",
    "tiled_two_pass",
    *OPACUS,
)


def mode_label(row: Any) -> str:
    """Say in words what a row's mode is."""
    if row["mode"] in OPACUS:
        return OPACUS[row["mode"]]
    if row["library"] == "torch":
        return "without privacy"
    name = ESTIMATORS[row["estimator"]].label
    if pd.notna(row["head_rank"]):
        name += f" (r = {row['head_rank']:.0f}, k = {row['num_probes']:.0f})"
    return f"{name}, {SCHEDULES[row['schedule']]}"


def peer_rows(result: dict[str, Any]) -> pd.DataFrame:
    """Read the rows of a result file of ``dprc compare-peers``, with a label each.

    Raises:
        ValueError: It has no rows.
    """
    rows = pd.DataFrame(result["metrics"]["rows"])
    if rows.empty:
        raise ValueError("the comparison with peers has no rows")
    return rows.assign(label=rows.apply(mode_label, axis=1))


def describe(result: dict[str, Any]) -> str:
    """Say on what machine, when and how a comparison was measured."""
    said = result["metrics"]["measurement"]
    versions = result["environment"].get("versions", {})
    libraries = ", ".join(
        f"{name} {versions[name]}"
        for name in ("torch", "transformers", "opacus")
        if versions.get(name)
    )
    noise = "noise included in all libraries" if said["noise"] else "no noise in any library"
    start = f"{said['machine']}, {said['date']}; {libraries}; {said['dtype']}; {noise}"
    if all(row["time_ratio"] is None for row in result["metrics"]["rows"]):
        return f"{start}."
    threads = "1 thread" if said["threads"] == 1 else f"{said['threads']} threads"
    return (
        f"{start}; {said['clock']} on {threads}, and {said['memory_source']} over the model, as "
        "ratios to the step without privacy."
    )


def costs_table(rows: pd.DataFrame, modes: Sequence[str] | None = None) -> pd.DataFrame:
    """Give time, memory and errors of the modes that were timed.

    Args:
        rows: Of ``peer_rows``.
        modes: Which, in that order; all in their own order when None.
    """
    shown = rows[rows["time_ratio"].notna()]
    if modes is not None:
        place = {mode: number for number, mode in enumerate(modes)}
        shown = shown[shown["mode"].isin(place)]
        shown = shown.assign(place=shown["mode"].map(place))
        shown = shown.sort_values(["setting", "tokens", "place"], kind="stable")
    return pd.DataFrame(
        {
            "setting": shown["setting"],
            "tokens": shown["tokens"],
            "step": shown["label"],
            "time": shown["time_ratio"].map("{:.2f}".format),
            "peak memory": shown["peak_memory_ratio"].map("{:.2f}".format, na_action="ignore"),
            "norms off by": shown["max_norm_error"].map("{:.0e}".format, na_action="ignore"),
            "clipped sum off by": shown["clipped_sum_error"].map(
                "{:.0e}".format, na_action="ignore"
            ),
        }
    )


def faults_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Give one row for each mode and message of those that are not right, with its settings."""
    faulty = rows[rows["status"] != "ok"]
    groups = faulty.groupby(["label", "status", "message"], sort=False)["setting"]
    found = groups.agg(lambda names: ", ".join(dict.fromkeys(names))).reset_index()
    return pd.DataFrame(
        {
            "step": found["label"],
            "settings": found["setting"],
            "": found["status"],
            "message": found["message"],
        }
    )


def count_right(rows: pd.DataFrame) -> str:
    """Say how many private modes of each library are right, over all settings and lengths."""
    private = rows[rows["library"] != "torch"]
    right = private.assign(right=private["status"] == "ok").groupby("library")["right"]
    return "; ".join(
        f"{library}: {counted.sum()} of {len(counted)} right" for library, counted in right
    )


def blocks(measured: dict[str, Any], checked: dict[str, Any]) -> dict[str, str]:
    """Write the parts of documents that hold measured numbers, by name."""
    timed, tried = peer_rows(measured), peer_rows(checked)
    headline = timed[(timed["setting"] == "full") & (timed["tokens"] == timed["tokens"].max())]
    short = costs_table(headline, CHOSEN).drop(columns=["setting", "tokens", "clipped sum off by"])
    length = f"Batch {headline['batch'].iloc[0]}, {headline['tokens'].iloc[0]} tokens. "
    return {
        "peers-short": f"{_markdown(short)}\n\n{length}{describe(measured)}",
        "peers-measured": f"{describe(measured)}\n\n{_markdown(costs_table(timed))}",
        "peers-checked": (
            f"{describe(checked)}\n\n{count_right(tried)}.\n\n{_markdown(faults_table(tried))}"
        ),
    }


def fill(text: str, written: dict[str, str]) -> str:
    """Put blocks between their marks in a document.

    Raises:
        ValueError: The document has no mark.
    """
    found = [name for name in written if f"<!-- {name} -->" in text]
    if not found:
        raise ValueError(f"no mark of {', '.join(written)} in the document")
    for name in found:
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        pattern = re.escape(start) + ".*?" + re.escape(end)
        text = re.sub(
            pattern, lambda _, n=name, s=start, e=end: f"{s}\n{written[n]}\n{e}", text, flags=re.S
        )
    return text


def _markdown(table: pd.DataFrame) -> str:
    return table.fillna("").astype(str).to_markdown(index=False, disable_numparse=True)


def _command(arguments: argparse.Namespace) -> None:
    # Documents quote committed measurements, which are not made again at each edit.
    measured, checked = (
        load_result(path, any_code=bool(arguments.write))
        for path in (arguments.measured, arguments.checked)
    )
    written = blocks(measured, checked)
    for path in map(Path, arguments.write):
        write_text_atomic(path, fill(path.read_text(encoding="utf-8"), written))
    if arguments.csv:
        both = {"measured": peer_rows(measured), "checked": peer_rows(checked)}
        write_csv(arguments.csv, pd.concat(both, names=["run"]).reset_index("run"))
    if arguments.markdown:
        title = "# Training steps of this library, of Opacus, and without privacy"
        source = inputs_note([measured, checked])
        faults = written["peers-checked"]
        parts = (title, written["peers-measured"], "# Refused or wrong", faults, source)
        write_text_atomic(arguments.markdown, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    parser = make_parser("peers_table", "Tabulate training steps of this library and of its peers.")
    parser.add_argument("--measured", required=True, help="result of dprc compare-peers")
    parser.add_argument("--checked", required=True, help="the same, of all settings")
    parser.add_argument("--csv", help="CSV to write")
    parser.add_argument("--markdown", help="Markdown table to write")
    parser.add_argument("--write", nargs="*", default=[], help="documents to fill")
    raise SystemExit(run_command(parser, _command))
