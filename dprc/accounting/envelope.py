"""The envelope of the paper: the pointwise largest CDF of R over all spectra."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import special

from dprc.accounting.arrays import Array
from dprc.accounting.nodes import split_chi2_bins
from dprc.accounting.scale import ScaleLaw

_BINS = 200
# Error of the quadrature below, for 8 probes or more.
_PAIR_ERROR = 1e-6


@dataclass(frozen=True)
class EnvelopeBins:
    """The envelope law at unlimited rank: χ²_k/k below 1, the rest of the mass at 1.

    Attributes:
        edges: Bin edges, increasing, the last is 1; shape (bins+1,).
        low: Mass for each bin's lower end, with the bin's mass and mean; shape (bins,).
        high: Mass for its upper end; shape (bins,).
        at_one: Mass at R = 1.
        mass_at_zero: Mass below the first edge.
    """

    edges: Array
    low: Array
    high: Array
    at_one: float
    mass_at_zero: float


@cache
def envelope_bins(law: ScaleLaw) -> EnvelopeBins:
    """The bins of a law; for the exact law all mass is at 1, and heads are not counted."""
    if law.num_probes is None:
        return EnvelopeBins(np.ones(1), np.zeros(0), np.zeros(0), 1.0, 0.0)
    k = law.num_probes
    # Quantiles in the normal score, down to a probability of 1e-38.
    top = special.ndtri(special.gammainc(k / 2, k / 2))
    scores = np.linspace(-13.0, top, _BINS + 1)
    edges = special.gammaincinv(k / 2, special.ndtr(scores)) * 2.0 / k
    edges[-1] = 1.0
    low, high, slack = split_chi2_bins(edges, k)
    return EnvelopeBins(
        edges,
        low * (1.0 + slack),
        high * (1.0 + slack),
        float(special.gammaincc(k / 2, k / 2)) * (1.0 + slack),
        float(special.gammainc(k / 2, edges[0] * k / 2)) * (1.0 + slack),
    )


def envelope_cdf(ratio: float, num_probes: int, rank: int | None = None) -> float:
    """The largest P(R ≤ ratio) over all spectra of at most this rank.

    Args:
        ratio: Above 0.
        num_probes: k, at least 1.
        rank: d, at least 1; None for its limit.

    Returns:
        A probability. Up to 1 the spectrum of rank one is worst; beyond, spectra with two distinct
        eigenvalues on a narrow interval, then the flat one.

    Raises:
        ValueError: An argument is out of range.

    Source:
        The randomized clipping paper's envelope in three segments. The claim of Székely and Bakirov
        (2003) about the middle one is wrong; it is searched here.

    Example:
        >>> envelope_cdf(1.01, 32), round(envelope_cdf(1.01, 32, rank=1), 3)
        (1.0, 0.549)
    """
    if not ratio > 0:
        raise ValueError(f"ratio must be above 0, got {ratio!r}")
    if num_probes < 1 or (rank is not None and rank < 1):
        raise ValueError(f"num_probes and rank must be at least 1, got {num_probes}, {rank}")
    single = float(special.gammainc(num_probes / 2, ratio * num_probes / 2))
    if ratio <= 1.0 or rank == 1:
        return single
    if rank is None:
        return 1.0
    flat = float(special.gammainc(rank * num_probes / 2, ratio * rank * num_probes / 2))
    if ratio >= middle_edge(num_probes, rank):
        return flat
    return max(single, flat, _best_pair(ratio, num_probes, rank))


@cache
def middle_edge(num_probes: int, rank: int) -> float:
    """The ratio in [1, 2] from which on the flat spectrum is worst, by bisection."""
    low, high = 1.0, 2.0
    while high - low > 1e-5:
        middle = 0.5 * (low + high)
        flat = special.gammainc(rank * num_probes / 2, middle * rank * num_probes / 2)
        if _best_pair(middle, num_probes, rank) > flat + _PAIR_ERROR:
            low = middle
        else:
            high = middle
    return high


def _best_pair(ratio: float, k: int, rank: int) -> float:
    """Largest P(λ·χ²_{ik}/(ik) + (1−λ)·χ²_{jk}/(jk) ≤ ratio) over i + j ≤ rank and λ."""
    # Each pair is taken both ways round, so that the integral runs over the smaller share: the
    # other's CDF is smooth on its scale.
    shares = np.concatenate([[0.002, 0.005, 0.01], np.linspace(0.02, 0.5, 25)])
    multiplicities = {round(float(i)) for i in np.geomspace(1, rank - 1, 8)}
    pairs = {(i, j) for i in multiplicities for j in (1, rank - i)}
    pairs |= {(j, i) for i, j in pairs}
    return max(float(_pair_cdf(ratio, k, i, j, shares).max()) for i, j in pairs)


def _pair_cdf(ratio: float, k: int, i: int, j: int, share: Array) -> Array:
    """P(λ·χ²_{ik}/(ik) + (1−λ)·χ²_{jk}/(jk) ≤ ratio) for each λ, shape (shares,)."""
    points, weights = np.polynomial.legendre.leggauss(80)
    angle = 0.25 * np.pi * (points + 1.0)
    # Levels sin²: dense at both ends, where the quantile function is singular.
    first = special.gammaincinv(i * k / 2, np.sin(angle) ** 2) * 2.0 / (i * k)
    weights = weights * 0.25 * np.pi * np.sin(2.0 * angle)
    rest = np.maximum(ratio - share[:, None] * first, 0.0) / (1.0 - share[:, None])
    cdf: Array = special.gammainc(j * k / 2, rest * j * k / 2) @ weights
    return cdf
