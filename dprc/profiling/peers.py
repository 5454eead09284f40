"""Training steps side by side: every mode on the same model and batch, checked and then timed.

Each mode's norms and clipped sum are compared with brute force first; what is wrong or refused is
reported as such and not timed.
"""

import datetime
import gc
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dprc.errors import PrivacyError
from dprc.profiling.device import device_name, resolve_device
from dprc.profiling.peer_memory import peak_bytes
from dprc.profiling.peer_modes import (
    MAX_GRAD_NORM,
    MODES,
    OPACUS_MISSING,
    Mode,
    Step,
    is_missing,
    make_step,
)
from dprc.profiling.peer_settings import BATCH, Setting, Truth, build_model, make_batch
from dprc.profiling.timing import clock_of, time_interleaved

STATUSES = ("ok", "wrong", "refused", "missing")
# Relative errors of float32 sums over large layers reach a few 1e-4 elsewhere.
TOLERANCE = 1e-3
# Two-sided probability of 5 standard deviations of a normal law.
_TAIL = 5.7e-7
_LONGEST_MESSAGE = 160


def compare(
    modes: Sequence[str],
    tokens: Sequence[int],
    settings: Sequence[Setting],
    *,
    rounds: int = 5,
    memory: bool = True,
    noise: bool = True,
    device: str = "cpu",
    threads: int = 1,
    progress_fn: Callable[[str], None] = lambda text: None,
) -> Iterator[list[dict[str, Any]]]:
    """Check, time and weigh the modes.

    Args:
        modes: Names of ``MODES``; ``nonprivate`` is added, for the ratios are to it.
        tokens: Sequence lengths.
        settings: Models and ways to train them.
        rounds: Interleaved rounds; the median of each mode is reported. 0 checks only.
        memory: Whether to measure memory, which starts a process for each row.
        noise: Whether private steps add noise.
        device: ``"cpu"`` or ``"cuda"``.
        threads: Of torch on a CPU.
        progress_fn: Told what is done next.

    Yields:
        For each setting and length, a row for each mode: the setting's and the mode's fields,
        ``tokens``, ``batch``, ``status`` of ``STATUSES``, ``message`` (None if ok),
        ``max_norm_error`` (relative; of a randomized estimator its error in this batch),
        ``clipped_sum_error`` (relative, given its norms), ``time_seconds`` (median, and quartiles
        as ``_low`` and ``_high``), ``peak_bytes`` (over the model), and ``time_ratio`` and
        ``peak_memory_ratio`` to the step without privacy. What was not measured is None.

    Raises:
        ValueError: An unknown mode or device.
        RuntimeError: The memory of a mode other than a peer's could not be measured.
    """
    chosen = choose_modes(modes)
    where = resolve_device(device)
    torch.set_num_threads(threads)
    for setting in settings:
        for length in tokens:
            progress_fn(f"{setting.name}, {length} tokens: checking")
            ids = make_batch(length).to(where)
            rows, steps = _check(chosen, setting, ids, noise=noise, keep=rounds > 0)
            if rounds > 0:
                progress_fn(f"{setting.name}, {length} tokens: timing")
                _time(rows, steps, where, rounds)
            del steps
            gc.collect()
            if memory:
                for row in rows:
                    if row["status"] == "ok":
                        progress_fn(f"{setting.name}, {length} tokens: memory of {row['mode']}")
                        _weigh(row, setting, noise=noise, device=device, threads=threads)
            _add_ratios(rows)
            yield rows


def choose_modes(names: Sequence[str]) -> list[Mode]:
    """Return the modes of names, ``nonprivate`` first.

    Raises:
        ValueError: An unknown name.
    """
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise ValueError(f"--modes: must be of {', '.join(MODES)}, got {unknown[0]!r}")
    return [MODES[name] for name in dict.fromkeys(["nonprivate", *names])]


