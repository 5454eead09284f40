"""Losses for each sample: a function of that sample alone, never of the batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dprc.capture import capture_of
from dprc.graph import make_anchor

IGNORED = -100


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
    inputs, labels = _split(batch)
    logits = model(**inputs).logits
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"classification needs logits (B, classes) and labels (B,), got {tuple(logits.shape)} "
            f"and {tuple(labels.shape)}"
        )
    return F.cross_entropy(_full(logits), labels, reduction="none")


def causal_lm_loss(
    model: nn.Module, batch: Mapping[str, Any], chunk_tokens: int = 1024
) -> torch.Tensor:
    """Return each sample's mean cross-entropy of the next token.

    The logits of a chunk of tokens are made, turned into losses and dropped, in the backward pass
    again: a (tokens, vocabulary) matrix never exists.

    Args:
        model: A Hugging Face causal language model, or a PEFT model around one.
        batch: What the model takes, and ``labels`` (B, T): token ids, -100 where there is no loss.
            Labels are shifted here, as transformers does.
        chunk_tokens: Tokens of each sample whose logits exist at once.

    Returns:
        (B,), float32 or float64: each sample's sum divided by its own number of labels, so that no
        sample's loss depends on another's length. 0 for a sample without labels.

    Raises:
        ValueError: No labels, labels of another shape, ``chunk_tokens`` < 1, or a model whose
            logits are not made by its head alone in a known way.
    """
    if isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int) or chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be an int of at least 1, got {chunk_tokens!r}")
    inputs, labels = _split(batch)
    causal: Any = model
    if hasattr(causal, "get_base_model"):  # PEFT
        causal = causal.get_base_model()
    backbone, head, post_head_fn = _parts(causal, inputs)
    for module in head.modules():
        held_by = capture_of(module)
        if held_by is not None:
            # Even where one chunk suffices: the estimator must not depend on the batch's length.
            held_by.declare_several_uses(module)

    hidden: torch.Tensor = backbone(**inputs).last_hidden_state
    if labels.shape != hidden.shape[:2]:
        raise ValueError(
            f"labels must have shape {tuple(hidden.shape[:2])}, got {tuple(labels.shape)}"
        )
    targets = labels[:, 1:]
    total = _full(hidden).new_zeros(hidden.shape[0])
    # Split, not sliced: each slice would send back a gradient as long as the text.
    parts = (torch.split(whole, chunk_tokens, dim=1) for whole in (hidden[:, :-1], targets))
    for chunk, wanted in zip(*parts, strict=True):
        total = total + _recomputed(_ChunkLoss(head, post_head_fn, wanted), chunk)
    return total / (targets != IGNORED).sum(1).clamp(min=1)


def _split(batch: Mapping[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    inputs = dict(batch)
    labels = inputs.pop("labels", None)
    if labels is None:
        raise ValueError("batch: has no 'labels'")
    return inputs, labels


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class _ChunkLoss:
    """Sum of a chunk's cross-entropies, one for each sample: hidden (B, t, d) -> (B,)."""

    def __init__(
        self,
        head: nn.Module,
        post_head_fn: Callable[[torch.Tensor], torch.Tensor],
        targets: torch.Tensor,  # (B, t)
    ) -> None:
        self.head, self._post_head_fn, self._targets = head, post_head_fn, targets

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = _full(self._post_head_fn(self.head(hidden)))
        each = F.cross_entropy(
            logits.flatten(0, 1),
            self._targets.flatten(),
            reduction="none",
            ignore_index=IGNORED,
        )
        return each.view(self._targets.shape).sum(1)


def _recomputed(loss_fn: _ChunkLoss, hidden: torch.Tensor) -> torch.Tensor:
    """Run a chunk's loss without keeping its logits, and again in each backward pass."""
    if capture_of(loss_fn.head) is None:
        return cast(torch.Tensor, checkpoint(loss_fn, hidden, use_reentrant=False))
    # Makes the loss differentiable where the backbone is not trained.
    anchor = make_anchor()
    return cast(torch.Tensor, _Replayed.apply(hidden, anchor, loss_fn))  # type: ignore[no-untyped-call]


