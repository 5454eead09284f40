"""Convolution of privacy losses, with a bound on every rounding.

The losses are tilted exponentially before the Fourier transform, so that the transform's absolute
error becomes a relative error of δ at the ε in question. A bound on it is added to δ as an explicit
floating-point term.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import fft, optimize

from dprc.accounting.arrays import Array, Ints
from dprc.accounting.lattice import LossPmf
from dprc.errors import PrivacyError

Spectrum = npt.NDArray[np.complex128]

# Half the machine epsilon: the relative error of one rounding, u below.
_ROUNDING = np.finfo(float).eps / 2
_UNIT = 4 * _ROUNDING
# exp(-36) of the tilted mass may lie outside the window.
WINDOW_LOG_MASS = 36.0
# Terms of δ below exp(-60) of the largest are bounded together.
_NEGLIGIBLE = 60.0
# How often the search for a lower bound on ε steps back, a quarter of a deviation each time.
_STRIDES = 40
# Relative error of a sum of positive terms and of the exponentials in it.
_SUM_ERROR = 1e-10


@dataclass(frozen=True)
class Composed:
    """The composed loss inside a window of the lattice, exponentially tilted.

    Attributes:
        interval: Lattice interval h.
        start: Lattice index of the first mass.
        masses: Tilted masses as computed; shape (cells,).
        order: The tilt: mass = tilted mass · exp(log_scale − order·loss).
        log_scale: See order.
        error_norm: Bound on the 2-norm of the error of the tilted masses.
        outside: Probability of infinite losses and of losses above the window.
        pessimistic: Whether δ is bounded from above; else from below.
    """

    interval: float
    start: int
    masses: Array
    order: float
    log_scale: float
    error_norm: float
    outside: float
    pessimistic: bool

    def delta_and_error(self, epsilon: float) -> tuple[float, float]:
        """A bound on δ at this ε, and the floating-point term in it.

        Source:
            δ(ε) = E (1 − exp(ε−L))₊; the error term is Cauchy–Schwarz (docs/theory.md, Lemma 8).
        """
        first = max(math.floor(epsilon / self.interval) + 1 - self.start, 0)
        reach = self.masses.size
        if self.order > 0:
            reach = min(reach, first + math.ceil(_NEGLIGIBLE / self.order / self.interval))
        masses = self.masses[first:reach]
        gap = np.minimum(epsilon - (np.arange(first, reach) + self.start) * self.interval, 0.0)
        kernel = -np.expm1(gap) * np.exp(self.order * gap)
        main = float(np.dot(masses, kernel))
        error = self.error_norm * float(np.linalg.norm(kernel))
        rest = 2.0 * math.exp(-_NEGLIGIBLE) if reach < self.masses.size else 0.0
        scale = math.exp(min(self.log_scale - self.order * epsilon, 690.0))
        if not self.pessimistic:
            # What wraps around into the window is at most the mass outside it.
            error += 2.0 * math.exp(-WINDOW_LOG_MASS)
            return max((main * (1.0 - _SUM_ERROR) - error) * scale, 0.0), error * scale
        total = (max(main, 0.0) * (1.0 + _SUM_ERROR) + error + rest) * scale + self.outside
        return min(total, 1.0), error * scale

    def delta(self, epsilon: float) -> float:
        """The bound on δ at this ε."""
        return self.delta_and_error(epsilon)[0]

    def epsilon(self, delta: float) -> float:
        """About the smallest ε ≥ 0 with delta(ε) ≤ δ, never below it; inf where there is none.

        Of lower bounds, about the largest ε ≥ 0 with delta(ε) > δ, never above it; 0 where none is
        found.

        Raises:
            PrivacyError: The floating-point term is more than a tenth of δ there.
        """
        if not self.pessimistic:
            return self._lower_epsilon(delta)
        if self.outside >= delta:
            return math.inf
        low = max(0.0, (self.start - 1) * self.interval)
        high = (self.start + self.masses.size) * self.interval
        result = low
        if self.delta(low) > delta:

            def excess(epsilon: float) -> float:
                return math.log(max(self.delta(epsilon), 1e-300) / delta)

            result = float(optimize.brentq(excess, low, high, xtol=1e-9 * high, rtol=1e-10))
            while self.delta(result) > delta:
                result += 2e-9 * high
        if self.delta_and_error(result)[1] > 0.1 * delta:
            raise PrivacyError(
                f"delta={delta!r} is too small for these steps: the bound on the floating-point "
                "error of their composition is more than a tenth of it; ask for a larger delta"
            )
        return result

    def _lower_epsilon(self, delta: float) -> float:
        """An ε ≥ 0 whose δ is above the given one, near the largest.

        A lower bound on δ falls on both sides of where the tilt keeps it accurate: the walk begins
        there.
        """
        losses = (np.arange(self.masses.size) + self.start) * self.interval
        weights = np.maximum(self.masses, 0.0)
        weights = weights / weights.sum()
        centre = float(weights @ losses)
        stride = 0.25 * math.sqrt(float(weights @ (losses - centre) ** 2)) + self.interval
        shift = math.log1p(1.0 / self.order) if self.order > 0 else 0.0
        low = max(centre - shift, 0.0)
        for _ in range(_STRIDES):
            if self.delta(low) > delta or low == 0.0:
                break
            low = max(low - stride, 0.0)
        if self.delta(low) <= delta:
            return 0.0
        high = low + stride
        while self.delta(high) > delta:
            low, high = high, high + stride

        def excess(epsilon: float) -> float:
            return math.log(max(self.delta(epsilon), 1e-300) / delta)

        result = float(optimize.brentq(excess, low, high, xtol=1e-9 * high, rtol=1e-10))
        while result > low and self.delta(result) <= delta:
            result -= 2e-9 * high
        return max(result, low)

    def upper_masses(self) -> Array:
        """Each cell's mass, untilted and raised by the error bound."""
        losses = (np.arange(self.masses.size) + self.start) * self.interval
        exponent = np.minimum(self.log_scale - self.order * losses, 690.0)
        raised: Array = (np.maximum(self.masses, 0.0) + self.error_norm) * np.exp(exponent)
        return raised * (1.0 + _SUM_ERROR)