def describe_measurement(*, device: str, threads: int, noise: bool) -> dict[str, Any]:
    """Say where, when and how times and memory are taken."""
    where = resolve_device(device)
    cuda = where.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": device_name(where) if cuda else _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "clock": clock_of(where),
        "memory_source": "peak of torch's allocator" if cuda else "peak resident size",
        "noise": noise,
        "max_grad_norm": MAX_GRAD_NORM,
        "optimizer": "sgd",
        "dtype": "float32",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _check(
    modes: Sequence[Mode], setting: Setting, ids: torch.Tensor, *, noise: bool, keep: bool
) -> tuple[list[dict[str, Any]], dict[str, Step]]:
    """Compare one step of each mode with the truth; return rows, and the steps of the right ones.

    It is also the first step of each mode, with what is done only once.
    """
    truth = Truth.of(setting, ids)
    rows, steps = [], {}
    for mode in modes:
        row = _new_row(mode, setting, ids.shape[1])
        rows.append(row)
        if is_missing(mode):
            row |= {"status": "missing", "message": OPACUS_MISSING}
            continue
        # A peer may fail in any way; of the engine only a refusal is an answer.
        expected: type[Exception] = Exception if mode.library == "opacus" else PrivacyError
        try:
            model = build_model(setting).to(ids.device)
            step = make_step(mode, setting, model, ids, noise=noise)
            norms, total = step.take_apart()
            if norms is not None:
                row["max_norm_error"] = truth.norm_error(norms)
                row["clipped_sum_error"] = truth.sum_error(total, norms, MAX_GRAD_NORM)
        except expected as error:
            row |= {"status": "refused", "message": first_line(error)}
            continue
        if norms is not None:
            row["message"] = _find_fault(mode, norms, truth, row)
            if row["message"]:
                row["status"] = "wrong"
                continue
        if keep:
            steps[mode.name] = step
    return rows, steps


def _new_row(mode: Mode, setting: Setting, tokens: int) -> dict[str, Any]:
    made = asdict(setting)
    name = made.pop("name")
    own = asdict(mode)
    measured = (
        "max_norm_error",
        "clipped_sum_error",
        "time_ratio",
        "time_seconds",
        "time_seconds_low",
        "time_seconds_high",
        "peak_memory_ratio",
        "peak_bytes",
    )
    return {
        "mode": own.pop("name"),
        **own,
        "setting": name,
        **made,
        "tokens": tokens,
        "batch": BATCH,
        "status": "ok",
        "message": None,
        **dict.fromkeys(measured),
    }


def _find_fault(mode: Mode, norms: torch.Tensor, truth: Truth, row: dict[str, Any]) -> str | None:
    """Say what is wrong with norms and sum; None if nothing is."""
    faults = []
    if mode.num_probes is None:
        if not row["max_norm_error"] <= TOLERANCE:
            faults.append(f"norms off by {_percent(row['max_norm_error'])}")
    else:
        from scipy.stats import chi2

        # No estimate spreads more than that of a gradient of rank one.
        low, high = chi2.ppf((_TAIL / 2, 1 - _TAIL / 2), mode.num_probes) / mode.num_probes
        ratio = (norms.double() / truth.norms).square()
        if not bool(((low <= ratio) & (ratio <= high)).all()):
            faults.append(f"norms off by {_percent(row['max_norm_error'])}, beyond their law")
    if not row["clipped_sum_error"] <= TOLERANCE:
        faults.append(f"clipped sum off by {_percent(row['clipped_sum_error'])}")
    return "; ".join(faults) or None


def _percent(error: float) -> str:
    return f"{100 * error:.2g} %" if error < 1 else f"{100 * error:.0f} %"


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its message, shortened."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[: _LONGEST_MESSAGE - 1]}…"


def _time(
    rows: list[dict[str, Any]], steps: dict[str, Step], device: torch.device, rounds: int
) -> None:
    work = {name: step.take for name, step in steps.items()}
    timings = time_interleaved(work, device, repeats=rounds, warm_up=0)
    for row in rows:
        timing = timings.get(row["mode"])
        if timing is not None:
            row["time_seconds"] = timing.median_seconds
            row["time_seconds_low"], row["time_seconds_high"] = timing.quartiles_seconds


def _weigh(row: dict[str, Any], setting: Setting, **options: Any) -> None:
    try:
        row["peak_bytes"] = peak_bytes(row["mode"], setting, row["tokens"], **options)
    except RuntimeError as error:
        if row["library"] != "opacus":
            raise
        row |= {"status": "refused", "message": first_line(error)}


def _add_ratios(rows: list[dict[str, Any]]) -> None:
    plain = next(row for row in rows if row["mode"] == "nonprivate")
    for row in rows:
        for ratio, value in (("time_ratio", "time_seconds"), ("peak_memory_ratio", "peak_bytes")):
            if row[value] is not None and plain[value]:
                row[ratio] = row[value] / plain[value]
