"""A check on the user's own model: each parameter's per-sample norms against brute force."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dprc.engine import PrivacyEngine
from dprc.estimators import Estimator
from dprc.noise import Position, Stream

LossFn = Callable[[nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]


def random_batch(vocabulary: int, *, samples: int = 3, tokens: int = 17) -> dict[str, Any]:
    """Make token ids of different lengths, right-padded and masked; always the same."""
    generator = Stream((0, 0)).generator(Position())
    ids = torch.from_numpy(generator.integers(0, vocabulary, (samples, tokens)))
    lengths = torch.from_numpy(generator.integers(tokens // 2, tokens + 1, samples))
    mask = (torch.arange(tokens) < lengths.unsqueeze(1)).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def check_model(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: LossFn,
    estimator: str | Estimator = "hutchinson",
) -> list[dict[str, Any]]:
    """Compare the engine's exact norms with one plain backward pass for each sample.

    Args:
        model: Its trained parameters are checked, without dropout; it is left as it was.
        batch: Given to ``loss_fn``.
        loss_fn: (model, batch) -> (B,) losses.
        estimator: What training would use.

    Returns:
        A row for each trained parameter: what ``PrivacyEngine.plan`` says of it after this loss,
        and ``max_relative_error`` of its norms, relative to the largest of all parameters' norms
        where its own is smaller than a millionth of that.

    Raises:
        PrivacyError: The model cannot be trained privately; the message names the part.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        truth = _brute_force(list(trained.values()), loss_fn(model, batch))  # (parameters, B)
        engine = _engine(model, "exact")
        try:
            engine.backward(loss_fn(model, batch))
            found = engine.squared_norms_by_parameter
        finally:
            engine.detach()
        planner = _engine(model, estimator)
        try:
            loss_fn(model, batch)  # shows which parameters have several uses
            plan = planner.plan()
        finally:
            planner.detach()
    finally:
        for module, mode in modes.items():
            module.training = mode

    floor = 1e-6 * float(truth.max())
    rows = []
    for row, expected in zip(plan, truth, strict=True):
        got = found.get(row["name"], torch.zeros_like(expected)).double().sqrt()
        error = float(((got - expected).abs() / expected.clamp(min=floor)).nan_to_num(0.0).max())
        if not bool((got.isfinite() & expected.isfinite()).all()):
            error = math.inf
        rows.append({**row, "max_relative_error": error})
    return rows


def _engine(model: nn.Module, estimator: str | Estimator) -> PrivacyEngine:
    trained = [p for p in model.parameters() if p.requires_grad]
    return PrivacyEngine(
        model,
        torch.optim.SGD(trained, lr=0.0),
        max_grad_norm=1.0,
        noise_multiplier=0.0,
        sample_rate=1.0,
        expected_batch_size=1,
        estimator=estimator,
    )


def _brute_force(
    parameters: list[nn.Parameter], losses: torch.Tensor
) -> torch.Tensor:  # (parameters, B) norms
    columns = []
    for loss in losses:
        grads = torch.autograd.grad(
            loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        columns.append(torch.stack([grad.double().square().sum().sqrt() for grad in grads]))
    return torch.stack(columns, dim=1)