class _Replayed(torch.autograd.Function):
    """A checkpoint of a captured head, whose gradients all go to the engine."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, anchor: Any, loss_fn: _ChunkLoss) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.loss_fn, ctx.device = loss_fn, hidden.device.type
        ctx.autocast = (
            torch.is_autocast_enabled(ctx.device),
            torch.get_autocast_dtype(ctx.device),
        )
        capture = capture_of(loss_fn.head)
        with torch.no_grad(), nullcontext() if capture is None else capture.counted():
            return loss_fn(hidden)

    @staticmethod
    def backward(ctx: Any, *output_grads: torch.Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        (grads,) = output_grads
        enabled, dtype = ctx.autocast

        def run(weights: torch.Tensor) -> torch.Tensor | None:
            leaf = hidden.detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(ctx.device, dtype=dtype, enabled=enabled):
                losses = ctx.loss_fn(leaf)
            torch.autograd.backward(losses, weights)
            return cast(torch.Tensor | None, leaf.grad)

        capture = capture_of(ctx.loss_fn.head)
        # Book-keeping repeats the chunk with clip factors instead of keeping its logits' gradient.
        replay = nullcontext() if capture is None else capture.replayable(lambda c: run(grads * c))
        with replay:
            return run(grads), None, None


# --- what a model does to make its logits ---------------------------------------------------------

_PostHead = Callable[[torch.Tensor], torch.Tensor]
_KNOWN_PARTS: WeakKeyDictionary[nn.Module, tuple[str, _PostHead]] = WeakKeyDictionary()


def _parts(causal: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any, _PostHead]:
    """Return backbone, head, and what the model does after its head.

    The model is watched once, on two tokens: its logits must be what the head makes of the
    backbone's last hidden state, changed in one of the known ways.
    """
    config = getattr(causal, "config", None)
    if config is None or not hasattr(causal, "get_output_embeddings"):
        raise ValueError(
            f"model: must be a Hugging Face causal language model, got {type(causal).__name__}"
        )
    head = causal.get_output_embeddings()
    if getattr(config, "is_encoder_decoder", False) or head is None:
        raise ValueError(
            f"model: {type(causal).__name__} is not a decoder with a language-model head; compute "
            "its per-sample loss from its logits"
        )
    if causal not in _KNOWN_PARTS:
        _KNOWN_PARTS[causal] = _watch(causal, head, inputs)
    name, post_head_fn = _KNOWN_PARTS[causal]
    return causal.get_submodule(name), head, post_head_fn


def _watch(causal: Any, head: nn.Module, inputs: Mapping[str, Any]) -> tuple[str, _PostHead]:
    ids = inputs.get("input_ids")
    if ids is None:
        raise ValueError("batch: has no 'input_ids'")
    states: dict[str, Any] = {}
    seen: dict[str, Any] = {}

    def see_states(name: str, _: Any, output: Any) -> None:
        states[name] = getattr(output, "last_hidden_state", None)

    with torch.no_grad(), ExitStack() as hooks:
        for name, module in causal.named_modules():
            if name and hasattr(module, "base_model_prefix"):
                hooks.enter_context(_watched(module, partial(see_states, name)))
        hooks.enter_context(
            _watched(head, lambda args, out: seen.update(input=args[0], output=out))
        )
        logits = causal(input_ids=ids[:1, :2]).logits
    for name, state in states.items():
        if state is None or state.shape != seen["input"].shape:
            continue
        for candidate in _candidates(causal) if torch.equal(state, seen["input"]) else ():
            if torch.equal(candidate(seen["output"]).to(logits.dtype), logits):
                return name, candidate
    raise ValueError(
        f"model: {type(causal).__name__} makes its logits in a way that is not known here (not "
        "head(last hidden state), soft-capped or scaled as its configuration says). Compute the "
        "per-sample loss from model(...).logits."
    )


def _candidates(causal: Any) -> Iterator[_PostHead]:
    """Yield what known models do to the head's output: soft-capping, scaling, or nothing."""
    cap = getattr(causal.config, "final_logit_softcapping", None)
    if cap is not None:
        yield lambda logits: torch.tanh(logits / cap) * cap
    scale = getattr(causal, "logit_scale", getattr(causal.config, "logit_scale", None))
    if isinstance(scale, (int, float)):
        yield lambda logits: logits * scale
    division = getattr(causal.config, "logits_scaling", None)
    if division is not None:
        yield lambda logits: logits / division
    yield lambda logits: logits


@contextmanager
def _watched(module: nn.Module, see_fn: Callable[[Any, Any], None]) -> Iterator[None]:
    handle = module.register_forward_hook(lambda _, args, out: see_fn(args, out))
    try:
        yield
    finally:
        handle.remove()
