"""Peak memory of one mode's training step, measured in a process of its own."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from dprc.profiling.device import measure_peak, resolve_device, synchronize
from dprc.profiling.peer_modes import MODES, make_step
from dprc.profiling.peer_settings import Setting, build_model, make_batch


def peak_bytes(
    mode: str, setting: Setting, tokens: int, *, noise: bool, device: str, threads: int
) -> int:
    """Return the most memory of a step over that of the model, for all modes in the same way.

    On a CPU the resident size of a new process, whose allocator gives freed memory back at once:
    whatever a library allocates counts, by torch or not. On a GPU the peak of torch's allocator.

    Raises:
        RuntimeError: The process failed; the message is the last line that it wrote.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    wanted = {
        "mode": mode,
        "setting": asdict(setting),
        "tokens": tokens,
        "noise": noise,
        "device": device,
        "threads": threads,
    }
    done = subprocess.run(
        [sys.executable, "-m", "dprc.profiling.peer_memory", json.dumps(wanted)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RuntimeError(f"measuring the memory of {mode} at {tokens} tokens failed: {last}")
    return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])


def _measure(wanted: str) -> int:
    options = json.loads(wanted)
    torch.set_num_threads(options["threads"])
    device = resolve_device(options["device"])
    setting, ids = Setting(**options["setting"]), make_batch(options["tokens"]).to(device)
    model = build_model(setting).to(device)
    step = make_step(MODES[options["mode"]], setting, model, ids, noise=options["noise"])
    step.take()  # what is loaded at first use is no memory of a step
    if device.type == "cuda":
        synchronize(device)
        return measure_peak(step.take, device, []).allocated_bytes
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    step.take()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    """Read a size of this process from Linux, VmRSS (now) or VmHWM (peak)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    line = next(line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"peak_bytes": _measure(sys.argv[1])}) + "\n")
