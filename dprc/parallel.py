"""A training run on several processes: which they are, and what they do beside training.

``dprc.distributed`` is loaded only where there are several.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dprc.processes import Job, OneProcess, Processes, number_of_processes
from dprc.settings import RunSettings
from dprc.workload import prepare_workload


def started_as_one_of_several() -> bool:
    """Whether the environment says so, as torchrun does."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined_job() -> Iterator[bool]:
    """Join the processes that torchrun started; whether this is the one that reports.

    Raises:
        ValueError: There are several, and not torchrun but something else started them.
    """
    if not started_as_one_of_several():
        yield True
        return
    from dprc import distributed

    distributed.start()
    yield torch.distributed.get_rank() == 0
    distributed.stop()  # not after an error: others may wait for this process, and see it end


def this_job() -> Job:
    """Return the processes of this job, before they train a model together."""
    if number_of_processes() == 1:
        return OneProcess()
    from dprc import distributed

    return distributed.Group()


def join(model: nn.Module, strategy: str) -> Processes:
    """Let all processes of this job train a model; moved to a GPU where the process has one.

    Args:
        model: The same in all.
        strategy: ``"replicate"`` or ``"shard"``.

    Raises:
        PrivacyError: It differs, or cannot be trained so.
    """
    if torch.cuda.is_available():
        model.to(torch.device("cuda", torch.cuda.current_device()))
    if number_of_processes() == 1:
        return OneProcess()
    from dprc import distributed

    return distributed.shard(model) if strategy == "shard" else distributed.replicate(model)


def seed_dropout(seed: int, *, step: int, rank: int) -> None:
    """Seed torch's generators for one step of one process.

    A checkpoint holds the generators of one process only, and a run may go on in more.
    """
    hashed = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(hashed[:4], "little"))


def whole_model(trained: nn.Module, processes: Processes, settings: RunSettings) -> Any:
    """Return a trained model as one process would hold it, in process 0; others get None.

    A sharded one is loaded anew, on the CPU, with the values that were learned.
    """
    if not processes.in_step:
        return trained if processes.rank == 0 else None
    values = {name: processes.whole(value) for name, value in trained.state_dict().items()}
    if processes.rank > 0:
        return None
    model = prepare_workload(settings).model
    model.load_state_dict(values)
    return model
