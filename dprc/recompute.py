"""Gradient checkpointing of transformers' models, under its old name and its new one."""

from typing import Any


def recompute_blocks(model: Any, *, use_reentrant: bool = False) -> None:
    """Let a model recompute its blocks' activations in the backward pass.

    Args:
        model: A ``PreTrainedModel`` or a PEFT model around one.
        use_reentrant: Which of torch's two implementations.
    """
    # Named anew in transformers 5.24, which warns of the old name and drops it in 6.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": use_reentrant})
