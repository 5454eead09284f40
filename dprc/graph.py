"""What the capture leaves in the autograd graph, and how to tell it there."""

import torch
from torch.autograd.graph import Node

from dprc.sites import ScaleSite


def delivers(node: Node) -> bool:
    """Whether a node of the graph delivers the gradient of a captured layer or parameter."""
    return hasattr(node, "site") or hasattr(node, "deliver")


def keeps_little(node: Node) -> bool:
    """Whether what such a node delivers is no larger than the activations of a norm layer."""
    return isinstance(getattr(node, "site", None), ScaleSite)


def is_border(node: Node) -> bool:
    """Whether a node of the graph is where a pass enters or leaves a part of a sharded model."""
    return getattr(node, "is_dprc_border", False)


def make_anchor() -> torch.Tensor:
    """Make a leaf that makes what it meets differentiable, and never gets a gradient itself."""
    anchor = torch.zeros((), requires_grad=True)
    anchor.is_dprc_anchor = True  # type: ignore[attr-defined]
    return anchor


def is_anchor(node: Node) -> bool:
    """Whether a node of the graph is such a leaf."""
    return getattr(getattr(node, "variable", None), "is_dprc_anchor", False)
