"""Ways to take one and the same training step: torch's, Opacus', and the engine's."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from dprc.engine import PrivacyEngine
from dprc.profiling.peer_settings import BATCH, Setting, trained_parameters, whole_losses

MAX_GRAD_NORM = 1.0
# Costs what any noise costs, and leaves the clipped sum to be compared with the truth.
NOISE_MULTIPLIER = 1e-9
LEARNING_RATE = 1e-6
OPACUS_MISSING = "Opacus is not installed: pip install 'dprc[bench]'"


@dataclass(frozen=True)
class Mode:
    """One way to take a training step.

    Args:
        name: For rows and options.
        library: ``"torch"``, ``"opacus"`` or ``"dprc"``.
        estimator: Of norms; None for a step without privacy.
        schedule: Of the engine; ``"per_sample_gradients"`` keeps each sample's gradient until all
            norms are known; None for a step without privacy.
        num_probes: Of a randomized estimator.
        head_rank: Of ``hutchpp``, if it is not ``num_probes``.
    """

    name: str
    library: str = "torch"
    estimator: str | None = None
    schedule: str | None = None
    num_probes: int | None = None
    head_rank: int | None = None


def _dprc_modes(schedule: str) -> list[Mode]:
    randomized = {"hutchinson": (32, None), "hutchpp": (32, None), "hutchpp_r2_k26": (26, 2)}
    return [
        *(Mode(f"{name}_{schedule}", "dprc", name, schedule) for name in ("exact", "tiled")),
        Mode(f"ghost_{schedule}", "dprc", "ghost", schedule),
        *(
            Mode(f"{name}_{schedule}", "dprc", name.split("_")[0], schedule, probes, rank)
            for name, (probes, rank) in randomized.items()
        ),
    ]


OPACUS_MODES = (
    Mode("opacus_hooks", "opacus", "exact", "per_sample_gradients"),
    Mode("opacus_fast", "opacus", "exact", "two_pass"),
    Mode("opacus_ghost", "opacus", "ghost", "two_pass"),
)
MODES = {
    mode.name: mode
    for mode in (
        Mode("nonprivate"),
        *OPACUS_MODES,
        *_dprc_modes("two_pass"),
        *_dprc_modes("book_keeping"),
    )
}
DEFAULT_MODES = (
    "nonprivate",
    *(mode.name for mode in OPACUS_MODES),
    "exact_two_pass",
    "hutchinson_two_pass",
    "exact_book_keeping",
    "hutchinson_book_keeping",
)


def is_missing(mode: Mode) -> bool:
    """Say whether the library of a mode is not installed."""
    return mode.library == "opacus" and find_spec("opacus") is None


@dataclass(frozen=True)
class Step:
    """One step of a mode, noise included.

    Attributes:
        micro_batches: Ids (B / n, T) of each ``backward`` call.
        losses_fn: Gives the losses of a micro-batch.
        backward_fn: Takes the losses of a micro-batch.
        norms_fn: After each ``backward_fn``, the norms that its samples are clipped by; None
            without privacy.
        finish_fn: Noise, and the optimizer's step.
        optimizer: torch's, whose step the clipped and noised sum arrives at.
        sum_scale: What that sum was divided by.
        norms_at_step: Whether norms are known in the optimizer's step only, all at once.
    """

    micro_batches: tuple[torch.Tensor, ...]
    losses_fn: Callable[[torch.Tensor], torch.Tensor]
    backward_fn: Callable[[torch.Tensor], None]
    norms_fn: Callable[[], torch.Tensor] | None
    finish_fn: Callable[[], None]
    optimizer: torch.optim.Optimizer
    sum_scale: float = 1.0
    norms_at_step: bool = False

    def take(self) -> None:
        """Take the step."""
        for ids in self.micro_batches:
            self.backward_fn(self.losses_fn(ids))
        self.finish_fn()

    def take_apart(self) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Take the step; return the norms (B,) it clipped by, and the sum it gave the optimizer."""
        total: list[torch.Tensor] = []
        norms: list[torch.Tensor] = []

        def add_norms(now: bool) -> None:
            if self.norms_fn is not None and now:
                norms.append(self.norms_fn().clone())

        def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            add_norms(self.norms_at_step)
            (group,) = optimizer.param_groups
            total.extend(parameter.grad * self.sum_scale for parameter in group["params"])

        handle = self.optimizer.register_step_pre_hook(keep)
        try:
            for ids in self.micro_batches:
                self.backward_fn(self.losses_fn(ids))
                add_norms(not self.norms_at_step)
            self.finish_fn()
        finally:
            handle.remove()
        return (torch.cat(norms) if norms else None), total


