"""Collect the result files of the training runs into one table."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from paper_figures.files import load_result, make_parser, run_command, write_csv
from paper_figures.style import TASKS, sort_rows


def collect_runs(runs: Sequence[str], calibrations: Sequence[str]) -> pd.DataFrame:
    """Read training results into one row each.

    Args:
        runs: Paths ``…/<task>/<mode>/<method>/eps<epsilon>/seed<n>/metrics.json``.
        calibrations: Paths ``…/<task>/<method>/eps<epsilon>.json`` of the noise they were run with.

    Returns:
        Columns task, mode, method, epsilon (infinite without privacy), seed, metric, score, delta,
        noise_multiplier, sample_rate, steps, max_tokens, train_seconds, device, code (as JSON).

    Raises:
        ValueError: A result is not valid or of other code, or a run used another noise than its
            calibration says.
    """
    noise = {
        (*Path(path).parts[-3:-1], _epsilon(Path(path).stem)): load_result(path)["privacy"]
        for path in calibrations
    }
    rows = [_row(path) for path in runs]
    for path, row in zip(runs, rows, strict=True):
        calibrated = noise.get((row["task"], row["method"], row["epsilon"]))
        if calibrated and calibrated["noise_multiplier"] != row["noise_multiplier"]:
            raise ValueError(
                f"{path}: trained with noise multiplier {row['noise_multiplier']}, but the"
                f" calibration now gives {calibrated['noise_multiplier']}: start the same command"
                " again, and the run is repeated"
            )
    return sort_rows(pd.DataFrame(rows))


def _epsilon(name: str) -> float:
    return float(name.removeprefix("eps"))


def _row(path: str) -> dict[str, Any]:
    """Read one training result; its path says which run of the configuration it is."""
    task, mode, method, epsilon, seed = Path(path).parts[-6:-1]
    result = load_result(path)
    metrics, privacy = result["metrics"], result["privacy"] or {}
    metric = TASKS[task].metric
    return {
        "task": task,
        "mode": mode,
        "method": method,
        "epsilon": _epsilon(epsilon),
        "seed": int(seed.removeprefix("seed")),
        "metric": metric,
        "score": metrics[f"test_{metric}"],
        "delta": privacy.get("delta"),
        "noise_multiplier": privacy.get("noise_multiplier"),
        "sample_rate": privacy.get("sample_rate"),
        "steps": metrics["steps"],
        "max_tokens": result["config"]["task"]["max_tokens"],
        "train_seconds": metrics["train_seconds"],
        "device": result["environment"]["device"],
        "code": json.dumps(result["environment"]["code"]),
    }


def _command(arguments: argparse.Namespace) -> None:
    write_csv(arguments.out, collect_runs(arguments.runs, arguments.calibrations))


if __name__ == "__main__":
    parser = make_parser("collect_metrics", "Collect training results into one CSV.")
    parser.add_argument("runs", nargs="+", help="metrics.json of training runs")
    parser.add_argument("--calibrations", nargs="*", default=[], help="their calibrations")
    parser.add_argument("--out", required=True, help="CSV to write")
    raise SystemExit(run_command(parser, _command))
