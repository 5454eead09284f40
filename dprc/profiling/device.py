"""Peak memory of a piece of work: what torch's allocator says, and what the device itself says.

The allocator's peak is exact and knows only torch. The device's use, polled through NVML, also
knows what libraries take behind torch's back and what other processes take, so it tells whether
the measurement was alone on the device.
"""

import importlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from dprc.profiling.meter import MemoryMeter

DEVICES = ("cpu", "cuda")
# A CUDA context and the driver's own share take up to about a gigabyte and a half.
_UNEXPLAINED_BYTES = 3 << 30
_POLL_SECONDS = 0.001


def resolve_device(name: str) -> torch.device:
    """Return the device of a name.

    Args:
        name: ``"cpu"`` or ``"cuda"``, which is the first visible GPU.

    Raises:
        ValueError: Another name, or no usable GPU.
    """
    if name not in DEVICES:
        raise ValueError(f"device: must be one of {', '.join(DEVICES)}, got {name!r}")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = torch.version.cuda
        why = (
            f"torch is built for CUDA {build} and finds no GPU"
            if build
            else (f"torch {torch.__version__} is built without CUDA")
        )
        raise ValueError(f"device: cuda was asked for, but {why}. Use cpu, or a machine with a GPU")
    return torch.device("cuda", 0)


def device_name(device: torch.device) -> str:
    """Say in words what a device is."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def synchronize(device: torch.device) -> None:
    """Wait until all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- who else is there ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Occupancy:
    """Whether a GPU is free for a measurement.

    Attributes:
        exclusive: Whether no other process was seen on it.
        reason: Why not; None if it is.
    """

    exclusive: bool
    reason: str | None = None


class Nvml:
    """NVML's view of one GPU.

    Args:
        pynvml: The module of ``nvidia-ml-py``, initialised.
        handle: Of the GPU.
    """

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._pynvml, self._handle = pynvml, handle

    @classmethod
    def of(cls, device: torch.device) -> "Nvml | str":
        """Open the view of a CUDA device; a string says why there is none."""
        try:
            pynvml = importlib.import_module("pynvml")
        except ImportError:
            return "nvidia-ml-py is not installed (pip install 'dprc[bench]')"
        # By identity: torch numbers the visible GPUs, NVML all of them.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        try:
            pynvml.nvmlInit()
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except pynvml.NVMLError as error:
            return f"NVML does not answer: {error}"

    def used_bytes(self) -> int:
        """Return the memory in use on the device, by whomever."""
        return int(self._pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def processes(self) -> list[int]:
        """Return the ids of processes that compute on the device."""
        running = self._pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return [int(process.pid) for process in running]


def other_processes(seen: Sequence[int], own: int) -> list[int]:
    """Return the process ids that are not this process.

    In a container NVML may name processes by their ids outside it. Then this process, which has
    a context on the device, is among the seen ones under an id that it does not know.
    """
    others = [pid for pid in seen if pid != own]
    return others if own in seen else others[1:]


def check_occupancy(nvml: Nvml | str, device: torch.device) -> Occupancy:
    """Say whether a CUDA device is this process's alone; it must have a context there already."""
    if isinstance(nvml, str):
        return Occupancy(False, f"{nvml}: other processes on the device would not be seen")
    others = other_processes(nvml.processes(), os.getpid())
    if others:
        return Occupancy(False, f"another process uses the device: {', '.join(map(str, others))}")
    # Processes of other containers may be hidden; their memory is not.
    unexplained = nvml.used_bytes() - torch.cuda.memory_reserved(device)
    if unexplained > _UNEXPLAINED_BYTES:
        return Occupancy(
            False, f"{unexplained / 2**30:.1f} GiB of the device are in use by something else"
        )
    return Occupancy(True)


# --- peaks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeakMemory:
    """Peak of a piece of work, over what was in use before it.

    Attributes:
        allocated_bytes: Of torch's tensors.
        device_bytes: Of the whole device as NVML polls it; None without a GPU or NVML. The
            allocator keeps blocks, so that a second run of the same work may show 0.
    """

    allocated_bytes: int
    device_bytes: int | None


def measure_peak(
    run_fn: Callable[[], object], device: torch.device, inputs: Sequence[torch.Tensor]
) -> PeakMemory:
    """Run something once and return the most memory it held at a time.

    On a GPU the allocator and NVML are asked. On a CPU torch has no counter: each tensor that an
    operator returns is followed to its end, which leaves out what a library takes within one
    operator.

    Args:
        run_fn: The work. Run it before, so that what is loaded at first use does not count.
        device: Where it runs.
        inputs: What it works on, which is there already.
    """
    if device.type != "cuda":
        meter = MemoryMeter()
        meter.hold(inputs, "inputs")
        before = meter.peak().num_bytes
        with meter:
            run_fn()
        return PeakMemory(meter.peak().num_bytes - before, None)
    nvml = Nvml.of(device)
    torch.cuda.empty_cache()  # cached blocks would hide from NVML what the work takes
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    polled: _Poller | None = None
    if isinstance(nvml, str):
        run_fn()
        torch.cuda.synchronize(device)
    else:
        with _Poller(nvml.used_bytes) as polled:
            run_fn()
            torch.cuda.synchronize(device)
    allocated = torch.cuda.max_memory_allocated(device) - before
    return PeakMemory(allocated, None if polled is None else polled.peak - polled.first)


class _Poller:
    """Reads a number in a thread for as long as the block runs, and keeps its largest value."""

    def __init__(self, read_fn: Callable[[], int]) -> None:
        self._read_fn = read_fn
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self.first = self.peak = read_fn()
        self._error: BaseException | None = None

    def _poll(self) -> None:
        try:
            while not self._stop.wait(_POLL_SECONDS):
                self.peak = max(self.peak, self._read_fn())
        except BaseException as error:  # told to who waits for the result
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        # What is still held at the end was held at some time, even if no poll fell into it.
        self.peak = max(self.peak, self._read_fn())