def make_step(
    mode: Mode, setting: Setting, model: nn.Module, ids: torch.Tensor, *, noise: bool = True
) -> Step:
    """Prepare the step of a mode on a model and a batch (2, T).

    Args:
        mode: Of ``MODES``.
        setting: Gives the number of micro-batches.
        model: Of ``build_model``; it belongs to the step from now on.
        ids: Of ``make_batch``.
        noise: Whether private steps add noise, each library with its own generator.

    Raises:
        PrivacyError: What the engine refuses.
        Exception: Whatever Opacus raises.
    """
    micro_batches = torch.split(ids, BATCH // setting.micro_batches)
    optimizer = torch.optim.SGD(trained_parameters(model), lr=LEARNING_RATE)
    sigma = NOISE_MULTIPLIER if noise else 0.0
    make = {"torch": _plain, "opacus": _opacus, "dprc": _dprc}[mode.library]
    return make(mode, model, optimizer, micro_batches, sigma)


def _plain(
    mode: Mode,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: tuple[torch.Tensor, ...],
    sigma: float,
) -> Step:
    del mode, sigma

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Step(
        micro_batches,
        lambda ids: whole_losses(model, ids),
        lambda losses: torch.autograd.backward(losses.sum()),
        None,
        finish,
        optimizer,
    )


def _dprc(
    mode: Mode,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: tuple[torch.Tensor, ...],
    sigma: float,
) -> Step:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the fixed privacy_seed
        engine = PrivacyEngine(
            model,
            optimizer,
            max_grad_norm=MAX_GRAD_NORM,
            noise_multiplier=sigma,
            sample_rate=0.01,
            expected_batch_size=BATCH,
            estimator=str(mode.estimator),
            num_probes=mode.num_probes or 32,
            head_rank=mode.head_rank,
            schedule=str(mode.schedule),
            privacy_seed=0,
        )
    return Step(
        micro_batches,
        lambda ids: whole_losses(model, ids),
        engine.backward,
        lambda: engine.squared_norms.sqrt(),
        engine.step,
        optimizer,
        sum_scale=BATCH,
    )


def _opacus(
    mode: Mode,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: tuple[torch.Tensor, ...],
    sigma: float,
) -> Step:
    """Do what Opacus' ``make_private`` does, without a data loader; sums in place of means."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
    from opacus.validators import ModuleValidator

    ModuleValidator.validate(model, strict=True)
    keeps_gradients = mode.schedule == "per_sample_gradients"
    wrapped: Any
    if keeps_gradients:
        wrapped = GradSampleModule(model, loss_reduction="sum")
    else:
        wrapped = GradSampleModuleFastGradientClipping(
            model,
            loss_reduction="sum",
            max_grad_norm=MAX_GRAD_NORM,
            use_ghost_clipping=mode.estimator == "ghost",
        )
    private: Any = (DPOptimizer if keeps_gradients else DPOptimizerFastGradientClipping)(
        optimizer,
        noise_multiplier=sigma,
        max_grad_norm=MAX_GRAD_NORM,
        expected_batch_size=None,
        loss_reduction="sum",
        generator=torch.Generator(micro_batches[0].device).manual_seed(0),
    )

    def backward(losses: torch.Tensor) -> None:
        if keeps_gradients:
            losses.sum().backward()  # type: ignore[no-untyped-call]
        else:
            DPTensorFastGradientClipping(wrapped, private, losses, "sum").backward()

    def norms() -> torch.Tensor:
        if not keeps_gradients:
            return torch.as_tensor(wrapped.per_sample_gradient_norms)
        # As DPOptimizer.clip_and_accumulate takes them.
        each = [g.reshape(len(g), -1).norm(2, dim=-1) for g in private.grad_samples]
        together: torch.Tensor = torch.stack(each, dim=1).norm(2, dim=1)
        return together

    def finish() -> None:
        private.step()
        private.zero_grad(set_to_none=True)

    return Step(
        micro_batches,
        lambda ids: whole_losses(wrapped, ids),
        backward,
        norms,
        finish,
        optimizer,
        norms_at_step=keeps_gradients,
    )
