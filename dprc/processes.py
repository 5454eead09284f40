"""What an engine asks of the other processes of its job, and the answers where there is none.

``dprc.distributed`` has the answers of a job of several processes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from dprc.errors import PrivacyError
from dprc.schedules import Totals

_Value = TypeVar("_Value")


class Job(Protocol):
    """The processes of one job, as one of them sees them.

    What is not an attribute is to be called by all processes alike.

    Attributes:
        rank: Which of them this is, from 0.
        world_size: How many there are.
    """

    rank: int
    world_size: int

    def agree(self, facts: Mapping[str, object]) -> None:
        """Refuse, in all processes, what is not the same in all.

        Raises:
            PrivacyError: A fact differs; the message names it.
        """

    def from_first(self, value: _Value) -> _Value:
        """Return what process 0 has."""

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """Return sums over the processes."""

    def led(self, action_fn: Callable[[], _Value]) -> _Value:
        """Let process 0 act; return what comes of it, or raise its error, in all."""

    def check_dataset(self, dataset: Any, facts: Mapping[str, object]) -> None:
        """Refuse a dataset that is not the same, and whole, in all processes."""


class Processes(Job, Protocol):
    """The processes of a job that train one model together.

    Attributes:
        in_step: Whether all must go through the model equally often, since it takes all of them.
    """

    in_step: bool

    def any_in_step(self, flag: bool) -> bool:
        """Whether any process has it, where all go in step; else whether this one has it."""

    def check(self, model: nn.Module, schedule: str) -> None:
        """Refuse a model that these processes do not train together.

        Raises:
            PrivacyError: Another model, another form of parallelism, or another schedule.
        """

    def refuse_unequal(self, named: Mapping[str, torch.Tensor]) -> None:
        """Refuse trained parameters that each process holds, and that differ between them.

        Which process a sample goes to depends on what else was drawn. So where processes compute
        with other parameters, one sample more changes the gradients of others, beyond its clipping.

        Args:
            named: The parameters, by name.

        Raises:
            PrivacyError: They differ.
        """

    def make_totals(self, parameters: Sequence[torch.Tensor]) -> Totals:
        """Return the empty sums of a logical batch."""

    def attach(self, left_fn: Callable[[Sequence[nn.Parameter]], None]) -> None:
        """Begin to train with an engine.

        Args:
            left_fn: Told in a backward pass that it has left a part of the model, with the trained
                parameters of that part.
        """

    def detach(self) -> None:
        """Give the model back as it was."""

    def rest(self) -> None:
        """Bring the parameters into the form in which the optimizer knows them."""

    def whole(self, value: Any) -> Any:
        """Return a tensor with the rows of all processes, in process 0; what is whole as it is."""

    def own(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a whole tensor, in the form of another one."""


class OneProcess:
    """A job of one process, which has nobody to ask."""

    rank, world_size, in_step = 0, 1, False

    def agree(self, facts: Mapping[str, object]) -> None:
        """Agree."""

    def from_first(self, value: _Value) -> _Value:
        """Return the value."""
        return value

    def any_in_step(self, flag: bool) -> bool:
        """Return the flag."""
        return flag

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers."""
        return list(numbers)

    def led(self, action_fn: Callable[[], _Value]) -> _Value:
        """Act."""
        return action_fn()

    def whole(self, value: Any) -> Any:
        """Return the value."""
        return value

    def own(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return value

    def check(self, model: nn.Module, schedule: str) -> None:
        """Refuse a model that is wrapped, or sharded, for several processes."""
        refuse_wrappers(model)
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "placements"):
                raise PrivacyError(
                    f"{name}: is sharded. Shard the bare model with dprc.distributed.shard() and "
                    "give what that returns as processes="
                )

    def check_dataset(self, dataset: Any, facts: Mapping[str, object]) -> None:
        """Accept it."""

    def refuse_unequal(self, named: Mapping[str, torch.Tensor]) -> None:
        """Accept them."""

    def make_totals(self, parameters: Sequence[torch.Tensor]) -> Totals:
        """Return the empty sums of a logical batch."""
        return Totals(parameters)

    def attach(self, left_fn: Callable[[Sequence[nn.Parameter]], None]) -> None:
        """Do nothing."""

    def detach(self) -> None:
        """Do nothing."""

    def rest(self) -> None:
        """Do nothing."""


def number_of_processes() -> int:
    """Return the size of torch's default process group; 1 without one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def joined(
    processes: Processes | None, model: nn.Module, arguments: Mapping[str, Any]
) -> Processes:
    """Return the processes that an engine is one of.

    Args:
        processes: What the engine was told of; None for this one alone.
        model: Of the engine.
        arguments: All others that the engine was made with.

    Raises:
        PrivacyError: There are several, and the engine was told of none; or they are not to train
            this model together.
    """
    told: Processes = OneProcess() if processes is None else processes
    refuse_unknown(told.world_size)
    own = ("self", "model", "optimizer", "processes")
    told.agree({name: value for name, value in arguments.items() if name not in own})
    told.check(model, arguments["schedule"])
    return told


def refuse_unknown(world_size: int) -> None:
    """Refuse to go on in a job of another size than the engine knows of.

    Each process would add noise of its own and account on its own; with one seed, equal noise.

    Raises:
        PrivacyError: The sizes differ.
    """
    found = number_of_processes()
    if found != world_size:
        raise PrivacyError(
            f"torch.distributed: runs {found} processes, and the engine knows of {world_size}: "
            "their sums would not be added up. Give the engine processes=dprc.distributed."
            "replicate(model) or dprc.distributed.shard(model), or train in one process."
        )


def refuse_wrappers(model: nn.Module) -> None:
    """Refuse a model inside torch's own wrappers, whose hooks add up raw gradients.

    Raises:
        PrivacyError: There is one.
    """
    ways = {"DistributedDataParallel": "replicate", "FullyShardedDataParallel": "shard"}
    for path, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in ways and kind.__module__.startswith("torch."):
                raise PrivacyError(
                    f"{path or 'model'}: is wrapped in {kind.__name__}, whose hooks would add up "
                    "gradients that are neither clipped nor noised. Give the engine the bare model "
                    f"and processes=dprc.distributed.{ways[kind.__name__]}(model)."
                )
        if isinstance(module, nn.DataParallel):
            raise PrivacyError(
                f"{path or 'model'}: is wrapped in DataParallel, which cuts batches behind the "
                "engine. Start one process for each device, with torchrun."
            )
