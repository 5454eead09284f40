"""Joining the processes that torchrun started, and leaving them."""

import os
from datetime import timedelta

import torch
from torch import distributed

# A process that died is noticed at once where its connection breaks; this is for all else.
TIMEOUT_SECONDS = 600.0


def start(*, timeout_seconds: float = TIMEOUT_SECONDS) -> torch.device:
    """Join the processes that torchrun started.

    Args:
        timeout_seconds: How long a process waits for the others before it ends with an error.

    Returns:
        The device of this process: a GPU of its own where there are any, else the CPU.

    Raises:
        ValueError: Not started by torchrun, or more processes than GPUs on this machine.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in os.environ]
    if missing:
        raise ValueError(
            f"start: the environment has no {missing[0]}; start the processes with "
            "`torchrun --standalone --nproc-per-node N ...`"
        )
    backend, device = "gloo", torch.device("cpu")
    if torch.cuda.is_available():
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(
                f"start: process {local} of this machine has no GPU of its own, there are {gpus}; "
                "lower --nproc-per-node"
            )
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", local)
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    return device


def stop() -> None:
    """Leave the other processes."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
