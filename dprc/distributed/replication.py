"""Replicated models: each process holds all of the model, and all take the same step."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import distributed, nn

from dprc.distributed.group import Group, bit_sum, facts_of_model
from dprc.errors import PrivacyError
from dprc.processes import OneProcess, refuse_wrappers
from dprc.schedules import Totals


def replicate(model: nn.Module) -> "Replicated":
    """Let all processes train one model, of which each holds a replica.

    Args:
        model: The same in all processes, bare, on the device of the process. Left as it is.

    Returns:
        What ``PrivacyEngine`` takes as ``processes``.

    Raises:
        PrivacyError: There is no process group; the model is wrapped or sharded, or differs
            between processes.

    Guarantee: Replicas stay equal bit by bit on devices of one kind: all processes add the same
        noise to the same sum.
    """
    group = Group()
    OneProcess().check(model, "two_pass")
    group.agree(facts_of_model(model))
    return Replicated(model)


class Replicated(Group):
    """Processes with a replica each; made by ``replicate``.

    Args:
        model: The replica of this one.
    """

    in_step = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def any_in_step(self, flag: bool) -> bool:
        """Return the flag: replicas go through the model each at its own pace."""
        return flag

    def check(self, model: nn.Module, schedule: str) -> None:
        """Refuse another model than was replicated."""
        OneProcess().check(model, schedule)
        refuse_other_model(model, self._model, "replicate")

    def refuse_unequal(self, named: Mapping[str, torch.Tensor]) -> None:
        """Refuse replicas that have parted: loaded in one process only, for one."""
        sums = [bit_sum(parameter) for parameter in named.values()]
        most = self.largest([*sums, *(-number for number in sums)])
        highest, lowest = most[: len(sums)], [-number for number in most[len(sums) :]]
        for name, high, low in zip(named, highest, lowest, strict=True):
            if high != low:
                error = PrivacyError(
                    f"{name}: is not the same in all processes any more, so clipping bounds "
                    "nothing. Load parameters in all processes, and give all the same optimizer "
                    "and schedule, without randomness of their own."
                )
                raise self._told(error)

    def make_totals(self, parameters: Sequence[torch.Tensor]) -> Totals:
        """Return the empty sums of a logical batch."""
        return ReplicatedTotals(parameters)

    def attach(self, left_fn: Callable[[Sequence[nn.Parameter]], None]) -> None:
        """Do nothing: sums are added up at the end."""

    def detach(self) -> None:
        """Do nothing."""

    def rest(self) -> None:
        """Do nothing."""


class ReplicatedTotals(Totals):
    """Sums of one process's samples, added up when they are taken out."""

    def pop(self, parameter: int) -> torch.Tensor:
        """Take a parameter's sum over all processes out."""
        total = super().pop(parameter).contiguous()
        distributed.all_reduce(total)
        return total


def refuse_other_model(model: nn.Module, known: nn.Module, name: str) -> None:
    """Refuse an engine for another model than the processes were made for."""
    refuse_wrappers(model)
    if model is not known:
        raise PrivacyError(
            f"processes: were made for another model ({type(known).__name__}) than this "
            f"{type(model).__name__}. Call dprc.distributed.{name}() with the very model that the "
            "engine gets."
        )
