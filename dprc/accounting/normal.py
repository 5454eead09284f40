"""The normal distribution, and the hockey-stick divergence of two normals, without cancellation."""

import math

import numpy as np
from scipy import special

from dprc.accounting.arrays import Array

_ROOT_HALF = math.sqrt(0.5)
_UNIT = 2.0 * np.finfo(float).eps


def density(x: Array) -> Array:
    """φ(x) = exp(−x²/2)/√(2π)."""
    return np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def lower_tail(x: Array) -> Array:
    """Φ(x), with a small relative error in the tail too."""
    value: Array = special.ndtr(x)
    return value


def gaussian_hockey_stick(log_gamma: Array, mu: Array) -> tuple[Array, Array]:
    """sup_E P(E) − γ Q(E) for P = N(μ,1), Q = N(0,1): Φ(a) − γ Φ(a−μ), a = μ/2 − log γ/μ.

    Args:
        log_gamma: Broadcast against mu.
        mu: Positive.

    Returns:
        The value and a bound on its floating-point error, at the broadcast shape.
    """
    # γ φ(a−μ) = φ(a): with the scaled complementary error function both terms share one
    # exponential, and their difference keeps its digits far in the tail.
    ratio = log_gamma / mu
    a = 0.5 * mu - ratio
    b = a - mu
    half = 0.5 * np.exp(-0.5 * a * a)
    tail_a = half * special.erfcx(np.abs(a) * _ROOT_HALF)
    tail_b = half * special.erfcx(np.abs(b) * _ROOT_HALF)
    difference = np.where(a < 0, tail_a - tail_b, np.where(b < 0, 1.0 - tail_a - tail_b, 0.0))
    if np.any(b >= 0):
        dual = -np.expm1(np.minimum(log_gamma, 0.0)) + tail_b - tail_a
        difference = np.where(b >= 0, dual, difference)
    error = (tail_a + tail_b) * (1.0 + (1.0 + np.abs(a)) * (0.5 * mu + np.abs(ratio)))
    error = 4 * _UNIT * (error + (a >= 0))
    return np.maximum(difference, 0.0), error
