"""How long one layer's norm takes and how much memory, estimator by estimator on one device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dprc.estimators import Estimator
from dprc.profiling.device import (
    Nvml,
    Occupancy,
    check_occupancy,
    measure_peak,
    synchronize,
)
from dprc.profiling.flops import LayerShape
from dprc.profiling.timing import clock_of, time_interleaved

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class LayerProfile:
    """What ``profile_layer`` found.

    Attributes:
        rows: One for each estimator.
        occupancy: Whether the device was this process's alone.
    """

    rows: list[dict[str, Any]]
    occupancy: Occupancy


def profile_layer(
    shape: LayerShape,
    chosen: Sequence[Estimator],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    repeats: int = 5,
    threads: int = 1,
    seed: int = 0,
) -> LayerProfile:
    """Time the squared norms of one layer's per-sample gradients and weigh what they take.

    Args:
        shape: Of the layer, its batch and its sequences.
        chosen: The estimators, each once; one of them with other options is another.
        device: Where to run.
        dtype: Of activations and output gradients.
        repeats: Interleaved rounds that are timed.
        threads: Of the CPU. With several, CPU time counts their waiting for each other too.
        seed: Of the inputs (standard normal) and the sketches.

    Returns:
        For each estimator a row with its options and the shape, and

        * ``latency_seconds``, the median, and ``latency_quartiles_seconds``;
        * ``flops``, by the closed formula;
        * ``input_bytes`` of activations and output gradients, ``workspace_bytes`` at the peak
          beyond them, and ``peak_memory_bytes``, their sum; ``memory_source`` says who counted;
        * ``device_peak_bytes``, what NVML saw the device's use grow by; None without it.

    Raises:
        ValueError: No estimator, one twice, more probes than the layer's larger side, fewer than
            one repeat or thread, or a workspace that the device has no memory for.
    """
    if threads < 1:
        raise ValueError(f"threads: must be at least 1, got {threads}")
    _check(shape, chosen, dtype, device)
    inputs = _inputs(shape, dtype, device, seed)
    before = _occupancy(device)
    # Keys of the sketches; on the CPU whatever the device.
    generator = torch.Generator().manual_seed(seed)
    activations, grads = inputs

    def work(estimator: Estimator) -> Callable[[], object]:
        return lambda: estimator.squared_norm(activations, grads, generator)

    functions = {repr(estimator): work(estimator) for estimator in chosen}
    peaks = {}
    with _cpu_threads(threads):
        for name, run_fn in functions.items():
            run_fn()  # loads libraries, and whatever else is made at first use
            peaks[name] = measure_peak(run_fn, device, inputs)
        timings = time_interleaved(functions, device, repeats=repeats)
    occupancy = before if not before.exclusive else _occupancy(device)
    input_bytes = sum(tensor.nbytes for tensor in inputs)
    rows = []
    for estimator in chosen:
        timing, peak = timings[repr(estimator)], peaks[repr(estimator)]
        rows.append(
            {
                "estimator": estimator.name,
                **_options(estimator),
                **asdict(shape),
                "dtype": str(dtype).removeprefix("torch."),
                "latency_seconds": timing.median_seconds,
                "latency_quartiles_seconds": list(timing.quartiles_seconds),
                "repeats": timing.repeats,
                "threads": threads,
                "clock": clock_of(device),
                "flops": estimator.flops(
                    shape.batch, shape.tokens, shape.in_features, shape.out_features
                ),
                "input_bytes": input_bytes,
                "workspace_bytes": peak.allocated_bytes,
                "peak_memory_bytes": input_bytes + peak.allocated_bytes,
                "memory_source": _memory_source(device),
                "device_peak_bytes": peak.device_bytes,
            }
        )
    return LayerProfile(rows, occupancy)


@contextmanager
def _cpu_threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _memory_source(device: torch.device) -> str:
    return "CUDA allocator" if device.type == "cuda" else "live tensors"


def _options(estimator: Estimator) -> dict[str, Any]:
    """Return the options of a randomized estimator; None where it has none."""
    names = ("num_probes", "sketch", "head_rank")
    return {name: getattr(estimator, name, None) for name in names}


def _check(
    shape: LayerShape, chosen: Sequence[Estimator], dtype: torch.dtype, device: torch.device
) -> None:
    if not chosen or len({repr(estimator) for estimator in chosen}) < len(chosen):
        names = [estimator.name for estimator in chosen]
        raise ValueError(f"estimator: must be one or several different ones, got {names}")
    larger = max(shape.in_features, shape.out_features)
    free = free_bytes(device)
    inputs = shape.batch * shape.tokens * (shape.in_features + shape.out_features) * dtype.itemsize
    for estimator in chosen:
        count = getattr(estimator, "num_probes", 0)
        if count > larger:
            raise ValueError(
                f"num_probes: a {shape.in_features}x{shape.out_features} gradient has no more than "
                f"{larger} rows or columns to project, got {count}"
            )
        workspace = estimator.workspace_bytes(
            shape.batch, shape.tokens, shape.in_features, shape.out_features, dtype
        )
        if inputs + workspace > free:
            raise ValueError(
                f"tokens: {estimator.name} needs {(inputs + workspace) / 2**30:.1f} GiB for "
                f"{shape.batch} x {shape.tokens} tokens, and {free / 2**30:.1f} GiB are free. Use "
                "fewer tokens, or leave that estimator out"
            )


def free_bytes(device: torch.device) -> int:
    """Return the memory that new tensors can take on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(line for line in lines if line.startswith("MemAvailable:"))
    return int(available.split()[1]) * 1024


def _inputs(
    shape: LayerShape, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make activations (B, T, in) and output gradients (B, T, out)."""
    generator = torch.Generator(device=device).manual_seed(seed)
    sides = (shape.in_features, shape.out_features)
    activations, grads = (
        torch.randn(shape.batch, shape.tokens, side, generator=generator, device=device).to(dtype)
        for side in sides
    )
    synchronize(device)
    return activations, grads


def _occupancy(device: torch.device) -> Occupancy:
    if device.type != "cuda":
        return Occupancy(True)  # CPU time is this process's own
    return check_occupancy(Nvml.of(device), device)
