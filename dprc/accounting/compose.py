"""Composition of steps: the n-fold convolution of privacy losses, with a bound on every rounding.

The losses are tilted exponentially before the Fourier transform, so that the transform's absolute
error becomes a relative error of δ at the ε in question. A bound on that error is added to each
mass of the result.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import fft, optimize

from dprc.accounting.lattice import (
    LossPmf,
    adapted_indices,
    coarse_losses,
    dominating_pmf,
    loss_limit,
)
from dprc.accounting.scale import Array
from dprc.accounting.step import CurveFn
from dprc.errors import PrivacyError

Spectrum = npt.NDArray[np.complex128]

_ROUNDING = np.finfo(float).eps / 2
_UNIT = 4 * _ROUNDING
# exp(-36) of the tilted mass may lie outside the window.
_WINDOW_LOG_MASS = 36.0
_MAX_CELLS = 2**22
# Relative excess of ε that the lattice may cause.
DEFAULT_TOLERANCE = 1e-4
# An exported distribution is accurate at these δ.
_EXPORT_DELTAS = (1e-2, 1e-5, 1e-8, 1e-11)
# Mass declared infinite, as a share of δ.
_INFINITE_SHARE = 1e-5


@dataclass(frozen=True)
class Part:
    """Equal steps, in one direction of the neighbouring relation.

    Attributes:
        curve: δ(ε) of one step.
        dual: δ(ε) of one step in the other direction.
        count: How many steps.
    """

    curve: CurveFn
    dual: CurveFn
    count: int


@dataclass(frozen=True)
class Composed:
    """The composed loss inside a window, exponentially tilted.

    Attributes:
        interval: Lattice interval.
        start: Lattice index of the first mass.
        weights: exp(order·(reference − loss)) · tilted mass, each rounded up.
        log_scale: Mass = weight · exp(log_scale).
        outside: Probability of infinite losses and of losses above the window, rounded up.
        error_share: Share of floating-point error bounds in the tilted mass.
    """

    interval: float
    start: int
    weights: Array
    log_scale: float
    outside: float
    error_share: float

    def delta(self, epsilon: float) -> float:
        """δ at this ε, an upper bound."""
        first = math.floor(epsilon / self.interval) + 1 - self.start
        weights = self.weights[max(first, 0) :]
        losses = (np.arange(weights.size) + (max(first, 0) + self.start)) * self.interval
        total = float(np.dot(weights, -np.expm1(np.minimum(epsilon - losses, 0.0))))
        if total > 0.0:
            total = math.exp(min(math.log(total) + self.log_scale, 0.0)) * (1.0 + 1e-10)
        return min(1.0, total + self.outside)

    def epsilon(self, delta: float) -> float:
        """The smallest ε ≥ 0 with delta(ε) ≤ δ; inf where there is none inside the window."""
        if self.outside >= delta:
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        losses = (np.arange(self.weights.size) + self.start) * self.interval
        # δ just below each lattice point, from sums over the tail; a guess, checked below.
        budget = (delta - self.outside) * math.exp(min(-self.log_scale, 700.0))
        mass = np.cumsum(self.weights[::-1])[::-1]
        high = losses.size - 1
        low = max(0, math.ceil(-self.start))
        while high - low > 1:
            middle = (low + high) // 2
            if mass[middle] <= budget or self.delta(losses[middle]) <= delta:
                high = middle
            else:
                low = middle
        result = float(
            optimize.brentq(
                lambda epsilon: self.delta(epsilon) - delta,
                max(0.0, losses[low] - self.interval),
                losses[high],
                xtol=1e-6 * self.interval,
                rtol=1e-12,
            )
        )
        if self.delta(result) > delta:
            result = result + 2e-6 * self.interval + 1e-11 * result
        return result if self.delta(result) <= delta else float(losses[high])


@dataclass(frozen=True)
class View:
    """Scales of a composition at one δ.

    Attributes:
        order: Tilt.
        reference: About ε.
        width: Of the window that holds the tilted loss.
        limits: For each part, the largest −loss and loss that matter.
    """

    order: float
    reference: float
    width: float
    limits: list[tuple[float, float]]


class Composition:
    """Any number of steps of any kind, in one direction; answers are upper bounds.

    Args:
        parts: Equal steps gathered.
        tolerance: Relative error of ε that the lattice may cause, on the private side.
    """

    def __init__(self, parts: Sequence[Part], tolerance: float = DEFAULT_TOLERANCE) -> None:
        self._parts = parts
        self._tolerance = tolerance
        self._steps = sum(part.count for part in parts)

    def epsilon(self, delta: float) -> float:
        """The smallest ε whose δ is at most the given one."""
        coarse = self._coarse(delta)
        order, reference = _order_for_delta(coarse, self._counts, delta)
        composed = self._compose(coarse, order, reference)
        _check_error(composed, delta)
        return composed.epsilon(delta)

    def delta(self, epsilon: float) -> float:
        """δ at this ε."""
        coarse = self._coarse(1e-30)
        order, _ = _order_for_epsilon(coarse, self._counts, epsilon)
        composed = self._compose(coarse, order, epsilon)
        return composed.delta(epsilon)

    def view(self, delta: float) -> View:
        """Where the composed loss is decided at this δ, for others that convolve."""
        target = _INFINITE_SHARE * delta / self._steps
        coarse = self._coarse(delta)
        order, reference = _order_for_delta(coarse, self._counts, delta)
        low, high = _window(coarse, self._counts, order)
        limits = [
            (loss_limit(part.dual, target), loss_limit(part.curve, target)) for part in self._parts
        ]
        return View(order, reference, high - low, limits)

    def export_interval(self) -> float:
        """The lattice interval that suits an exported distribution."""
        coarse = self._coarse(min(_EXPORT_DELTAS))
        tilts = [_order_for_delta(coarse, self._counts, delta) for delta in _EXPORT_DELTAS]
        return min(self._interval(coarse, order, reference) for order, reference in tilts)

    def masses(self, interval: float) -> tuple[int, Array, float]:
        """The composed loss itself, accurate in the tail too.

        Args:
            interval: Lattice interval.

        Returns:
            Lattice index of the first mass, masses, and the infinite mass, all upper bounds.
        """
        coarse = self._coarse(min(_EXPORT_DELTAS))
        orders = [_order_for_delta(coarse, self._counts, delta)[0] for delta in _EXPORT_DELTAS]
        views = [self._compose(coarse, order, 0.0, interval) for order in (0.0, *orders)]
        start = min(view.start for view in views)
        stop = max(view.start + view.weights.size for view in views)
        least = np.full(stop - start, np.inf)
        for view in views:
            part = slice(view.start - start, view.start - start + view.weights.size)
            with np.errstate(divide="ignore"):
                masses = np.exp(np.log(view.weights) + view.log_scale)
            least[part] = np.minimum(least[part], masses * (1.0 + 1e-10))
        # Below the untilted window is exp(-36) of the mass; a gap between windows holds no more.
        outside = min(view.outside for view in views) + 3 * math.exp(-_WINDOW_LOG_MASS)
        return start, np.where(np.isfinite(least), least, 0.0), outside

    @property
    def _counts(self) -> list[int]:
        return [part.count for part in self._parts]

    def _coarse(self, delta: float) -> list[LossPmf]:
        """A rough pmf of each step, from which lattice and tilt are chosen."""
        target = _INFINITE_SHARE * delta / self._steps
        pmfs = []
        for part in self._parts:
            high = loss_limit(part.curve, target)
            low = loss_limit(part.dual, 1e-9 / self._steps)
            losses = coarse_losses(low, high)
            pmfs.append(dominating_pmf(losses, part.curve(losses)))
        return pmfs

    def _interval(self, coarse: Sequence[LossPmf], order: float, reference: float) -> float:
        """The widest lattice whose error in ε stays within the tolerance at ε = reference.

        Rounding up moves ε by at most one interval per step; splitting a mass between two points
        adds a variance of up to a quarter interval squared, h²/6 on average, to each step's loss.
        """
        error = self._tolerance * reference / self._steps
        low, high = _window(coarse, self._counts, order)
        return max(error, math.sqrt(12 * error / (1 + order)), (high - low) / _MAX_CELLS * 2)

    def _compose(
        self,
        coarse: Sequence[LossPmf],
        order: float,
        reference: float,
        interval: float | None = None,
    ) -> Composed:
        """Choose the lattice, look at the curves again on it, and convolve."""
        if interval is None:
            interval = self._interval(coarse, order, reference)
        pmfs = []
        indices = []
        for part, rough in zip(self._parts, coarse, strict=True):
            index = adapted_indices(rough, order, interval)
            losses = np.asarray(index * interval, dtype=np.float64)
            fine = dominating_pmf(losses, part.curve(losses))
            pmfs.append(fine)
            indices.append(np.rint(fine.losses / interval).astype(np.int64))
        return convolve(pmfs, indices, self._counts, interval, order)


def convolve(
    pmfs: Sequence[LossPmf],
    indices: Sequence[npt.NDArray[np.int64]],
    counts: Sequence[int],
    interval: float,
    order: float,
    *,
    pessimistic: bool = True,
) -> Composed:
    """Convolve each pmf count times, all on one lattice.

    Args:
        pmfs: One for each kind of step.
        indices: The lattice indices of their losses; they need not increase.
        counts: How often each is convolved.
        interval: Lattice interval.
        order: Exponential tilt, at least 0.
        pessimistic: Whether errors are added, or taken off for a lower bound.

    Guarantee:
        The result dominates the exact convolution: cells are raised by a bound on the error of the
        transforms and of the powers (docs/theory.md, Lemma 8), and what the window cuts off above
        counts as infinite. What wraps around from below only adds.
    """
    sign = 1.0 if pessimistic else -1.0
    low, high = _window(pmfs, counts, order)
    start = math.floor(low / interval)
    cells = fft.next_fast_len(math.ceil(high / interval) - start + 2, real=True)
    end = (start + cells - 1) * interval
    log_moments = [pmf.log_moment(order) for pmf in pmfs]
    log_scale = sum(n * moment for n, moment in zip(counts, log_moments, strict=True))

    # 7 u log2(N): the error of a radix-2 transform relative to the 2-norm (Higham, Theorem 24.2).
    transform_error = 8 * _ROUNDING * max(1.0, math.log2(cells))
    log_size = np.zeros(cells // 2 + 1)
    growth = np.zeros(cells // 2 + 1)
    spectrum = np.ones(cells // 2 + 1, dtype=complex)
    for pmf, index, count, moment in zip(pmfs, indices, counts, log_moments, strict=True):
        exponent = order * pmf.losses - moment
        tilted = pmf.masses * np.exp(exponent) * (1.0 + sign * _UNIT * (2.0 + np.abs(exponent)))
        wrapped = np.bincount(index % cells, weights=tilted, minlength=cells) * (1 + sign * 1e-14)
        transformed = fft.rfft(wrapped)
        error = transform_error * math.sqrt(cells) * float(np.linalg.norm(wrapped))
        size = np.abs(transformed)
        log_size += count * np.log(size + error)
        growth += count * np.log1p(error / np.maximum(size, 1e-300))
        spectrum *= _power(transformed, count)
    # Exact and computed spectrum both lie within a disc of this radius around each other.
    steps = sum(counts)
    largest = np.exp(np.minimum(log_size, 1.0))
    radius = largest * (-np.expm1(-growth) + 8 * _ROUNDING * (steps + len(counts)))
    cell_error = 2.0 * float(radius.sum()) / cells
    result = fft.irfft(spectrum, cells)
    cell_error += transform_error * float(np.linalg.norm(result))
    masses = np.roll(result, -(start % cells))
    if pessimistic:
        masses = np.maximum(masses, 0.0) + cell_error
    else:
        # What wraps around into the window is at most the mass outside it.
        masses = np.maximum(masses - cell_error - 2.0 * math.exp(-_WINDOW_LOG_MASS), 0.0)

    losses = (start + np.arange(cells)) * interval
    centre = 0.5 * (losses[0] + end)
    log_scale_error = _UNIT * sum(n * abs(m) for n, m in zip(counts, log_moments, strict=True))
    log_scale_error += _UNIT * order * max(abs(losses[0]), abs(end))
    with np.errstate(under="ignore"):
        weights = masses * np.exp(np.clip(order * (centre - losses), -700.0, 700.0))
    log_scale += sign * log_scale_error - order * centre
    above = _tail_above(pmfs, counts, order, end) if pessimistic else 0.0
    infinite = -math.expm1(
        sum(
            n * math.log1p(-min(p.infinite_mass, 1 - 1e-16))
            for n, p in zip(counts, pmfs, strict=True)
        )
    )
    return Composed(
        interval,
        start,
        weights,
        log_scale,
        infinite * (1.0 + 1e-12) + above,
        cell_error * cells,
    )


def _power(base: npt.NDArray[np.complex128], exponent: int) -> npt.NDArray[np.complex128]:
    """Powers by squaring: the relative error is at most 5 u per unit of the exponent."""
    result = np.ones_like(base)
    while True:
        if exponent & 1:
            result *= base
        exponent >>= 1
        if exponent == 0:
            return result
        base = base * base


def _tail_above(pmfs: Sequence[LossPmf], counts: Sequence[int], order: float, end: float) -> float:
    """Chernoff bound on the probability of a finite composed loss above ``end``."""
    if end >= sum(n * float(p.losses[-1]) for n, p in zip(counts, pmfs, strict=True)):
        return 0.0
    best = min(
        _log_moment(pmfs, counts, order + scale) - (order + scale) * end
        for scale in _scales(pmfs, counts, order)
    )
    return math.exp(min(best, 0.0)) * (1.0 + 1e-9)


def _log_moment(pmfs: Sequence[LossPmf], counts: Sequence[int], order: float) -> float:
    return sum(n * pmf.log_moment(order) for n, pmf in zip(counts, pmfs, strict=True))


def _spread(pmfs: Sequence[LossPmf], counts: Sequence[int], order: float) -> tuple[float, float]:
    """Mean and standard deviation of the tilted composed loss."""
    mean = variance = 0.0
    for pmf, count in zip(pmfs, counts, strict=True):
        tilted = pmf.tilted(order)
        centre = float(np.dot(tilted, pmf.losses))
        mean += count * centre
        variance += count * float(np.dot(tilted, (pmf.losses - centre) ** 2))
    return mean, math.sqrt(variance)


def _scales(pmfs: Sequence[LossPmf], counts: Sequence[int], order: float) -> Array:
    """Orders for Chernoff bounds around a tilt, on the scale of the tilted composed loss."""
    _, deviation = _spread(pmfs, counts, order)
    return np.geomspace(0.02, 20.0, 25) / max(deviation, 1e-300)


def _window(pmfs: Sequence[LossPmf], counts: Sequence[int], order: float) -> tuple[float, float]:
    """Losses between which the tilted composed loss has all but exp(−36) of its mass."""
    base = _log_moment(pmfs, counts, order)
    mean, deviation = _spread(pmfs, counts, order)
    low = sum(n * float(p.losses[0]) for n, p in zip(counts, pmfs, strict=True))
    high = sum(n * float(p.losses[-1]) for n, p in zip(counts, pmfs, strict=True))
    for scale in _scales(pmfs, counts, order):
        up = _log_moment(pmfs, counts, order + scale) - base
        high = min(high, (up + _WINDOW_LOG_MASS) / scale)
        down = _log_moment(pmfs, counts, order - scale) - base
        low = max(low, -(down + _WINDOW_LOG_MASS) / scale)
    return min(low, mean - deviation), max(high, mean + deviation)


def _order_for_delta(
    pmfs: Sequence[LossPmf], counts: Sequence[int], delta: float
) -> tuple[float, float]:
    """The tilt whose Chernoff bound on ε at this δ is smallest, and that ε."""
    target = -math.log(delta)

    def gap(log_order: float) -> float:
        order = math.exp(log_order)
        mean, _ = _spread(pmfs, counts, order)
        return order * mean - _log_moment(pmfs, counts, order) - target

    return _solve(pmfs, counts, gap)


def _order_for_epsilon(
    pmfs: Sequence[LossPmf], counts: Sequence[int], epsilon: float
) -> tuple[float, float]:
    """The tilt under which the composed loss has mean ε."""
    return _solve(
        pmfs, counts, lambda log_order: _spread(pmfs, counts, math.exp(log_order))[0] - epsilon
    )


def _solve(
    pmfs: Sequence[LossPmf], counts: Sequence[int], gap_fn: Callable[[float], float]
) -> tuple[float, float]:
    """The tilt where an increasing function of its logarithm crosses 0, and the mean loss there."""
    largest = max(float(pmf.losses[-1]) for pmf in pmfs)
    low, high = math.log(1e-6 / largest), math.log(1e6 / largest) + 10
    for _ in range(40):
        middle = 0.5 * (low + high)
        if gap_fn(middle) > 0:
            high = middle
        else:
            low = middle
    order = math.exp(low)
    mean, deviation = _spread(pmfs, counts, order)
    return order, max(mean, 0.1 * deviation)


def _check_error(composed: Composed, delta: float) -> None:
    """Refuse a δ that rounding could decide."""
    if composed.error_share > 0.1:
        raise PrivacyError(
            f"delta={delta!r} is too small: at this number of steps floating-point error is more "
            "than a tenth of it; ask for a larger delta"
        )
