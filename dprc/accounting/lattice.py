"""A step's curve as a discrete privacy loss distribution that dominates it.

Connecting points of the curve by straight lines in e^ε stays above it, since it is convex there
(docs/theory.md, Lemma 7). The result has its mass on multiples of a lattice interval, not all of
them used: fine where the composed loss is decided, coarse in the tails.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dprc.accounting.arrays import Array, Ints
from dprc.accounting.hull import hockey_stick_hull
from dprc.accounting.step import CurveFn

_UNIT = 2.0 * np.finfo(float).eps
# Losses beyond e^300 cannot be told from infinite ones.
_MAX_LOSS = 1e12
_POINTS_PER_DECADE = 40


@dataclass(frozen=True)
class LossPmf:
    """A discrete privacy loss distribution, each mass rounded up.

    Attributes:
        losses: Increasing; shape (points,).
        masses: Shape (points,).
        infinite_mass: Probability of an infinite loss.
    """

    losses: Array
    masses: Array
    infinite_mass: float

    def log_moment(self, order: float) -> float:
        """Log Σ mass · exp(order · loss), the infinite loss left out."""
        exponent = order * self.losses + self._log_masses
        top = float(exponent.max())
        return top + math.log(float(np.exp(exponent - top).sum()))

    def tilted(self, order: float) -> Array:
        """Masses proportional to mass · exp(order · loss), with sum 1."""
        exponent = order * self.losses + self._log_masses
        weight = np.exp(exponent - exponent.max())
        total: Array = weight / weight.sum()
        return total

    @cached_property
    def _log_masses(self) -> Array:
        with np.errstate(divide="ignore"):
            logs: Array = np.log(self.masses)
        return logs


def dominating_pmf(losses: Array, deltas: Array) -> LossPmf:
    """The pessimistic connect-the-dots distribution of points above a curve.

    Args:
        losses: Strictly increasing ε; shape (points,).
        deltas: At or above the curve at each of them, in [0, 1].

    Guarantee:
        The curve of the result is nowhere below the convex curve that the deltas bound: non-convex
        points are replaced by the lower hull, which a convex curve cannot exceed, and the
        rounding of each mass is added to it.

    Source:
        Doroshenko et al., Connect the Dots (2022), Algorithm 1, for uneven gaps.
    """
    deltas = np.minimum.accumulate(np.minimum(deltas, 1.0))
    hull = hockey_stick_hull(losses, deltas)
    losses, deltas = losses[hull], deltas[hull]
    gaps, falls = np.diff(losses), -np.diff(deltas)
    # Mass that the segment [i, i+1] puts on its upper end, and takes from its lower end.
    upper = np.concatenate([[1.0 - deltas[0]], falls / -np.expm1(-gaps)])
    with np.errstate(over="ignore"):
        lower = np.append(falls / np.expm1(gaps), 0.0)
    masses = upper - lower
    rounding = 4 * _UNIT * (upper + lower)
    return LossPmf(losses, np.maximum(masses, 0.0) + rounding, float(deltas[-1]))


def loss_limit(curve: CurveFn, target: float) -> float:
    """About the smallest ε ≥ 0 at which the curve is at most the target; the cap if there is none.

    Only accuracy depends on it: what lies beyond counts as infinite.
    """
    grid = np.concatenate([[0.0], np.logspace(-12, math.log10(_MAX_LOSS), 25)])
    below = np.flatnonzero(curve(grid) <= target)
    if below.size == 0:
        return _MAX_LOSS
    if below[0] == 0:
        return 1e-12
    low, high = grid[below[0] - 1], grid[below[0]]
    for _ in range(3):
        inner = np.linspace(low, high, 18)
        position = int(np.flatnonzero(curve(inner) <= target)[0])
        low, high = inner[position - 1], inner[position]
    return float(high)


def coarse_losses(low: float, high: float) -> Array:
    """Losses from −low to high, evenly spaced in the logarithm on both sides of 0."""

    def side(limit: float) -> Array:
        decades = min(10.0, 13.0 + math.log10(limit))
        return np.logspace(
            math.log10(limit) - decades, math.log10(limit), math.ceil(decades * _POINTS_PER_DECADE)
        )

    return np.concatenate([-side(low)[::-1], [0.0], side(high)])


def adapted_indices(pmf: LossPmf, order: float, interval: float) -> Ints:
    """Lattice indices for a second, finer look at the curve that gave a coarse pmf.

    Gaps are one interval where the tilted loss has its mass and widen with the inverse root of the
    mass beyond: a gap g costs an excess variance of g² times the mass in it.
    """
    tilted = pmf.tilted(order)
    cumulative = np.cumsum(tilted)
    beyond = np.maximum(np.minimum(cumulative, 1.0 - cumulative + tilted), 1e-30)
    median = float(pmf.losses[int(np.searchsorted(cumulative, 0.5))])
    centre = np.abs(pmf.losses - median)
    gap = interval * np.maximum(1.0, np.minimum((10.0 * beyond) ** -0.5, centre / 50 / interval))
    # Integrate 1/gap over the losses to place the points, then round them to the lattice.
    count = np.concatenate([[0.0], np.cumsum(np.diff(pmf.losses) / np.minimum(gap[1:], gap[:-1]))])
    points = np.interp(np.arange(math.ceil(count[-1]) + 1), count, pmf.losses)
    # Losses above the last point count as infinite, those below the first as the first: both ends
    # are rounded outwards, so that nothing is lost there.
    ends = [
        math.floor(float(pmf.losses[0]) / interval),
        math.ceil(float(pmf.losses[-1]) / interval),
    ]
    return np.unique(np.concatenate([np.rint(points / interval), ends]).astype(np.int64))
