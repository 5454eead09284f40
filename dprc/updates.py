"""How losses become an update of the model: with privacy through the engine, or plainly."""

from typing import Any, Protocol

import torch

from dprc.engine import PrivacyEngine
from dprc.noise import Stream
from dprc.processes import OneProcess, Processes
from dprc.sampling import PlainSampler, PoissonLoader
from dprc.workload import Workload


class Update(Protocol):
    """What the training loop asks for; one of the two below."""

    def loader(self, workload: Workload, *, steps: int, max_physical_batch: int) -> PoissonLoader:
        """Return the logical batches of the next steps."""

    def backward(self, losses: torch.Tensor) -> None:
        """Take the losses (B,) of one physical batch."""

    def step(self) -> None:
        """Step the optimizer, once for each logical batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two steps, as plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""


class PrivateUpdate:
    """Clipped and noised by an engine.

    Args:
        engine: Holds the model.
    """

    def __init__(self, engine: PrivacyEngine) -> None:
        self.engine = engine
        self.backward, self.step = engine.backward, engine.step
        self.state_dict, self.load_state_dict = engine.state_dict, engine.load_state_dict

    def loader(self, workload: Workload, *, steps: int, max_physical_batch: int) -> PoissonLoader:
        """Return the logical batches of the next steps."""
        return self.engine.poisson_loader(
            workload.train,
            steps=steps,
            max_physical_batch=max_physical_batch,
            collate_fn=workload.train.collate,
        )


class PlainUpdate:
    """The mean gradient over the expected batch size, with the sampling of a private run.

    Args:
        optimizer: Of the run.
        stream: Samples are drawn from it.
        sample_rate: Inclusion probability q.
        expected_batch_size: What sums are divided by.
        processes: Those that train the model together; None for this one alone.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stream: Stream,
        *,
        sample_rate: float,
        expected_batch_size: float,
        processes: Processes | None = None,
    ) -> None:
        self._optimizer, self._batch_size = optimizer, expected_batch_size
        self._processes: Processes = processes or OneProcess()
        self._sampler = PlainSampler(stream, sample_rate, self._processes)
        self._taken = 0

    def loader(self, workload: Workload, *, steps: int, max_physical_batch: int) -> PoissonLoader:
        """Return the logical batches of the next steps."""
        loader = PoissonLoader(
            workload.train,
            self._sampler,
            steps=steps,
            max_physical_batch=max_physical_batch,
            collate_fn=workload.train.collate,
        )
        facts = {"steps": steps, "max_physical_batch": max_physical_batch}
        self._processes.check_dataset(workload.train, facts)
        return loader

    def backward(self, losses: torch.Tensor) -> None:
        """Add the gradient of the sum over the expected batch size."""
        share = self._sampler.share
        idle = share is not None and share.is_over(self._taken, losses.shape[0])
        self._taken += 0 if idle else losses.shape[0]
        total = losses.sum() / self._batch_size
        if self._processes.in_step:
            # A sharded model averages over processes what is to be summed.
            total = total * (0 if idle else self._processes.world_size)
        torch.autograd.backward(total)

    def step(self) -> None:
        """Step the optimizer."""
        if not self._processes.in_step:
            add_up_gradients(self._optimizer, self._processes)
        self._processes.rest()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the sampling stream."""
        return {"next_step": self._sampler.next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position in the sampling stream."""
        self._sampler.next_step = state["next_step"]


def add_up_gradients(optimizer: torch.optim.Optimizer, processes: Processes) -> None:
    """Sum the plain gradients of replicas; a parameter that none has used keeps none."""
    if processes.world_size == 1:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    used = processes.summed([parameter.grad is not None for parameter in parameters])
    for parameter, times in zip(parameters, used, strict=True):
        if times:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)
