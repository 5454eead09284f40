"""Losses for each sample: a function of that sample alone, never of the batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def classification_loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the cross-entropy of each sample's label.

    Args:
        model: Called with everything in the batch but the labels; its output has ``logits`` of
            shape (B, classes).
        batch: With ``labels`` of shape (B,), integers.

    Returns:
        (B,), float32 or float64.

    Raises:
        ValueError: No labels, or logits of another shape.
    """
    inputs = dict(batch)
    labels = inputs.pop("labels", None)
    if labels is None:
        raise ValueError("batch: has no 'labels'")
    logits = model(**inputs).logits
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"classification needs logits (B, classes) and labels (B,), got {tuple(logits.shape)} "
            f"and {tuple(labels.shape)}"
        )
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits, labels, reduction="none")
