"""Brute force: per-sample gradients by one backward pass for each sample."""

from collections.abc import Callable

import torch
from torch import nn

LossFn = Callable[[nn.Module], torch.Tensor]


def per_sample_gradients(model: nn.Module, losses: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return name -> (B, *shape), float64, for every trained parameter."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    rows = [
        torch.autograd.grad(
            loss,
            [p for _, p in named],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        for loss in losses
    ]
    return {
        name: torch.stack([row[i] for row in rows]).double() for i, (name, _) in enumerate(named)
    }


def squared_norms(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return (B,) squared norms over all parameters."""
    return torch.stack([g.reshape(len(g), -1).square().sum(1) for g in gradients.values()]).sum(0)


def clipped_sum(
    gradients: dict[str, torch.Tensor], norms: torch.Tensor, bound: float
) -> dict[str, torch.Tensor]:
    """Return the sum of gradients clipped by the given norms."""
    factors = (bound / norms).clamp(max=1.0)
    return {
        name: (g * factors.view(-1, *[1] * (g.dim() - 1))).sum(0) for name, g in gradients.items()
    }


def perturb_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter off its initial value: zeros and ones hide wrong gradients."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(0.1 * noise)
    return model