def convolve(
    pmfs: Sequence[LossPmf],
    indices: Sequence[Ints],
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
        δ of the result bounds that of the exact convolution: the error of transforms and powers is
        in its error norm, what the window cuts off above counts as infinite, and what wraps around
        from below only adds (docs/theory.md, Lemma 8).
    """
    sign = 1.0 if pessimistic else -1.0
    low, high = window(pmfs, counts, order)
    start = math.floor(low / interval)
    cells: int = fft.next_fast_len(math.ceil(high / interval) - start + 2, real=True)
    end = (start + cells - 1) * interval
    moments = [pmf.log_moment(order) for pmf in pmfs]

    # A transform's error relative to the 2-norm: 7 u log2(N) (Higham 2002, Theorem 24.2).
    transform_error = 8 * _ROUNDING * max(1.0, math.log2(cells))
    spectrum = np.ones(cells // 2 + 1, dtype=np.complex128)
    # Over the kinds of step: Σ n‖X̂−X‖₂, the relative error of the powers, and log max Π|X|ⁿ.
    difference = power_error = log_peak = 0.0
    shift = 0
    for pmf, index, count, moment in zip(pmfs, indices, counts, moments, strict=True):
        # In the logarithm: a tiny mass may be tilted by more than a float can hold.
        used = pmf.masses > 0.0
        index, logs = index[used], np.log(pmf.masses[used])
        exponent = order * pmf.losses[used] - moment
        slack = _UNIT * (2.0 + np.abs(exponent) + np.abs(logs))
        tilted = np.exp(exponent + logs) * (1.0 + sign * slack)
        wrapped = np.bincount(index % cells, weights=tilted, minlength=cells) * (1 + sign * 1e-14)
        log_peak += count * max(math.log(float(wrapped.sum())), 0.0)
        # The heaviest cell is moved to the origin, where its transform is a constant without error.
        heaviest = int(np.argmax(wrapped))
        shift += count * heaviest
        spike = float(wrapped[heaviest])
        wrapped[heaviest] = 0.0
        rest = fft.rfft(np.roll(wrapped, -heaviest))
        difference += count * transform_error * float(np.linalg.norm(wrapped))
        factor, error = _power(spike, rest, float(wrapped.sum()), count)
        spectrum *= factor
        power_error += error
    masses = np.roll(fft.irfft(spectrum, cells), shift % cells - start % cells)
    norm = float(np.linalg.norm(masses))
    # |ΠX̂ⁿ − ΠXⁿ| ≤ Σ n|X̂−X|·max Π|X|ⁿ at each frequency, and Parseval.
    log_peak += difference * math.sqrt(cells)
    error_norm = difference * math.exp(min(log_peak, 690.0))
    error_norm += norm * (power_error + 8 * _ROUNDING * len(counts) + 2 * transform_error)

    log_scale = sum(n * moment for n, moment in zip(counts, moments, strict=True))
    rounding = _UNIT * sum(n * abs(moment) for n, moment in zip(counts, moments, strict=True))
    rounding += _UNIT * order * max(abs(start * interval), abs(end))
    finite = [math.log1p(-min(pmf.infinite_mass, 1.0 - _UNIT)) for pmf in pmfs]
    infinite = -math.expm1(sum(n * log for n, log in zip(counts, finite, strict=True)))
    outside = infinite * (1.0 + 1e-12) + _tail_above(pmfs, counts, order, end)
    return Composed(
        interval,
        start,
        masses,
        order,
        log_scale + sign * rounding,
        error_norm,
        outside if pessimistic else 0.0,
        pessimistic,
    )


def _power(spike: float, rest: Spectrum, rest_mass: float, exponent: int) -> tuple[Spectrum, float]:
    """(spike + rest)^exponent, and its relative error beyond that of the base.

    By squaring the error is at most 5 u per unit of the exponent. A dominant spike allows the
    logarithm, whose error is relative to the mass of the rest: rare participation needs that.
    """
    if spike <= 0.75:
        base = spike + rest
        result = np.ones_like(base)
        remaining = exponent
        while True:
            if remaining & 1:
                result *= base
            remaining >>= 1
            if remaining == 0:
                return result, 8 * _ROUNDING * exponent
            base = base * base
    excess = (spike - 1.0) + rest
    size = 0.5 * np.log1p(2.0 * excess.real + excess.real**2 + excess.imag**2)
    angle = np.arctan2(excess.imag, 1.0 + excess.real)
    # |excess| ≤ |spike − 1| + rest_mass, and the logarithm at most doubles it.
    scale = 2.0 * exponent * (abs(spike - 1.0) + rest_mass)
    return np.exp(exponent * size) * np.exp(1j * exponent * angle), 16 * _ROUNDING * (scale + 1.0)


def log_moment(pmfs: Sequence[LossPmf], counts: Sequence[int], order: float) -> float:
    """Log E exp(order · loss) of the composed finite loss."""
    return sum(n * pmf.log_moment(order) for n, pmf in zip(counts, pmfs, strict=True))


def spread(pmfs: Sequence[LossPmf], counts: Sequence[int], order: float) -> tuple[float, float]:
    """Mean and standard deviation of the tilted composed loss."""
    mean = variance = 0.0
    for pmf, count in zip(pmfs, counts, strict=True):
        tilted = pmf.tilted(order)
        centre = float(np.dot(tilted, pmf.losses))
        mean += count * centre
        variance += count * float(np.dot(tilted, (pmf.losses - centre) ** 2))
    return mean, math.sqrt(variance)


def window(pmfs: Sequence[LossPmf], counts: Sequence[int], order: float) -> tuple[float, float]:
    """Losses between which the tilted composed loss has all but exp(−36) of its mass."""
    base = log_moment(pmfs, counts, order)
    mean, deviation = spread(pmfs, counts, order)
    low = sum(n * float(p.losses[0]) for n, p in zip(counts, pmfs, strict=True))
    high = sum(n * float(p.losses[-1]) for n, p in zip(counts, pmfs, strict=True))
    for scale in _scales(deviation):
        up = log_moment(pmfs, counts, order + scale) - base
        high = min(high, (up + WINDOW_LOG_MASS) / scale)
        down = log_moment(pmfs, counts, order - scale) - base
        low = max(low, -(down + WINDOW_LOG_MASS) / scale)
    return min(low, mean - deviation), max(high, mean + deviation)


def _tail_above(pmfs: Sequence[LossPmf], counts: Sequence[int], order: float, end: float) -> float:
    """Chernoff bound on the probability of a finite composed loss above ``end``."""
    if end >= sum(n * float(p.losses[-1]) for n, p in zip(counts, pmfs, strict=True)):
        return 0.0
    _, deviation = spread(pmfs, counts, order)
    best = min(
        log_moment(pmfs, counts, order + scale) - (order + scale) * end
        for scale in _scales(deviation)
    )
    return math.exp(min(best, 0.0)) * (1.0 + 1e-9)


def _scales(deviation: float) -> Array:
    """Orders for Chernoff bounds around a tilt, for a loss of this standard deviation."""
    scales: Array = np.geomspace(0.02, 20.0, 25) / max(deviation, 1e-300)
    return scales
