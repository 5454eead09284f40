"""Greedy generation in batches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients; every module's mode is put back.

    A model that a ``PrivacyEngine`` holds may be evaluated so at any time between
    ``backward`` and the next forward pass of training: without gradients the capture notes nothing
    that a norm could depend on.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    pad_token_id: int,
    eos_token_id: int,
    batch_size: int = 8,
) -> list[list[int]]:
    """Continue each prompt with the most likely token, again and again.

    Args:
        model: A Hugging Face causal language model, or a PEFT model around one.
        prompts: Token ids of each.
        max_new_tokens: Longest continuation.
        pad_token_id: Stands before shorter prompts of a batch, masked.
        eos_token_id: Ends a continuation.
        batch_size: Prompts at once; they are taken by length, so little is padded.

    Returns:
        The new tokens of each prompt, in the order of the prompts, without the end token.

    Raises:
        ValueError: An empty prompt, or a number below 1.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}: must be at least 1, got {value}")
    if not all(prompts):
        raise ValueError("prompts: an empty one has nothing to continue")
    greedy = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_id,
    )
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
    device = next(causal.parameters()).device
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    answers: list[list[int]] = [[] for _ in prompts]
    with evaluating(model), _configured(causal, greedy):
        for start in range(0, len(by_length), batch_size):
            chosen = by_length[start : start + batch_size]
            ids, mask = _left_padded([prompts[index] for index in chosen], pad_token_id)
            output = causal.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                # A sharded model is called by all processes equally often: none stops before all.
                synced_gpus=hasattr(causal, "set_reshard_after_forward"),
            )
            for index, row in zip(chosen, output[:, ids.shape[1] :].tolist(), strict=True):
                stop = row.index(eos_token_id) if eos_token_id in row else len(row)
                answers[index] = row[:stop]
    return answers


@contextmanager
def _configured(causal: Any, config: GenerationConfig) -> Iterator[None]:
    """Replace a model's generation defaults: what a call leaves unsaid is taken from them."""
    before, causal.generation_config = causal.generation_config, config
    try:
        yield
    finally:
        causal.generation_config = before


def _left_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad on the left, so that every row ends where its continuation begins: both (B, T)."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = torch.tensor(row)
        mask[index, longest - len(row) :] = 1
    return ids, mask
