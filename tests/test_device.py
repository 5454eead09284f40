"""Peaks and occupancy of a device, with a stand-in for NVML; the real one is marked gpu."""

import os
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from dprc.profiling import device as device_module
from dprc.profiling.device import (
    Nvml,
    check_occupancy,
    measure_peak,
    other_processes,
    resolve_device,
)

CUDA = torch.device("cuda", 0)
OWN = os.getpid()


class FakeNvml:
    """NVML's view of a GPU whose use and processes a test decides."""

    def __init__(self, processes=(OWN,), used=1 << 30):
        self.pids, self.used = list(processes), used

    def processes(self):
        return self.pids

    def used_bytes(self):
        return self.used


@pytest.fixture
def fake_cuda(monkeypatch):
    """Let torch's allocator report what a test says, as if there were a GPU."""
    memory = SimpleNamespace(allocated=100, peak=100, reserved=0)

    def reset(device):
        memory.peak = memory.allocated

    for name, value in {
        "empty_cache": lambda: None,
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": reset,
        "memory_allocated": lambda device: memory.allocated,
        "max_memory_allocated": lambda device: memory.peak,
        "memory_reserved": lambda device: memory.reserved,
        "get_device_properties": lambda device: SimpleNamespace(uuid="1234"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return memory


@pytest.fixture
def fake_pynvml(monkeypatch):
    """Put a stand-in for the module of nvidia-ml-py in its place."""

    class NVMLError(Exception):
        pass

    def handle(uuid):
        if uuid != "GPU-1234":
            raise NVMLError("Not Found")
        return uuid

    module = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=77),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=5)],
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_a_gpu_that_is_not_there_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"cuda was asked for, but torch .* Use cpu"):
        resolve_device("cuda")
    with pytest.raises(ValueError, match="must be one of cpu, cuda, got 'tpu'"):
        resolve_device("tpu")
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("seen", "others"),
    [
        ([7], []),  # this process
        ([7, 9], [9]),
        ([], []),  # a driver that shows none
        ([31], []),  # this process, as seen from outside its container
        ([31, 32], [32]),
    ],
)
def test_other_processes_are_told_from_this_one(seen, others):
    assert other_processes(seen, own=7) == others


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (FakeNvml(), None),
        (FakeNvml([OWN, OWN + 1]), f"another process uses the device: {OWN + 1}"),
        (FakeNvml(used=9 << 30), "9.0 GiB of the device are in use by something else"),
        ("NVML does not answer: no", "would not be seen"),
    ],
    # Not from the values: the number of this process differs between pytest's workers.
    ids=["alone", "another process", "memory in use", "no answer"],
)
def test_a_device_in_use_is_not_exclusive(fake_cuda, nvml, reason):
    occupancy = check_occupancy(nvml, CUDA)
    assert occupancy.exclusive is (reason is None)
    assert reason is None or reason in occupancy.reason


def test_what_this_process_itself_reserved_counts_for_nobody_else(fake_cuda):
    fake_cuda.reserved = 8 << 30
    assert check_occupancy(FakeNvml(used=9 << 30), CUDA).exclusive


def test_nvml_is_asked_about_the_gpu_that_torch_means(fake_cuda, fake_pynvml, monkeypatch):
    nvml = Nvml.of(CUDA)
    assert nvml.used_bytes() == 77
    assert nvml.processes() == [5]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="9")
    )
    assert Nvml.of(CUDA) == "NVML does not answer: Not Found"


def test_a_missing_nvml_is_said_and_not_hidden(fake_cuda, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes its import fail
    assert "pip install" in Nvml.of(CUDA)
    assert measure_peak(lambda: None, CUDA, []).device_bytes is None
    assert not check_occupancy(Nvml.of(CUDA), CUDA).exclusive


def test_both_peaks_are_over_what_was_in_use_before(fake_cuda, monkeypatch):
    nvml = FakeNvml(used=1000)
    polled = {5000: threading.Event(), 2000: threading.Event()}
    nvml.used_bytes = lambda: (
        (polled[nvml.used].set() if nvml.used in polled else None) or nvml.used
    )
    monkeypatch.setattr(device_module.Nvml, "of", lambda device: nvml)

    def work():
        fake_cuda.peak = 350
        for used in (5000, 2000):  # only the thread can see the first, and must remember it
            nvml.used = used
            assert polled[used].wait(10)

    peak = measure_peak(work, CUDA, [])
    assert peak.allocated_bytes == 250
    assert peak.device_bytes == 4000


def test_an_error_of_the_poll_is_not_lost(fake_cuda, monkeypatch):
    readings = iter([1])
    failed = threading.Event()

    def used_bytes():
        for value in readings:
            return value
        failed.set()
        raise RuntimeError("GPU is lost")

    monkeypatch.setattr(
        device_module.Nvml, "of", lambda device: SimpleNamespace(used_bytes=used_bytes)
    )
    with pytest.raises(RuntimeError, match="GPU is lost"):
        measure_peak(lambda: failed.wait(10), CUDA, [])


def test_on_a_cpu_the_peak_is_of_tensors_alive_at_once():
    given = torch.zeros(50, 40)

    def work():
        first = torch.ones(1000)  # 4000 bytes
        second = first * 2  # 8000 in all
        del first
        third = given.t() @ given  # 4000 + 6400 = 10400
        del second
        return third + 1  # 12800

    assert measure_peak(work, torch.device("cpu"), [given]).allocated_bytes == 12800
