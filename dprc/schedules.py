"""What the engine does with contributions during a backward pass: take norms, or form totals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from dprc.contributions import Contribution, MatrixUse, SampleUse, VectorUse, matrix_shape
from dprc.errors import PrivacyError
from dprc.estimators import Accumulation, Estimator
from dprc.precision import full_precision, work_dtype
from dprc.sketch import SketchSource

Replay = Callable[[torch.Tensor], Any]


class Pass(Protocol):
    """A backward pass in progress."""

    def take(self, parameter: int, contribution: Contribution, replay: Replay | None) -> None:
        """Take one use of one parameter.

        Args:
            parameter: Its index.
            contribution: The use.
            replay: Delivers the use again with each sample's gradient multiplied by a factor; None
                where only keeping it will do.
        """


class Totals:
    """The clipped sums of one logical batch, made as gradients arrive.

    Not before: while activations live, a buffer for every parameter would add to the peak.

    Args:
        parameters: The trained parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._totals: dict[int, torch.Tensor] = {}

    def add(self, parameter: int, contribution: Contribution) -> None:
        """Add one use of one parameter."""
        like = self._parameters[parameter]
        with torch.no_grad(), full_precision(like.device):
            total = self._totals.get(parameter)
            self._totals[parameter] = contribution.add_total(total, like)

    def pop(self, parameter: int) -> torch.Tensor:
        """Take a parameter's sum out: zeros if it was not used."""
        like = self._parameters[parameter]
        total = self._totals.pop(parameter, None)
        return torch.zeros_like(like, dtype=work_dtype(like.dtype)) if total is None else total

    def reduce(self, parameters: Sequence[int]) -> None:
        """Add up over processes what there is so far; one process has nothing to add."""

    def finish_batch(self) -> None:
        """Do what is left to do after a micro-batch."""

    def part(self, parameter: int) -> tuple[int, torch.Size] | None:
        """Return which part ``pop`` gives, as ``add_gaussian_noise_`` knows it; None for all."""

    def as_gradient(self, parameter: int, value: torch.Tensor) -> torch.Tensor:
        """Return what ``pop`` gave, noised and scaled, in the form of the parameter's ``.grad``."""
        return value

    def items(self) -> Iterable[tuple[int, torch.Tensor]]:
        """Return the sums there are: (index, sum)."""
        return self._totals.items()


