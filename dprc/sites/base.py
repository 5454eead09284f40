"""What all sites have in common: the samples they tell apart, and whom they deliver to."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from dprc.contributions import Contribution, VectorUse
from dprc.precision import full_precision

_Kind = TypeVar("_Kind", bound=torch.Tensor)


class Receiver(Protocol):
    """Who takes the contributions during a backward pass: the engine."""

    def receive(self, parameter: int, contribution: Contribution) -> None:
        """Take one use of one parameter."""

    def by_sample(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a use with the samples on its first axis.

        Raises:
            PrivacyError: They cannot be told apart, or no backward pass of the engine is running.
        """

    def observe(self, path: str, grads: torch.Tensor) -> None:
        """See the output gradients of a use, samples first, before it is received."""


class Tapper(Protocol):
    """What a captured forward needs of the capture."""

    batch: int | None

    def tap(
        self, output: torch.Tensor, saved: torch.Tensor | None, site: "FactorSite"
    ) -> torch.Tensor:
        """Pass an output through the tap of a site."""

    def tap_parameter(
        self, value: torch.Tensor, deliver: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """Make a parameter's value differentiable; its gradient goes to ``deliver``."""


@dataclass(frozen=True)
class Site(ABC):
    """One captured module.

    Args:
        path: Its name in the model.
        receiver: Who takes the contributions.
    """

    path: str
    receiver: Receiver

    @property
    @abstractmethod
    def parameters(self) -> tuple[int, ...]:
        """Indices of the parameters captured here."""

    @abstractmethod
    def forward(self, module: Any, capture: Tapper, args: Any, kwargs: Any) -> Any:
        """Compute the module's output, tapped."""

    def by_sample(self, grads: torch.Tensor) -> torch.Tensor:
        """Put the samples of an output's gradient first, and let the receiver see them."""
        grads = self.receiver.by_sample(self.path, grads)
        self.receiver.observe(self.path, grads)
        return grads

    def by_token(self, tensor: torch.Tensor) -> torch.Tensor:  # (B, …, n) -> (B, T, n)
        """Merge the axes between batch and features."""
        return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


@dataclass(frozen=True)
class FactorSite(Site):
    """A module whose weight has a gradient made of two factors: its input, its output's gradient.

    Args:
        path: As for every site.
        receiver: As for every site.
        weight: Index of its weight among the trained parameters; None if frozen or absent.
        bias: Likewise of its bias.
    """

    weight: int | None
    bias: int | None

    @property
    def parameters(self) -> tuple[int, ...]:
        """Indices of the parameters captured here."""
        return tuple(index for index in (self.weight, self.bias) if index is not None)

    @property
    def saves_input(self) -> bool:
        """Whether the backward pass needs the module's input."""
        return self.weight is not None

    @abstractmethod
    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Make the contribution of the weight from the saved input and the output's gradient."""

    def deliver(self, saved: torch.Tensor | None, grads: torch.Tensor) -> None:
        """Hand the factors of one use to the receiver."""
        grads = self.by_sample(grads)
        with torch.no_grad(), full_precision(grads.device):
            if self.weight is not None and saved is not None:
                saved = self.receiver.by_sample(self.path, saved)
                self.receiver.receive(self.weight, self.weight_use(saved, grads))
            if self.bias is not None:
                self.receiver.receive(self.bias, VectorUse(self.by_token(grads)))


def sole_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the one tensor that a layer is called with."""
    values = (*args, *kwargs.values())
    if len(values) != 1 or not isinstance(values[0], torch.Tensor):
        raise TypeError("a captured layer takes one tensor")
    return values[0]


def detached(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return a parameter's value, cut from the graph; None if the module has none."""
    parameter = module._parameters.get(name)
    return None if parameter is None else parameter.detach()


def weight_of(module: nn.Module) -> torch.Tensor:
    """Return the weight's value, cut from the graph."""
    weight = detached(module, "weight")
    if weight is None:
        raise TypeError(f"{type(module).__name__} lost its weight after it was captured")
    return weight


@contextmanager
def shadowed(module: nn.Module, values: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
    """Let ``module.name`` give another tensor for a while; the parameters stay registered."""
    before = {name: module.__dict__[name] for name in values if name in module.__dict__}
    module.__dict__.update(values)
    try:
        yield
    finally:
        for name in values:
            del module.__dict__[name]
        module.__dict__.update(before)


def retyped(tensor: torch.Tensor, kind: type[_Kind]) -> _Kind:
    """Return a tensor of a subclass that stands for another tensor, which it does not hold.

    The subclass must take the other in its place in every operation. Where it can, it has the same
    content; a tensor that is of a subclass already (a simulation's fake tensor) cannot be retyped.
    """
    if type(tensor) is torch.Tensor:
        return tensor.as_subclass(kind)
    with torch._C._DisableTorchDispatch():  # a plain tensor, whatever mode is active
        return torch.empty(0).as_subclass(kind)
