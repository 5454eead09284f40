"""Result files: written whole or not at all, and saying where they come from."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dprc.provenance import code_record

_REPORTED_PACKAGES = (
    "dprc",
    "torch",
    "numpy",
    "scipy",
    "dp-accounting",
    "transformers",
    "peft",
    "opacus",
)


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file under a temporary name and rename it: readers never see half of it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_json_atomic(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON atomically; refuse NaN and infinities, which JSON does not have."""
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def _git(*words: str) -> str | None:
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@cache
def environment(device: str = "cpu") -> dict[str, Any]:
    """Describe what made a result: commit, versions, machine.

    Args:
        device: The device in words, e.g. ``"cpu"`` or the name of a GPU.

    Returns:
        A dictionary that JSON can hold. ``git_commit`` is None outside a checkout.
    """
    versions: dict[str, str | None] = {}
    for name in _REPORTED_PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
        "python": platform.python_version(),
        "versions": versions,
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "device": device,
    }


def write_result(
    path: str | os.PathLike[str],
    *,
    config: Mapping[str, Any],
    metrics: Mapping[str, Any],
    privacy: Mapping[str, Any] | None,
    valid: bool = True,
    device: str = "cpu",
    processes: int = 1,
    made_by: str | None = None,
) -> None:
    """Write one result file with the five sections that every stage shares.

    Args:
        path: Where the file goes; parent folders are made.
        config: The settings that determine the result.
        metrics: What was measured; units live in the names.
        privacy: epsilon, delta, noise_multiplier, sample_rate, steps, estimator, num_probes,
            sketch, analysis; None for a result that has no guarantee.
        valid: False when the result must not enter a figure.
        device: The device in words.
        processes: How many made it together.
        made_by: A kind of ``dprc.provenance.SOURCES``; the hash of its code is written down as
            ``environment.code``. Figures refuse a result without one.

    Raises:
        ValueError: A value is NaN or infinite; or made_by is unknown.
    """
    code = None if made_by is None else code_record(made_by)
    write_json_atomic(
        path,
        {
            "config": dict(config),
            "metrics": dict(metrics),
            "privacy": None if privacy is None else dict(privacy),
            "environment": {**environment(device), "processes": processes, "code": code},
            "valid": valid,
        },
    )