class NormPass:
    """Adds up the squared norm of each sample's gradient over all parameters.

    Args:
        shapes: Shape of each parameter.
        estimators: Estimator of each parameter; None where the gradient of a vector is taken
            exactly.
        source: Of the sketches; the parameter's index is filled in.
        batch: Number of samples, B.
        uses: How many uses of each parameter the forward pass saw: after the last one its norm is
            taken, and what it needed is freed.
        keep: Whether contributions are kept for ``add_totals_`` (book-keeping).

    Attributes:
        keep: May be switched off in mid-pass: the rest is not kept.
        replays: What is to be run again, weighted, instead of being kept.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        estimators: Sequence[Estimator | None],
        source: SketchSource,
        batch: int,
        *,
        uses: Mapping[int, int],
        keep: bool,
    ) -> None:
        self._shapes, self._estimators, self._source = shapes, estimators, source
        self._batch, self.keep = batch, keep
        self._missing = dict(uses)
        self._norms: dict[int, torch.Tensor] = {}
        self._matrices: dict[int, Accumulation] = {}
        self._vectors: dict[int, torch.Tensor] = {}  # parameter -> (B, *shape)
        self._kept: list[tuple[int, Contribution]] = []
        self.replays: list[Replay] = []

    def take(self, parameter: int, contribution: Contribution, replay: Replay | None) -> None:
        """Add one use to the parameter's norm."""
        if isinstance(contribution, MatrixUse):
            self._matrix(parameter).add_use(contribution.use)
            self._missing[parameter] = self._missing.get(parameter, 0) - 1
            if self._missing[parameter] == 0:
                self._norms[parameter] = self._matrices.pop(parameter).finish()
        elif isinstance(contribution, VectorUse):
            # Summed before it is squared: a bias used twice has one gradient.
            grads = contribution.per_sample()
            if parameter in self._vectors:
                grads = self._vectors[parameter] + grads
            self._vectors[parameter] = grads
        elif isinstance(contribution, SampleUse):
            grad = contribution.grad.to(work_dtype(contribution.grad.dtype))
            if parameter not in self._vectors:
                self._vectors[parameter] = grad.new_zeros(self._batch, *grad.shape)
            self._vectors[parameter][contribution.sample] += grad
        if not self.keep:
            return
        if replay is None:
            self._kept.append((parameter, contribution))
        elif not any(replay is known for known in self.replays):
            self.replays.append(replay)

    def _matrix(self, parameter: int) -> Accumulation:
        if parameter in self._norms:
            raise PrivacyError(
                f"parameter {parameter}: the backward pass used it more often than the forward "
                "pass. Compute the loss anew before each engine.backward()."
            )
        if parameter not in self._matrices:
            estimator = self._estimators[parameter]
            if estimator is None:
                raise PrivacyError(f"parameter {parameter}: used as a matrix, planned as a vector")
            rows, columns = matrix_shape(self._shapes[parameter])
            self._matrices[parameter] = estimator.begin(
                rows, columns, batch=self._batch, source=self._source.of_parameter(parameter)
            )
        return self._matrices[parameter]

    def per_parameter(self) -> dict[int, torch.Tensor]:
        """Return the squared norms of each used parameter: index -> (B,)."""
        norms = self._norms | {index: each.finish() for index, each in self._matrices.items()}
        for index, grads in self._vectors.items():
            norms[index] = grads.reshape(self._batch, -1).square().sum(1)
        return norms

    def add_totals_(self, totals: Totals, factors: torch.Tensor, excluded: torch.Tensor) -> None:
        """Add the weighted sum of the kept contributions to the totals.

        Args:
            totals: Of the logical batch.
            factors: (B,) clip factors.
            excluded: (B,) samples that contribute exactly zero.
        """
        masks, clips = bool(excluded.any()), bool((factors != 1).any())
        with torch.no_grad():
            while self._kept:  # freed one by one: the kept factors are the peak of book-keeping
                parameter, contribution = self._kept.pop()
                if masks:
                    contribution = contribution.masked(excluded)
                # Unweighted where it can be: bit for bit what plain training sums.
                totals.add(parameter, contribution.weighted(factors) if clips else contribution)


class IndependencePass:
    """Follows the loss of one sample alone; it must reach no other sample's rows.

    Args:
        sample: Which one.

    Attributes:
        size: Sum of squares of the sample's own rows; with 0 the check says nothing.
    """

    def __init__(self, sample: int) -> None:
        self._sample = sample
        self.size = 0.0

    def take(self, parameter: int, contribution: Contribution, replay: Replay | None) -> None:
        """Take nothing: only ``check`` looks."""

    def check(self, path: str, grads: torch.Tensor) -> None:  # grads (B, …)
        """Raise PrivacyError if the gradient has a row of another sample.

        A row that is not finite says nothing: zero times an infinite activation is NaN.
        """
        reached = ((grads != 0) & grads.isfinite()).reshape(grads.shape[0], -1).any(1)
        own = grads[self._sample].double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        self.size += float(own.square().sum())
        reached[self._sample] = False
        if bool(reached.any()):
            raise PrivacyError(
                f"{path}: the loss of one sample depends on other samples of the batch (or "
                "the model keeps samples on another axis than the first), so clipping each sample "
                "would bound nothing. Remove what couples them: batch statistics, a loss over the "
                "batch, a load-balancing term."
            )


class TotalPass:
    """Forms the sum over samples; the losses carry the clip factors already.

    Args:
        totals: Of the logical batch.
        excluded: (B,) samples that contribute exactly zero.
    """

    def __init__(self, totals: Totals, excluded: torch.Tensor) -> None:
        self._totals = totals
        self._excluded = excluded if bool(excluded.any()) else None

    def take(self, parameter: int, contribution: Contribution, replay: Replay | None) -> None:
        """Add one use to the parameter's total."""
        if self._excluded is not None:
            contribution = contribution.masked(self._excluded)
        self._totals.add(parameter, contribution)
