"""Table: time and memory of one layer's norm on the device at hand."""

import argparse
from collections.abc import Iterable, Sequence
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
from paper_figures.style import ESTIMATORS, layer_name, sort_layers

COLUMNS = [
    "in_features",
    "out_features",
    "tokens",
    "batch",
    "dtype",
    "device",
    "estimator",
    "num_probes",
    "head_rank",
    "sketch",
    "latency_seconds",
    "latency_low_seconds",
    "latency_high_seconds",
    "repeats",
    "threads",
    "clock",
    "latency_ratio_to_exact",
    "flops",
    "input_bytes",
    "workspace_bytes",
    "peak_memory_bytes",
    "memory_source",
    "device_peak_bytes",
]


def profile_rows(results: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Put the rows of several layers under each other.

    Args:
        results: Result files of ``dprc profile-layer``.

    Returns:
        ``COLUMNS``: quartiles as low and high, and the ratio to the exact norm of the same file
        (empty where it was not measured). Hutch++ with a head of its own is
        ``hutchpp_small_head``.
    """
    rows = []
    for result in results:
        measured = result["metrics"]["rows"]
        exact = [row["latency_seconds"] for row in measured if row["estimator"] == "exact"]
        for row in measured:
            low, high = row["latency_quartiles_seconds"]
            ratio = row["latency_seconds"] / exact[0] if exact else None
            rows.append(
                {
                    **row,
                    "estimator": _name(row),
                    "device": result["environment"].get("device", ""),
                    "latency_low_seconds": low,
                    "latency_high_seconds": high,
                    "latency_ratio_to_exact": ratio,
                }
            )
    return sort_layers(pd.DataFrame(rows, columns=COLUMNS))


def _name(row: dict[str, Any]) -> str:
    return "hutchpp_small_head" if row["head_rank"] is not None else row["estimator"]


def _counts(numbers: Sequence[float]) -> list[str]:
    return ["" if pd.isna(number) else f"{number:.0f}" for number in numbers]


def _mebibytes(sizes: Sequence[float]) -> list[str]:
    return ["" if pd.isna(size) else f"{size / 2**20:,.2f}" for size in sizes]


def _for_readers(rows: pd.DataFrame) -> pd.DataFrame:
    times = zip(
        rows.latency_seconds, rows.latency_low_seconds, rows.latency_high_seconds, strict=True
    )
    ratios = ["" if pd.isna(r) else f"{r:.3f}" for r in rows["latency_ratio_to_exact"]]
    return pd.DataFrame(
        {
            "layer": [layer_name(*layer) for layer in rows[COLUMNS[:2]].to_numpy()],
            "tokens": rows["tokens"],
            "estimator": rows["estimator"].map(lambda name: ESTIMATORS[name].label),
            "head": _counts(rows["head_rank"]),
            "probes": _counts(rows["num_probes"]),
            "median [quartiles] (ms)": [
                f"{1e3 * mid:.2f} [{1e3 * low:.2f}, {1e3 * high:.2f}]" for mid, low, high in times
            ],
            "time / exact": ratios,
            "inputs (MiB)": _mebibytes(rows["input_bytes"]),
            "beyond inputs (MiB)": _mebibytes(rows["workspace_bytes"]),
            "device, by NVML (MiB)": _mebibytes(rows["device_peak_bytes"]),
        }
    )


def _command(arguments: argparse.Namespace) -> None:
    results = [load_result(path) for path in arguments.profiles]
    rows = profile_rows(results)
    write_csv(arguments.csv, rows)
    measured = rows[["device", "dtype", "threads", "clock", "memory_source"]].drop_duplicates()
    notes = [
        f"On {row.device} ({row.threads} CPU threads), {row.dtype}; times by {row.clock}, memory by"
        f" {row.memory_source}."
        for row in measured.itertuples(index=False)
    ]
    write_markdown(
        arguments.markdown,
        _for_readers(rows),
        title="Time and memory of one layer's norm",
        note=" ".join(notes),
        source=inputs_note(results),
    )


if __name__ == "__main__":
    parser = make_table_parser(
        "layer_latency_table", "Tabulate time and memory of one layer's norm."
    )
    parser.add_argument("profiles", nargs="+", help="result files of dprc profile-layer")
    raise SystemExit(run_command(parser, _command))
