"""Optimizer and learning rate of a run, from its settings."""

import math

import torch
from torch import nn

from dprc.settings import TrainingSettings


def make_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            trained,
            lr=settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
    return torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay)


def rate_factor(step: int, settings: TrainingSettings) -> float:
    """Return what the learning rate is multiplied by: warm-up, then constant or falling to zero.

    Args:
        step: Number of steps taken before, from 0.
        settings: Of the run.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    falling = max(settings.steps - settings.warmup_steps, 1)
    left = (settings.steps - step) / falling
    return left if settings.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def make_scheduler(
    optimizer: torch.optim.Optimizer, settings: TrainingSettings
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return linear warm-up, then a constant rate or a linear or cosine decay to zero."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, settings))
