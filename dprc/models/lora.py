"""LoRA: trained factors of low rank beside frozen layers."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from dprc.settings import LoraSettings

_QUERY_AND_VALUE = ("q_proj", "v_proj")


def add_lora(model: Any, settings: LoraSettings, *, head: str, trains_head: bool, seed: int) -> Any:
    """Freeze a model and put LoRA factors beside its layers, without dropout.

    Args:
        model: Changed in place.
        settings: Rank, scale and which layers.
        head: Name of the model's head, which gets no factors.
        trains_head: Whether the head is trained as it is: a fresh one must be.
        seed: Of the factors' initialisation.

    Returns:
        The PEFT model around it.

    Raises:
        ValueError: The model has none of the layers.
    """
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != head
    }
    chosen = linear if settings.targets == "all-linear" else linear & {*_QUERY_AND_VALUE}
    if not chosen:
        raise ValueError(
            f"model.lora.targets: {settings.targets!r} finds none of its layers; this model's are "
            f"called {', '.join(sorted(linear)) or 'nothing: it has no nn.Linear'}"
        )
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=sorted(chosen),
        modules_to_save=[head] if trains_head else None,
        task_type=None if trains_head else "CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, config)
