"""Convex hulls of curves, by removing points that cannot be on them."""

import math
from collections.abc import Callable

import numpy as np

from dprc.accounting.arrays import Array, Ints

# Removing a point that rounding put on the wrong side of a chord costs a few units in the last
# place, in each of a handful of passes.
_SLACK = 1e-13
# A corner can wear away one point at a time: after so many passes, go point by point.
_MAX_PASSES = 12


def hockey_stick_hull(losses: Array, deltas: Array) -> Ints:
    """Indices of the points on the lower hull of δ as a function of e^ε; the last point is on it.

    Args:
        losses: Strictly increasing ε.
        deltas: Non-increasing.

    Returns:
        Increasing indices.
    """
    kept = np.arange(losses.size)
    for _ in range(_MAX_PASSES):
        gaps, falls = np.diff(losses[kept]), -np.diff(deltas[kept])
        with np.errstate(over="ignore"):
            after = np.append(falls / np.expm1(gaps), 0.0)
        before = np.concatenate([[1.0 - deltas[kept[0]]], falls / -np.expm1(-gaps)])
        convex = before >= after
        if convex.all():
            return kept
        kept = kept[convex]
    chain: list[int] = []
    for k in kept.tolist():
        while chain and _above_chord(losses, deltas, chain, k):
            chain.pop()
        chain.append(k)
    return np.array(chain)


def _above_chord(losses: Array, deltas: Array, chain: list[int], k: int) -> bool:
    """Whether the chain's last point lies above the chord from the one before it to point k."""
    j = chain[-1]
    # Before the first point comes e^ε = 0, where every curve is 1.
    fall, share = 1.0 - float(deltas[j]), 1.0
    if len(chain) > 1:
        i = chain[-2]
        fall, share = float(deltas[i] - deltas[j]), -math.expm1(float(losses[i] - losses[j]))
    growth = math.expm1(min(float(losses[k] - losses[j]), 700.0))
    return fall / share < float(deltas[j] - deltas[k]) / growth


def concave_majorant(x: Array, y: Array) -> Callable[[Array], Array]:
    """Log γ -> max over points of y − γ x, by the upper hull of the points.

    Args:
        x: At least 0; shape (points,).
        y: At least 0; shape (points,).

    Returns:
        A function of an array of log γ; never below the maximum over all points, at least 0.
    """
    order = np.lexsort((-y, x))
    x, y = x[order], y[order]
    # A point that is no higher than one to its left is never the maximum.
    highest = np.concatenate([[True], y[1:] > np.maximum.accumulate(y)[:-1]])
    x, y = x[highest], y[highest]
    kept = _upper_hull(x, y)
    x, y = x[kept], y[kept]
    with np.errstate(divide="ignore"):
        breaks = np.log(np.diff(y) / np.diff(x))[::-1]

    def conjugate(log_gamma: Array) -> Array:
        log_gamma = np.atleast_1d(np.asarray(log_gamma, dtype=float))
        with np.errstate(over="ignore"):
            gamma = np.exp(log_gamma)
        # From the right end: the larger γ, the further left the best point.
        best = x.size - 1 - np.searchsorted(breaks, log_gamma)
        value = np.zeros_like(log_gamma)
        for shift in (-1, 0, 1):
            index = np.clip(best + shift, 0, x.size - 1)
            with np.errstate(invalid="ignore"):
                cost = np.where(x[index] > 0, gamma * x[index], 0.0)
            # The cost is rounded down, the gain up.
            value = np.maximum(value, y[index] * (1.0 + _SLACK) - cost * (1.0 - _SLACK))
        return value

    return conjugate


def _upper_hull(x: Array, y: Array) -> Ints:
    """Indices of the points on the upper hull; x and y increase strictly."""
    kept = np.arange(x.size)
    for _ in range(_MAX_PASSES):
        slope = np.diff(y[kept]) / np.diff(x[kept])
        inner = np.concatenate([[True], slope[1:] < slope[:-1], [True]])[: kept.size]
        if inner.all():
            return kept
        kept = kept[inner]
    chain: list[int] = []
    for k in kept.tolist():
        while len(chain) > 1:
            i, j = chain[-2], chain[-1]
            if (y[j] - y[i]) / (x[j] - x[i]) > (y[k] - y[j]) / (x[k] - x[j]):
                break
            chain.pop()
        chain.append(k)
    return np.array(chain)
