"""Put functions from Laplace transforms, rounded up.

E(x − R)₊ has the Laplace transform E e^(−sR)/s² in x. On a line Re s = σ > 0 the trapezoidal sum of
step h over the whole line equals Σ_j E(x + jL − R)₊·e^(−jσL), L = 2π/h: each term is at least 0 and
the one with j = 0 is the put, so the sum is never below it (docs/small_head.md, Lemma 6). On a line
with σ < 0 it is the same with the call E(R − x)₊, which is the put less x − 1. What is cut off at
the end, and the rounding, are bounded and added.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dprc.accounting.arrays import Array

Complex = npt.NDArray[np.complex128]

# Error of a transform at s, relative to its value at σ, for each unit of 50 + |s|: exponents are
# sums of ten terms of at most 2|s|, each within ten roundings of 1.2e-16 (docs/small_head.md,
# Lemma 6).
_TRANSFORM_ERROR = 4e-14


@dataclass(frozen=True)
class Line:
    """A vertical line of integration.

    Attributes:
        sigma: Its real part.
        period: L, large enough that e^(−|σ|L) is small beside the puts in question.
        reach: Largest imaginary part, about.
    """

    sigma: float
    period: float
    reach: float

    @cached_property
    def points(self) -> Complex:
        """The points of the sum in the upper half plane; shape (points,)."""
        step = 2.0 * math.pi / self.period
        heights = step * np.arange(math.ceil(self.reach / step) + 1)
        return np.asarray(self.sigma + 1j * heights, dtype=np.complex128)

    def puts(self, strikes: Array, transform: Complex, cut: float) -> tuple[Array, Array]:
        """Lower and upper bounds on E(x − R)₊ − (x − 1)₊; 0 and inf where the line does not serve.

        Args:
            strikes: x.
            transform: E e^(−sR) at the points.
            cut: Bound on |E e^(−sR)| at the last point and beyond.
        """
        step = 2.0 * math.pi / self.period
        weights = np.where(np.arange(self.points.size) > 0, 1.0, 0.5) * step / math.pi
        usable = self.sigma * strikes < 600.0
        x = np.where(usable, strikes, 0.0)
        value = (np.exp(np.outer(x, self.points)) @ (weights * transform / self.points**2)).real
        growth = np.exp(self.sigma * x)
        end = float(self.points[-1].imag)
        # The put and the call differ by x − 1: one of them is what is asked for.
        parity = np.where((self.sigma > 0) == (strikes < 1.0), 0.0, np.abs(strikes - 1.0))
        # ∫ dω/ω² beyond the end; and the transform's error times the sum of 1/|s|².
        rest = growth * cut / (math.pi * end)
        size = step / (2.0 * math.pi * self.sigma**2) + 1.0 / (2.0 * abs(self.sigma))
        error = _TRANSFORM_ERROR * (50.0 + abs(complex(self.points[-1])))
        rounding = growth * error * abs(complex(transform[0])) * size + 1e-15 * parity
        upper = np.where(usable, np.maximum(value - parity, 0.0) + rest + rounding, np.inf)
        # Terms j ≥ 1, which only the lower bound must leave out: a put is at most its strike, and
        # 0 at strikes below 0.
        images = 1.1 * (x + self.period) * math.exp(-abs(self.sigma) * self.period)
        served = usable & (self.sigma > 0) & (strikes < self.period)
        lower = np.where(served, np.maximum(value - parity - rest - rounding - images, 0.0), 0.0)
        return lower, upper


def log1p(z: Complex) -> Complex:
    """log(1 + z) for Re z > −1, accurate near 0."""
    real = 0.5 * np.log1p(z.real * (2.0 + z.real) + z.imag**2)
    result: Complex = real + 1j * np.arctan2(z.imag, 1.0 + z.real)
    return result
