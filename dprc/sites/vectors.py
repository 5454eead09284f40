"""Sites whose parameters are vectors: norm layers, and whatever uses them element by element."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from dprc.contributions import Contribution, VectorUse
from dprc.sites.base import (
    FactorSite,
    Site,
    Tapper,
    detached,
    retyped,
    shadowed,
    sole_argument,
    weight_of,
)


@dataclass(frozen=True)
class ScaleSite(FactorSite):
    """A norm layer: output = scale ⊙ normalised (+ bias), with the scale on the last axis.

    Args:
        normalise_fn: (module, args, kwargs) -> normalised input, without scale and bias. None runs
            the module's own forward and taps its product with the weight.
    """

    normalise_fn: Callable[[Any, Any, Any], torch.Tensor] | None = None

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Return G ⊙ normalised."""
        return VectorUse(self.by_token(grads * saved))

    def forward(self, module: Any, capture: Tapper, args: Any, kwargs: Any) -> torch.Tensor:
        """Normalise, scale and shift."""
        if self.normalise_fn is None:

            def multiply(weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
                return capture.tap(weight * other, other, self)

            return with_factor(module, multiply, args, kwargs)
        normalised = self.normalise_fn(module, args, kwargs)
        weight, bias = detached(module, "weight"), detached(module, "bias")
        output = normalised if weight is None else weight * normalised
        return capture.tap(output if bias is None else output + bias, normalised, self)


def layer_norm(module: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Normalise as ``nn.LayerNorm``, without scale and bias."""
    x = sole_argument(args, kwargs)
    return F.layer_norm(x, module.normalized_shape, None, None, module.eps)


def rms_norm(module: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Normalise as ``nn.RMSNorm``, without scale."""
    return F.rms_norm(sole_argument(args, kwargs), module.normalized_shape, None, module.eps)


class _Factor(torch.Tensor):
    """A weight that may only be multiplied with: the product goes through ``multiply_fn``."""

    value: torch.Tensor
    multiply_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and len(args) == 2 and not kwargs:
            factor, other = args if isinstance(args[0], cls) else reversed(args)
            if isinstance(factor, cls) and not isinstance(other, cls):
                with torch._C.DisableTorchFunctionSubclass():
                    return factor.__dict__["multiply_fn"](factor.__dict__["value"], other)
        if getattr(func, "__name__", "") == "__get__":  # shape, dtype, device
            with torch._C.DisableTorchFunctionSubclass():
                return func(args[0].__dict__["value"])
        raise TypeError(f"the weight of a norm layer met {func}, not a product")


_PRODUCTS = (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__)


def with_factor(
    module: Any,
    multiply_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    args: Any,
    kwargs: Any,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the module's own forward, its product with the weight (or a stand-in) replaced."""
    value = weight_of(module) if weight is None else weight
    factor = retyped(value, _Factor)
    factor.__dict__.update(value=value, multiply_fn=multiply_fn)
    with shadowed(module, {"weight": factor}):
        output: torch.Tensor = type(module).forward(module, *args, **kwargs)
    return output


@dataclass(frozen=True)
class ElementwiseSite(Site):
    """Any layer that uses its vectors element by element: each sample gets a copy of them."""

    names: Mapping[str, int] | None = None  # parameter name -> index

    @property
    def parameters(self) -> tuple[int, ...]:
        """Indices of the vectors."""
        return tuple((self.names or {}).values())

    def forward(self, module: Any, capture: Tapper, args: Any, kwargs: Any) -> torch.Tensor:
        """Run the module's own forward on one copy of each vector for each sample."""
        x = sole_argument(args, kwargs)
        copies = {
            name: capture.tap_parameter(_spread(module._parameters[name], x), self._to(index))
            for name, index in (self.names or {}).items()
        }
        with shadowed(module, copies):
            output: torch.Tensor = type(module).forward(module, *args, **kwargs)
        return output

    def _to(self, index: int) -> Callable[[torch.Tensor], None]:
        def deliver(grads: torch.Tensor) -> None:  # (B, 1, …, n)
            self.receiver.receive(index, VectorUse(self.by_token(self.by_sample(grads))))

        return deliver


def _spread(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # (n,) -> (B, 1, …, n)
    shape = (x.shape[0], *[1] * (x.dim() - 2), vector.shape[0])
    return vector.detach().expand(shape)
