"""Composition of steps: the lattice, the tilt and the range are chosen from the problem."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dprc.accounting.arrays import Array, Ints
from dprc.accounting.convolve import (
    WINDOW_LOG_MASS,
    Composed,
    convolve,
    log_moment,
    spread,
    window,
)
from dprc.accounting.lattice import (
    LossPmf,
    adapted_indices,
    coarse_losses,
    dominating_pmf,
    loss_limit,
)
from dprc.accounting.step import CurveFn

# Relative excess of ε that the lattice may cause.
DEFAULT_TOLERANCE = 1e-4
# Cells of a transform, at most: 16 MB for each array of them.
_MAX_CELLS = 2**21
# An exported distribution is accurate at these δ.
_EXPORT_DELTAS = (1e-2, 1e-5, 1e-8, 1e-11)
# Where the search for the δ of an ε begins, and below which it ends.
_FIRST_DELTA, _SMALLEST_DELTA = 1e-5, 1e-60
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
        """The smallest ε whose δ is at most the given one.

        Raises:
            PrivacyError: Floating-point error could decide the answer.
        """
        # Total variation adds up: rare participation may need no privacy loss at all.
        at_zero = np.zeros(1)
        if sum(part.count * float(part.curve(at_zero)[0]) for part in self._parts) <= delta:
            return 0.0
        if self._steps == 1:
            return _invert(self._parts[0].curve, delta)
        coarse = self._refined(self._coarse(delta), delta)
        order, reference = _order_for_delta(coarse, self._counts, delta)
        answer = self._compose(coarse, order, reference).epsilon(delta)
        return min(answer, _largest_loss(coarse, self._counts, delta))

    def ceiling(self, delta: float) -> float:
        """An ε, as a rule far too large, whose δ is at most the given one beyond all doubt."""
        return _largest_loss(self._coarse(delta), self._counts, delta)

    def delta(self, epsilon: float) -> float:
        """δ at this ε."""
        if self._steps == 1:
            return float(self._parts[0].curve(np.array([epsilon]))[0])
        # What a rough look at the steps leaves out is a share of the δ it is made for: that δ is
        # found by iteration. Each answer is a bound.
        best, target = 1.0, _FIRST_DELTA
        while True:
            coarse = self._refined(self._coarse(target), target)
            order, _ = _order_for_epsilon(coarse, self._counts, epsilon)
            found = self._compose(coarse, order, epsilon).delta(epsilon)
            if not _SMALLEST_DELTA < found < 0.99 * best:
                return min(best, found)
            best = found
            target = min(found, _FIRST_DELTA)

    def view(self, delta: float) -> View:
        """Where the composed loss is decided at this δ, for others that convolve."""
        target = _INFINITE_SHARE * delta / self._steps
        coarse = self._coarse(delta)
        order, reference = _order_for_delta(coarse, self._counts, delta)
        low, high = window(coarse, self._counts, order)
        limits = [
            (loss_limit(part.dual, target), loss_limit(part.curve, target)) for part in self._parts
        ]
        return View(order, reference, high - low, limits)

    def export_interval(self) -> tuple[float, float]:
        """The lattice interval that suits an exported distribution, and the least allowed one.

        Below the latter the distribution would have too many cells.
        """
        coarse = self._coarse(min(_EXPORT_DELTAS))
        tilts = [_order_for_delta(coarse, self._counts, delta) for delta in _EXPORT_DELTAS]
        windows = [window(coarse, self._counts, order) for order in (0.0, *(t[0] for t in tilts))]
        width = max(high for _, high in windows) - min(low for low, _ in windows)
        interval = min(self._interval(coarse, order, reference) for order, reference in tilts)
        return interval, width / _MAX_CELLS

    def masses(self, interval: float) -> tuple[int, Array, float]:
        """The composed loss itself, accurate in the tail too.

        Args:
            interval: Lattice interval.

        Returns:
            Lattice index of the first mass, masses, and the infinite mass, all upper bounds.
        """
        coarse = self._coarse(min(_EXPORT_DELTAS))
        orders = [_order_for_delta(coarse, self._counts, delta)[0] for delta in _EXPORT_DELTAS]
        # One pmf for all tilts: bounds on the masses of the same convolution may be combined.
        pmfs, indices = [], []
        for part, rough in zip(self._parts, coarse, strict=True):
            seen = [adapted_indices(rough, order, interval) for order in (0.0, *orders)]
            losses = np.asarray(np.unique(np.concatenate(seen)) * interval, np.float64)
            pmfs.append(dominating_pmf(losses, part.curve(losses)))
            indices.append(np.rint(pmfs[-1].losses / interval).astype(np.int64))
        views = [convolve(pmfs, indices, self._counts, interval, order) for order in (0.0, *orders)]
        start = min(view.start for view in views)
        stop = max(view.start + view.masses.size for view in views)
        least = np.full(stop - start, np.inf)
        for view in views:
            cells = slice(view.start - start, view.start - start + view.masses.size)
            least[cells] = np.minimum(least[cells], view.upper_masses())
        # Below the untilted window is exp(-36) of the mass; a gap between windows holds no more.
        outside = min(view.outside for view in views) + 3 * math.exp(-WINDOW_LOG_MASS)
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

    def _refined(self, coarse: Sequence[LossPmf], delta: float) -> list[LossPmf]:
        """A second rough look, where the first one saw the tilted mass."""
        order, reference = _order_for_delta(coarse, self._counts, delta)
        interval = 8 * self._interval(coarse, order, reference)
        return [fine for fine, _ in self._fine(coarse, order, interval)]

    def _fine(
        self, coarse: Sequence[LossPmf], order: float, interval: float
    ) -> Iterator[tuple[LossPmf, Ints]]:
        """Dominating pmfs on the lattice, with the lattice indices of their losses."""
        for part, rough in zip(self._parts, coarse, strict=True):
            losses = np.asarray(adapted_indices(rough, order, interval) * interval, np.float64)
            fine = dominating_pmf(losses, part.curve(losses))
            yield fine, np.rint(fine.losses / interval).astype(np.int64)

    def _interval(self, coarse: Sequence[LossPmf], order: float, reference: float) -> float:
        """The widest lattice whose error in ε stays within the tolerance at ε = reference.

        Rounding up moves ε by at most one interval per step; splitting a mass between two points
        adds a variance of up to a quarter interval squared, h²/6 on average, to each step's loss.
        """
        error = self._tolerance * reference / self._steps
        low, high = window(coarse, self._counts, order)
        # A rough answer gets by with shorter transforms.
        cells = _MAX_CELLS if self._tolerance <= DEFAULT_TOLERANCE else _MAX_CELLS // 8
        return max(error, math.sqrt(12 * error / (1 + order)), (high - low) / cells)

    def _compose(
        self,
        coarse: Sequence[LossPmf],
        order: float,
        reference: float,
    ) -> Composed:
        """Choose the lattice, look at the curves again on it, and convolve."""
        interval = self._interval(coarse, order, reference)
        # A tilt that falls off within one cell resolves nothing, and drowns the other cells.
        order = min(order, 1.0 / interval)
        pmfs, indices = zip(*self._fine(coarse, order, interval), strict=True)
        return convolve(pmfs, indices, self._counts, interval, order)


def _largest_loss(pmfs: Sequence[LossPmf], counts: Sequence[int], delta: float) -> float:
    """The largest finite composed loss: there δ is the infinite mass; inf where that is above δ."""
    pairs = list(zip(counts, pmfs, strict=True))
    if sum(n * pmf.infinite_mass for n, pmf in pairs) * (1.0 + 1e-12) > delta:
        return math.inf
    return sum(n * float(pmf.losses[-1]) for n, pmf in pairs) * (1.0 + 1e-12)


def _order_for_delta(
    pmfs: Sequence[LossPmf], counts: Sequence[int], delta: float
) -> tuple[float, float]:
    """The tilt whose moment bound on ε at this δ is smallest, and that ε.

    Since 1 − e^(ε−L) ≤ e^(θ(L−ε)) θ^θ/(1+θ)^(1+θ), log δ is at most log E e^(θL) − θε + θ log θ −
    (1+θ) log(1+θ). The θ of the smallest ε satisfies ε = mean − log(1 + 1/θ), mean that of the
    loss under the tilt; then −log δ = θ·mean − log E e^(θL) + log(1+θ).
    """

    def gap(order: float) -> float:
        mean, _ = spread(pmfs, counts, order)
        moment = log_moment(pmfs, counts, order)
        return order * mean - moment + math.log1p(order) + math.log(delta)

    return _solve(pmfs, counts, gap)


def _order_for_epsilon(
    pmfs: Sequence[LossPmf], counts: Sequence[int], epsilon: float
) -> tuple[float, float]:
    """The tilt whose moment bound on δ at this ε is smallest."""

    def gap(order: float) -> float:
        return spread(pmfs, counts, order)[0] - math.log1p(1.0 / order) - epsilon

    return _solve(pmfs, counts, gap)


def _solve(
    pmfs: Sequence[LossPmf], counts: Sequence[int], gap_fn: Callable[[float], float]
) -> tuple[float, float]:
    """The tilt where an increasing function of it crosses 0, and the ε that belongs to it."""
    largest = max(float(pmf.losses[-1]) for pmf in pmfs)
    low, high = math.log(1e-6 / largest), math.log(1e6 / largest) + 10
    for _ in range(40):
        middle = 0.5 * (low + high)
        if gap_fn(math.exp(middle)) > 0:
            high = middle
        else:
            low = middle
    order = math.exp(low)
    mean, deviation = spread(pmfs, counts, order)
    return order, max(mean - math.log1p(1.0 / order), 0.1 * deviation)


def _invert(curve: CurveFn, delta: float) -> float:
    """About the smallest ε at which one step's curve is at most δ, never below it."""
    high = loss_limit(curve, delta)
    if float(curve(np.array([high]))[0]) > delta:
        return math.inf
    low = 0.0
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        if float(curve(np.array([middle]))[0]) <= delta:
            high = middle
        else:
            low = middle
    return high
