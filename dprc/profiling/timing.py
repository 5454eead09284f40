"""Times of several pieces of work, taken in turns."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Timing:
    """Repeated times of one piece of work.

    Attributes:
        median_seconds: The middle one.
        quartiles_seconds: The first and the third quarter's end, which show the spread.
        repeats: How many there were.
    """

    median_seconds: float
    quartiles_seconds: tuple[float, float]
    repeats: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        """Summarise times.

        >>> Timing.of([4.0, 1.0, 2.0])
        Timing(median_seconds=2.0, quartiles_seconds=(1.5, 3.0), repeats=3)
        """
        low, middle, high = (
            statistics.quantiles(seconds, n=4, method="inclusive")
            if len(seconds) > 1
            else [seconds[0]] * 3
        )
        return cls(middle, (low, high), len(seconds))


def clock_of(device: torch.device) -> str:
    """Say what times are read from on a device."""
    return "CUDA events" if device.type == "cuda" else "CPU time of the process"


def time_interleaved(
    work: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    repeats: int,
    warm_up: int = WARM_UP_ROUNDS,
) -> dict[str, Timing]:
    """Time pieces of work in turns, so that what slows the machine for a while slows all of them.

    Args:
        work: Functions by name.
        device: Where they run; decides the clock.
        repeats: Rounds; each starts with another piece.
        warm_up: Rounds before, which do not count.

    Returns:
        The timing of each name.

    Raises:
        ValueError: ``repeats`` below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats: must be at least 1, got {repeats}")
    names = list(work)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up + repeats):
        first = number % max(len(names), 1)
        for name in names[first:] + names[:first]:
            taken = _seconds(work[name], device)
            if number >= warm_up:
                seconds[name].append(taken)
    return {name: Timing.of(taken) for name, taken in seconds.items()}


def _seconds(run_fn: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        events: Any = torch.cuda.Event
        start, end = (events(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        run_fn()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
    started = time.process_time()
    run_fn()
    return time.process_time() - started
