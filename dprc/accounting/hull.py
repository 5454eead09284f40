"""Convex hulls of curves, by removing points that cannot be on them."""

from collections.abc import Callable

import numpy as np

from dprc.accounting.scale import Array

# Removing a point that rounding put on the wrong side of a chord costs a few units in the last
# place, in each of a handful of passes.
_SLACK = 1e-13


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
    while x.size > 2:
        slope = np.diff(y) / np.diff(x)
        inner = np.concatenate([[True], slope[1:] < slope[:-1], [True]])
        if inner.all():
            break
        x, y = x[inner], y[inner]
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
