"""The smallest model on which a step can go wrong, and samples whose gradients are known.

Losses are linear in the outputs of layers that lie side by side, so a sample's gradient does not
depend on the weights, and can be put where it does most harm: into one parameter, of the rank that
is worst for the estimator, with a norm far above the clipping bound. Everything else is the engine
that trains real models: its capture, its norms, its clipping, its noise, its step.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dprc.audit.settings import AuditSettings
from dprc.engine import PrivacyEngine

MATRIX, HEAD, BIAS = "matrix.weight", "head.weight", "head.bias"
HEAD_OUTPUTS = 4
# The bound is 1, so that everything below is in its units.
MAX_GRAD_NORM = 1.0
CANARY_NORM = 100.0
# A witness reveals what a shared sketch does to its direction, and is too small to move the sum.
WITNESS_NORM = 1e-3
# Rows and columns of the matrix that only other samples' gradients touch.
OTHERS = 1


class AuditedModel(nn.Module):
    """Layers side by side: a matrix whose norm is estimated, and small exact parameters.

    Args:
        width: Of the matrix, which is square.
        head: Whether there are the small parameters.
    """

    def __init__(self, width: int, *, head: bool) -> None:
        super().__init__()
        self.matrix = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, HEAD_OUTPUTS) if head else None

    def forward(self, batch: "Samples") -> torch.Tensor:
        """Return (B,) losses, whose gradients the samples fix."""
        losses: torch.Tensor = (self.matrix(batch.inputs) * batch.weights).sum((1, 2))
        if self.head is not None:
            losses = losses + (self.head(batch.inputs) * batch.head_weights).sum((1, 2))
        return losses


class Recorder(torch.optim.Optimizer):
    """An optimizer that moves nothing and keeps what it was given: all that an adversary sees.

    Attributes:
        released: The gradients of the last step, in the order of the parameters.
        taken: How often it was stepped.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.released: list[torch.Tensor] = []
        self.taken = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keep the gradients."""
        self.taken += 1
        held = [p for group in self.param_groups for p in group["params"]]
        self.released = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in held]


@dataclass(frozen=True)
class Samples:
    """Samples of T tokens each.

    Attributes:
        inputs: (B, T, width).
        weights: (B, T, width), of the matrix's outputs in the loss.
        head_weights: (B, T, 4), of the head's.
    """

    inputs: torch.Tensor
    weights: torch.Tensor
    head_weights: torch.Tensor

    def __len__(self) -> int:
        """Return B."""
        return self.inputs.shape[0]

    def at(self, indices: Sequence[int] | slice) -> "Samples":
        """Return some of them."""
        chosen = indices if isinstance(indices, slice) else list(indices)
        return Samples(self.inputs[chosen], self.weights[chosen], self.head_weights[chosen])

    @classmethod
    def stacked(cls, parts: Sequence["Samples"]) -> "Samples":
        """Return all of them together."""
        return cls(
            torch.cat([part.inputs for part in parts]),
            torch.cat([part.weights for part in parts]),
            torch.cat([part.head_weights for part in parts]),
        )


class SampleMaker:
    """Makes samples whose gradient lies in one parameter.

    Args:
        width: Of the matrix.
        rank: Of a canary's gradient in the matrix.
    """

    def __init__(self, width: int, rank: int) -> None:
        self.width, self.rank, self.tokens = width, rank, max(2, rank)

    def _empty(self) -> Samples:
        return Samples(
            torch.zeros(1, self.tokens, self.width),
            torch.zeros(1, self.tokens, self.width),
            torch.zeros(1, self.tokens, HEAD_OUTPUTS),
        )

    def in_matrix(self, norm: float) -> Samples:
        """Make a sample whose gradient has equal singular values and this norm."""
        made = self._empty()
        for token in range(self.rank):
            made.inputs[0, token, token] = 1.0
            made.weights[0, token, token] = norm / math.sqrt(self.rank)
        return made

    def at_entry(self, row: int, column: int, norm: float) -> Samples:
        """Make a sample whose gradient is one entry of the matrix."""
        made = self._empty()
        made.inputs[0, 0, column] = 1.0
        made.weights[0, 0, row] = norm
        return made

    def in_head(self, norm: float) -> Samples:
        """Make a sample whose gradient is one entry of the head's weight, and not in its bias."""
        made = self._empty()
        made.inputs[0, 0, 0] = 1.0
        made.head_weights[0, 0, 0] = norm
        made.head_weights[0, 1, 0] = -norm  # on an empty token: cancels in the bias alone
        return made

    def in_bias(self, norm: float) -> Samples:
        """Make a sample whose gradient is one entry of the head's bias."""
        made = self._empty()
        made.head_weights[0, 0, 0] = norm
        return made

    def along(self, parameter: str, released: torch.Tensor) -> float:
        """Project what was released on the unit direction of a canary in this parameter."""
        if parameter != MATRIX:
            return float(released.flatten()[0])
        return float(released.diagonal()[: self.rank].sum()) / math.sqrt(self.rank)

    def untouched(self) -> torch.Tensor:
        """Return the (width, width) mask of entries that no sample's gradient reaches."""
        mask = torch.ones(self.width, self.width, dtype=torch.bool)
        mask[: self.rank, : self.rank] = False
        mask[self.width - OTHERS :, self.width - OTHERS :] = False
        return mask


