"""Borders of the parts of a sharded model, in the autograd graph.

While a backward pass is within a part, its parameters are gathered. At the border where it enters
the part it must not be cut in two: the second half would find the parameters gone. At the border
where it leaves, the sums of the part's gradients are complete.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten


class _Border(torch.autograd.Function):
    """Identity on all differentiable tensors that cross; a backward pass tells that it does."""

    @staticmethod
    def forward(ctx: Any, cross_fn: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.is_dprc_border = True
        ctx.cross_fn = cross_fn
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.cross_fn()
        return None, *grads


def add_borders(part: nn.Module, leave_fn: Callable[[], None]) -> None:
    """Mark what enters and what leaves a module.

    Args:
        part: Of the model.
        leave_fn: Called when a backward pass has gone through it.
    """

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _crossing((args, kwargs), leave_fn)

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return _crossing(output, _nothing)

    part.register_forward_pre_hook(enter, with_kwargs=True)
    part.register_forward_hook(leave)


def _crossing(values: Any, cross_fn: Callable[[], None]) -> Any:
    if not torch.is_grad_enabled():
        return values
    leaves, structure = tree_flatten(values)
    places = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if not places:
        return values
    crossed = _Border.apply(cross_fn, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
    for place, leaf in zip(places, crossed, strict=True):
        leaves[place] = leaf
    return tree_unflatten(leaves, structure)


def _nothing() -> None:
    """Do nothing where a backward pass enters a part."""
