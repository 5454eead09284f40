"""What a ``PrivacyEngine`` accepts; the messages name the argument, its value and the way out."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from dprc import estimators
from dprc.accounting import validate
from dprc.errors import PrivacyError
from dprc.estimators import Estimator

_Chosen = TypeVar("_Chosen", bound=str | Estimator)

# The work of 32 probes, a third of their noise or less.
_DEFAULT_ESTIMATOR = ("hutchpp", 26, 2)


def clipping_bound(value: object, noise_multiplier: float) -> float:
    """Return max_grad_norm: positive, and finite where there is noise."""
    if isinstance(value, (int, float)) and math.isinf(value) and value > 0:
        if noise_multiplier > 0:
            raise PrivacyError(
                "max_grad_norm: an infinite bound needs infinite noise; give a finite one, or "
                "noise_multiplier=0 for training without privacy"
            )
        return float(value)
    number = validate.real("max_grad_norm", value)
    if number <= 0:
        raise ValueError(f"max_grad_norm must be above 0, got {value!r}")
    return number


def batch_size(value: object) -> float:
    """Return expected_batch_size: positive."""
    number = validate.real("expected_batch_size", value)
    if number <= 0:
        raise ValueError(f"expected_batch_size must be above 0, got {value!r}")
    return number


def check_state(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Refuse a saved state of another mechanism or other parameters."""
    for name, value in mine.items():
        if saved.get(name) != value:
            raise PrivacyError(
                f"load_state_dict: {name} was {saved.get(name)!r} where the state was saved and is "
                f"{value!r} here. Make the engine with the same arguments."
            )


def declared_tokens(estimator: object, max_tokens: int | None) -> int | None:
    """Return the declared length if the choice of estimators depends on it."""
    if max_tokens is not None:
        validate.positive_int("max_tokens", max_tokens)
    if estimator != "auto":
        return None
    if max_tokens is None:
        raise ValueError("max_tokens: estimator='auto' chooses by the declared length; give it")
    return max_tokens


def randomized_name(estimator: str, head_rank: int | None) -> str:
    """Return what stands behind ``"auto"`` where exact is not cheaper; other names as they are.

    Raises:
        ValueError: An unknown name.
    """
    if estimator in estimators.names():
        return estimator
    if estimator != "auto":
        known = ", ".join((*estimators.names(), "auto"))
        raise ValueError(f"estimator: must be one of {known}, got {estimator!r}")
    return "hutchinson" if head_rank is None else "hutchpp"


def with_defaults(
    estimator: _Chosen | None, num_probes: int | None, head_rank: int | None, analysis: str
) -> tuple[_Chosen | str, int, int | None]:
    """Return estimator, probes and head, those left out filled in.

    Where only probes are given, or the paper's analysis, the estimator is the paper's.
    """
    if estimator is None and num_probes is None and head_rank is None and analysis != "envelope":
        return _DEFAULT_ESTIMATOR
    probes = 32 if num_probes is None else num_probes
    if estimator is None:
        return "hutchinson" if head_rank is None else "hutchpp", probes, head_rank
    return estimator, probes, head_rank


def chosen_estimator(
    estimator: str | Estimator, num_probes: int, sketch: str, head_rank: int | None
) -> Estimator:
    """Return the estimator that a name and options, or an object without options, stand for."""
    if isinstance(estimator, str):
        name = randomized_name(estimator, head_rank)
        return estimators.get(name, num_probes=num_probes, sketch=sketch, head_rank=head_rank)
    if not isinstance(estimator, Estimator):
        raise TypeError(f"estimator: must be a name or an Estimator, got {estimator!r}")
    if (num_probes, sketch, head_rank) != (32, "per_sample", None):
        raise ValueError(
            "estimator: an Estimator brings its own num_probes, sketch and head_rank; leave "
            f"them out, got {num_probes!r}, {sketch!r}, {head_rank!r}"
        )
    return estimator


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that does not hold exactly the trained parameters, by identity."""
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    missing = [name for key, name in trained.items() if key not in set(held)]
    if missing:
        raise PrivacyError(
            f"optimizer: does not hold the trained parameter {missing[0]!r} (of {len(missing)} "
            "missing), which would never learn. Make the optimizer from the model's trained "
            "parameters, or freeze it."
        )
    if len(held) > len(trained):
        raise PrivacyError(
            f"optimizer: holds {len(held) - len(trained)} parameters that are not trained "
            "parameters of the model (another model's, or frozen ones). Give it only those with "
            "requires_grad."
        )


def check_unchanged(
    model: nn.Module, optimizer: torch.optim.Optimizer, captured: Sequence[nn.Parameter]
) -> None:
    """Refuse a model or optimizer whose trained parameters are not those that were captured."""
    known = {id(parameter) for parameter in captured}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise PrivacyError(
                f"{name}: became a trained parameter (unfrozen, or replaced) after the engine took "
                "the model, so its gradient is not clipped. Make a new engine."
            )
    if {id(p) for group in optimizer.param_groups for p in group["params"]} != known:
        raise PrivacyError(
            "optimizer: holds other parameters than when the engine took it. Make a new engine."
        )


def warn_of_other_sampling(steps: int, sampled_by_loader: bool) -> None:
    """Warn where an ε is told of steps whose samples the engine did not draw."""
    if steps > 0 and not sampled_by_loader:
        warnings.warn(
            "epsilon: samples came from elsewhere than engine.poisson_loader. It holds "
            "only if each was drawn with probability sample_rate, independently of all others; "
            "shuffled batches of one size, a DataLoader's, are not. Use engine.poisson_loader.",
            stacklevel=3,
        )


def complaint_of_delta(delta: float, examples: int) -> str | None:
    """Return what to warn of if a δ promises nothing for this many examples."""
    if delta * examples < 1:
        return None
    return (
        f"delta: {delta} is not below 1/{examples}, one over the number of examples: a mechanism "
        "that publishes one of them whole could meet it"
    )


def check_losses(losses: object) -> None:
    """Refuse what is not one differentiable loss for each sample."""
    if not isinstance(losses, torch.Tensor):
        raise TypeError(f"losses: must be a tensor of shape (batch,), got {type(losses).__name__}")
    if losses.dim() != 1:
        meaning = (
            "a mean or sum over the batch hides each sample's gradient"
            if losses.dim() == 0
            else "each sample needs one loss, its tokens' mean for instance"
        )
        raise PrivacyError(
            f"losses: must have shape (batch,), got {tuple(losses.shape)}: {meaning}. Use "
            "dprc.losses, or reduction='none'."
        )
    if losses.shape[0] > 0 and not losses.requires_grad:
        raise ValueError("losses: depend on no trained parameter (was the model run in no_grad?)")