@dataclass(frozen=True)
class Rig:
    """A model, its engine, and the recorder of what leaves the engine."""

    model: AuditedModel
    engine: PrivacyEngine
    recorder: Recorder
    maker: SampleMaker

    def backward(self, samples: Samples) -> None:
        """Hand a micro-batch to the engine."""
        self.engine.backward(self.model(samples))

    def ratios(self) -> torch.Tensor:
        """Return (B,) estimated squared norms of the matrix in the last micro-batch."""
        return self.engine.squared_norms_by_parameter[MATRIX].detach().double()


def canary_rank(settings: AuditSettings) -> int:
    """Return the rank of the worst gradient: the least that leaves a head something to miss."""
    if settings.estimator != "hutchpp":
        return 1
    return (settings.head_rank or settings.num_probes) + 1


def rig_width(settings: AuditSettings) -> int:
    """Return a width at which the matrix is not taken exactly, with room for other samples."""
    return max(settings.num_probes + 1, canary_rank(settings)) + OTHERS + 1


def build_rig(
    settings: AuditSettings,
    noise_multiplier: float,
    *,
    head: bool,
    stream: int,
    width: int | None = None,
    sample_rate: float | None = None,
) -> Rig:
    """Make a model and the engine that is audited on it.

    Args:
        settings: Of the audit.
        noise_multiplier: σ.
        head: Whether the model has the small parameters too.
        stream: Tells the engines of one audit apart where the seed is fixed.
        width: Of the matrix; None takes the smallest that will do.
        sample_rate: Of the engine; None takes the settings'.
    """
    maker = SampleMaker(width or rig_width(settings), canary_rank(settings))
    model = AuditedModel(maker.width, head=head)
    recorder = Recorder(list(model.parameters()))
    seed = None if settings.seed is None else 1_000 * settings.seed + stream
    with warnings.catch_warnings():
        # Nothing is released here, and few probes are what is audited.
        warnings.filterwarnings("ignore", message="privacy_seed")
        engine = PrivacyEngine(
            model,
            recorder,
            max_grad_norm=MAX_GRAD_NORM,
            noise_multiplier=noise_multiplier,
            sample_rate=settings.sample_rate if sample_rate is None else sample_rate,
            expected_batch_size=1,
            estimator=settings.estimator,
            num_probes=settings.num_probes,
            sketch=settings.sketch,
            head_rank=settings.head_rank,
            schedule=settings.schedule,
            analysis=settings.analysis,
            privacy_seed=seed,
        )
    return Rig(model, engine, recorder, maker)


ProgressFn = Callable[[str], None]
