"""The file of a certified law: what ``dprc.accounting.small_head`` reads."""

import hashlib
import json
import platform
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from dprc.accounting.certification.search import STRIKES, Certificate, Effort
from dprc.accounting.puts import PutBound
from dprc.accounting.small_head import smallest_matched_probes

_SOURCES = ("cells.py", "inversion.py", "search.py", "transforms.py")
# Between these strikes the law decides the noise; the gap of a table is the largest one there.
_NEAR = (0.8, 1.3)


def code_hash() -> str:
    """SHA-256 of the sources that a certificate depends on."""
    digest = hashlib.sha256()
    folder = resources.files("dprc.accounting.certification")
    for name in _SOURCES:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def table_of(
    head_rank: int, num_probes: int, effort: Effort, certificate: Certificate
) -> dict[str, Any]:
    """A table's content, as values that JSON can hold."""
    # Above strike 1 a put is stored as what it is more than x − 1: that keeps no more digits.
    excess = np.maximum(certificate.excess, np.where(STRIKES < 1.0, 0.0, 1e-12))
    puts = PutBound(STRIKES, excess + np.maximum(STRIKES - 1.0, 0.0))
    near = (_NEAR[0] <= STRIKES) & (_NEAR[1] >= STRIKES)
    gap = float(np.max(excess[near] / certificate.attained[near]) - 1.0)
    return {
        "head_rank": head_rank,
        "num_probes": num_probes,
        "matched_probes": smallest_matched_probes(puts),
        "gap": round(gap, 5),
        "date": datetime.now(UTC).date().isoformat(),
        "code_hash": code_hash(),
        "parameters": {
            "tolerance": effort.tolerance,
            "bins": list(effort.bins),
            "point_bins": effort.point_bins,
            "cells": certificate.cells,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
        },
        "points": [[round(value, 8) for value in point] for point in certificate.points],
        "strikes": STRIKES.tolist(),
        "excess": excess.tolist(),
        "attained": certificate.attained.tolist(),
    }


def write_table(path: Path, table: dict[str, Any]) -> None:
    """Write a table, one key a line.

    Raises:
        OSError: The file cannot be written.
    """
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
