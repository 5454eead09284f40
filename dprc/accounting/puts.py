"""Put functions: the laws of a ratio R with mean 1, told by x -> E(x − R)₊.

One law is below another in convex order exactly where its put function is, so a pointwise maximum
of put functions bounds several laws at once. Here a put function is known by upper bounds at some
strikes; a convex function through or below these points is below the straight lines between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import special

from dprc.accounting.arrays import Array

_UNIT = 2.0 * np.finfo(float).eps
# Relative error of scipy's incomplete gamma functions, with a margin of ten.
GAMMA_ERROR = 1e-13


@dataclass(frozen=True, eq=False)
class PutBound:
    """Upper bounds on a convex put function of a ratio R ≥ 0 with mean 1.

    Attributes:
        strikes: Increasing, positive; shape (strikes,).
        values: At or above E(x − R)₊ at each strike; shape (strikes,).
    """

    strikes: Array
    values: Array

    @cached_property
    def _corners(self) -> tuple[Array, Array]:
        """Corners of the lower hull of the points, (0, 0), and a last slope of 1.

        A put function is convex, 0 at 0, and rises by at most 1: the hull of points above it stays
        above it.
        """
        x = np.concatenate([[0.0], self.strikes])
        y = np.concatenate([[0.0], self.values])
        kept = [0]
        for index in range(1, x.size):
            while len(kept) > 1:
                a, b = kept[-2], kept[-1]
                if (y[b] - y[a]) * (x[index] - x[b]) < (y[index] - y[b]) * (x[b] - x[a]):
                    break
                kept.pop()
            kept.append(index)
        x, y = x[kept], y[kept]
        # From where the hull rises faster than 1 a line of slope 1 stays above the put function.
        steep = np.flatnonzero(np.diff(y) >= np.diff(x))
        end = int(steep[0]) + 1 if steep.size else x.size
        return x[:end], y[:end]

    def at(self, strikes: Array) -> Array:
        """The bound at any strikes ≥ 0."""
        x, y = self._corners
        beyond = np.maximum(strikes - x[-1], 0.0)
        value: Array = np.interp(strikes, x, y) + beyond
        return value * (1.0 + 4 * _UNIT)

    def atoms(self) -> tuple[Array, Array, Array, float]:
        """The discrete law whose put function the bound is.

        Returns:
            ratios, masses, the rounding of each mass, and the mass at 0.
        """
        x, y = self._corners
        slopes = np.append(np.diff(y) / np.diff(x), 1.0)
        masses = np.diff(slopes)
        rounding = 8 * _UNIT * (slopes[1:] + slopes[:-1])
        return x[1:], np.maximum(masses, 0.0), rounding, float(slopes[0]) * (1.0 + 8 * _UNIT)


def chi2_puts(strikes: Array, num_probes: int) -> Array:
    """E(x − X)₊ for X = χ²_k/k at each strike, rounded up.

    Source:
        x·F_k(xk) − F_{k+2}(xk), from E[X; X ≤ x] = F_{k+2}(xk).
    """
    half = num_probes / 2
    below = strikes * special.gammainc(half, strikes * half)
    moment = special.gammainc(half + 1, strikes * half)
    # Above the mean by the call, where that is the smaller term.
    call = special.gammaincc(half + 1, strikes * half) - strikes * special.gammaincc(
        half, strikes * half
    )
    value = np.where(strikes < 1.0, below - moment, strikes - 1.0 + call)
    # The call is a difference of terms near it in size; x − 1 is exact but for its last digit.
    above = special.gammaincc(half + 1, strikes * half) * (1.0 + strikes)
    size = np.where(strikes < 1.0, below + moment, 2.0 * above)
    bound: Array = np.maximum(value, 0.0) + 3 * GAMMA_ERROR * size + 2 * _UNIT * value
    return bound


def largest(bounds: Sequence[PutBound]) -> PutBound:
    """The pointwise maximum: it bounds a law that is below one of several, unknown which.

    Between the strikes of all of them the maximum is convex, as each bound is: straight lines
    through its values there are above it.
    """
    strikes = np.unique(np.concatenate([bound.strikes for bound in bounds]))
    values = np.max([bound.at(strikes) for bound in bounds], axis=0)
    return PutBound(strikes, values)
