"""Rows of noise multipliers, and the paper's beside them."""

from typing import Any

import pandas as pd

from paper_figures.paper_values import num_probes, utility_setting

# Which method of the tables a sketch and an analysis belong to.
_METHODS = {
    ("shared", "envelope"): "hutchinson_paper",
    ("shared", "tight"): "hutchinson_shared",
    ("per_sample", "tight"): "hutchinson",
}


def noise_rows(result: dict[str, Any]) -> pd.DataFrame:
    """Read a result of ``dprc sweep-noise``.

    Returns:
        A row for each budget, method and probe count: method, epsilon, num_probes (empty for exact
        clipping), noise_multiplier, noise_overhead over exact clipping.
    """
    rows = [
        {
            "method": _METHODS.get((row["sketch"], row["analysis"]), "exact"),
            **{name: row[name] for name in ("epsilon", "num_probes")},
            **{name: row[name] for name in ("noise_multiplier", "noise_overhead")},
        }
        for row in result["metrics"]["rows"]
    ]
    return pd.DataFrame(rows)


def run_note(result: dict[str, Any]) -> str:
    """Say which training a result of ``dprc sweep-noise`` is about."""
    run = result["config"]
    return f"q = {run['sample_rate']:.4g}, {run['steps']:,} steps, δ = {run['delta']:g}"


def published_noise(paper: pd.DataFrame) -> pd.DataFrame:
    """Select the paper's noise multipliers: method, epsilon, num_probes and noise_multiplier.

    Those of Hutch++ are left out: its tail has the law of Hutchinson's estimate, and so the same.
    """
    rows = []
    for row in paper[paper["quantity"] == "noise_multiplier"].itertuples(index=False):
        setting = utility_setting(row.method, row.setting)
        if setting.method != "hutchpp_paper":
            probes = None if setting.method == "exact" else num_probes(row.method)
            values = {"method": setting.method, "epsilon": setting.epsilon, "num_probes": probes}
            rows.append({**values, "noise_multiplier": row.value})
    return pd.DataFrame(rows, columns=["method", "epsilon", "num_probes", "noise_multiplier"])
