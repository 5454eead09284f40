"""The paper's route to ε: the loss of one gradient, integrated over the law of S.

``step`` bounds every gradient from above; this module follows one whose law of R is known exactly:
of rank one without a head; with a head of rank r, one with 2r equal singular values. Lower and
upper sums over the law of S (Riemann–Stieltjes) enclose its privacy loss, so that the answer is an
interval. It shares neither the curves nor the hulls of the other route: each checks the other, and
its lower end is a fact about a gradient that exists.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import special

from dprc.accounting.arrays import Array
from dprc.accounting.compose import Composition, Part
from dprc.accounting.convolve import Composed, convolve
from dprc.accounting.events import StepEvent
from dprc.accounting.lattice import LossPmf
from dprc.accounting.scale import ScaleLaw
from dprc.accounting.step import step_curves

# Bins of the law of R, and of the output given S.
_RATIO_BINS = 1000
_OUTPUT_BINS = 700
_REACH = 11.0
# Share of δ that the lower end gives up for the rounding of losses to the lattice.
_SHARE = 1e-3


@dataclass(frozen=True)
class EpsilonInterval:
    """An interval that holds the ε of the gradient, and a best guess.

    Attributes:
        lower: Below it in exact arithmetic up to the bounded rounding of the transforms.
        estimate: Bin means, no allowance for the lattice.
        upper: Above it.
    """

    lower: float
    estimate: float
    upper: float


@dataclass(frozen=True)
class Witness:
    """A gradient whose ratio is R = w + (1 − w)·χ²_m/m exactly.

    Attributes:
        exact_share: w.
        degrees: m; None where R = 1.
    """

    exact_share: float
    degrees: int | None

    @classmethod
    def flat(cls, head_rank: int, num_probes: int) -> "Witness":
        """Of 2r equal singular values a head of rank r catches half, whatever its directions are.

        The other r, of a share 1/2r each, are left to the tail (docs/small_head.md).
        """
        return cls(0.5, head_rank * num_probes)


def witness_of(law: ScaleLaw) -> Witness:
    """A gradient that exists, where the law is as bad as is known."""
    if law.num_probes is None:
        return Witness(0.0, None)
    plain = [part for part in law.parts or (law,) if part.head_rank is None]
    if plain:
        # All of the gradient may be in a parameter without a head, and of rank one.
        return Witness(0.0, min(part.num_probes or 0 for part in plain))
    pairs = [(part.head_rank or 0, part.num_probes or 0) for part in law.parts or (law,)]
    return Witness.flat(*min(pairs, key=lambda pair: pair[0] * pair[1]))


def epsilon_interval(
    counts: Mapping[StepEvent, int],
    delta: float,
    witness_fn: Callable[[ScaleLaw], Witness] = witness_of,
) -> EpsilonInterval:
    """Enclose the ε of a gradient after these steps.

    Args:
        counts: How often each step was taken; noise multipliers above 0.
        delta: In (0, 1).
        witness_fn: The gradient to follow where a law is charged.

    Returns:
        Lower end, estimate and upper end; the larger direction of the neighbouring relation.

    Guarantee:
        lower ≤ ε ≤ upper for that gradient; hence lower bounds the ε of the mechanism.
        Lower sums merge outcomes and shrink S, which only hides; rounding a loss to the lattice
        keeps its mean, and by Hoeffding's inequality moves the total of n steps by more than
        h·√(n·log(1/η)/2) with probability at most η = δ/1000 (docs/theory.md, section 6).
    """
    witnesses = [witness_fn(event.law) for event in counts]
    directions = [
        _direction(counts, witnesses, delta, reverse=reverse) for reverse in (False, True)
    ]
    return EpsilonInterval(
        max(interval.lower for interval in directions),
        max(interval.estimate for interval in directions),
        max(interval.upper for interval in directions),
    )


def _direction(
    counts: Mapping[StepEvent, int], witnesses: Sequence[Witness], delta: float, *, reverse: bool
) -> EpsilonInterval:
    """One direction; ``reverse`` is the add direction."""
    steps = sum(counts.values())
    curves = [step_curves(event) for event in counts]
    parts = [
        Part(c.add, c.remove, n) if reverse else Part(c.remove, c.add, n)
        for c, n in zip(curves, counts.values(), strict=True)
    ]
    view = Composition(parts).view(delta)
    spread = math.sqrt(steps * -math.log(_SHARE * delta) / 2)
    interval = max(5e-4 * view.reference / spread, view.width / 2**20)

    def composed(which: Literal["lower", "middle", "upper"]) -> Composed:
        pmfs = [
            _lattice_pmf(event, witness, which, interval, reverse, limits)
            for event, witness, limits in zip(counts, witnesses, view.limits, strict=True)
        ]
        return convolve(
            pmfs,
            [np.rint(pmf.losses / interval).astype(np.int64) for pmf in pmfs],
            list(counts.values()),
            interval,
            view.order,
            pessimistic=which != "lower",
        )

    raised = min(delta * (1.0 + _SHARE), 0.5 * (1.0 + delta))
    lower = composed("lower").epsilon(raised) - interval * (spread + 1.0)
    return EpsilonInterval(
        max(lower, 0.0), composed("middle").epsilon(delta), composed("upper").epsilon(delta)
    )


def _lattice_pmf(
    event: StepEvent,
    witness: Witness,
    which: Literal["lower", "middle", "upper"],
    interval: float,
    reverse: bool,
    limits: tuple[float, float],
) -> LossPmf:
    """The privacy loss of one step on the lattice."""
    mass, other, low, high = _outcomes(event, witness, which)
    if reverse:
        mass, other, low, high = other, mass, -high, -low
    if which == "upper":
        infinite = float(mass[~np.isfinite(high) | (high > limits[1])].sum())
        kept = np.isfinite(high) & (high <= limits[1])
        mass, other, high = mass[kept], other[kept], np.maximum(high[kept], -limits[0])
        low = np.clip(low[kept], -limits[0], high)
        below = np.floor(low / interval)
        above = np.maximum(np.ceil(high / interval), below + 1)
        # Keep the mass under both hypotheses: merging the two ends back loses nothing.
        share = mass - np.exp(np.minimum(below * interval, 700.0)) * other
        upper = np.clip(share / -np.expm1((below - above) * interval), 0.0, mass)
    else:
        infinite = 0.0
        kept = (mass > 0) & (other > 0)
        loss = np.log(mass[kept] / other[kept])
        mass = mass[kept]
        # Dropping mass and lowering losses only lowers δ.
        mass, loss = mass[loss >= -limits[0]], loss[loss >= -limits[0]]
        scaled = np.minimum(loss, limits[1]) / interval
        below = np.floor(scaled)
        above = below + 1
        upper = mass * (scaled - below)
    index = np.concatenate([below, above]).astype(np.int64)
    first = int(index.min())
    masses = np.bincount(index - first, weights=np.concatenate([mass - upper, upper]))
    used = np.flatnonzero(masses)
    losses = np.asarray((used + first) * interval, dtype=np.float64)
    return LossPmf(losses, np.asarray(masses[used], dtype=np.float64), infinite)


@lru_cache(maxsize=3)
def _outcomes(
    event: StepEvent, witness: Witness, which: Literal["lower", "middle", "upper"]
) -> tuple[Array, Array, Array, Array]:
    """Bins of the output: probability with and without the sample, smallest and largest loss."""
    ratios, weights = _ratio_sum(witness, which)
    mu = 1.0 / (event.noise_multiplier * np.sqrt(ratios))
    q = event.sample_rate
    if event.sketch == "per_sample":
        top = float(np.min([mu[-1] + 40.0 / max(mu[-1], 1e-9), _REACH + mu.max(), 37.0]))
        edges = np.linspace(-_REACH, max(top, _REACH), 4 * _OUTPUT_BINS + 1)
        hit = np.zeros(edges.size + 1)
        log_ratio = np.full(edges.size, -np.inf)
        for part in np.array_split(np.arange(mu.size), max(1, mu.size // 50)):
            hit += _normal_bins(edges[:, None] - mu[part]) @ weights[part]
            exponent = np.outer(edges, mu[part]) - 0.5 * mu[part] ** 2 + np.log(weights[part])
            log_ratio = np.logaddexp(log_ratio, special.logsumexp(exponent, axis=1))
        miss = _normal_bins(edges)
    else:
        # Given S: bins that reach both means.
        edges = np.linspace(-_REACH, _REACH + mu, _OUTPUT_BINS + 1)
        hit = _normal_bins(edges - mu) * weights
        miss = _normal_bins(edges) * weights
        log_ratio = mu * edges - 0.5 * mu * mu
    with_sample = (1.0 - q) * miss + q * hit
    outside = math.log1p(-q) if q < 1.0 else -math.inf
    loss = np.logaddexp(outside, math.log(q) + log_ratio)
    shape = (1, *loss.shape[1:])
    low = np.concatenate([np.full(shape, -np.inf), loss])
    high = np.concatenate([loss, np.full(shape, np.inf)])
    return with_sample.ravel(), miss.ravel(), low.ravel(), high.ravel()


def _normal_bins(edges: Array) -> Array:
    """N(0,1) probabilities between edges along the first axis, with both open ends."""
    # Each difference is taken on the side where the probabilities are small.
    below, above = special.ndtr(edges), special.ndtr(-edges)
    inner = np.where(edges[1:] <= 0, np.diff(below, axis=0), -np.diff(above, axis=0))
    return np.concatenate([below[:1], inner, above[-1:]])


def _ratio_sum(witness: Witness, which: Literal["lower", "middle", "upper"]) -> tuple[Array, Array]:
    """Lower, middle or upper Riemann–Stieltjes sum over the law of R: ratios and weights."""
    if witness.degrees is None:
        return np.ones(1), np.ones(1)
    ratios, weights = _chi2_sum(witness.degrees / 2, which)
    return witness.exact_share + (1.0 - witness.exact_share) * ratios, weights


def _chi2_sum(half: float, which: Literal["lower", "middle", "upper"]) -> tuple[Array, Array]:
    """The sum for χ²_m/m, m = 2·half."""
    scores = np.linspace(-9.0, 8.0, _RATIO_BINS + 1)
    inner = np.where(
        scores < 0,
        special.gammaincinv(half, special.ndtr(np.minimum(scores, 0.0))),
        special.gammainccinv(half, special.ndtr(-np.maximum(scores, 0.0))),
    )
    edges = inner / half
    below, above = special.gammainc(half, inner), special.gammaincc(half, inner)
    mass = np.where(scores[1:] < 0, np.diff(below), -np.diff(above))
    if which == "lower":
        # Larger ratios, smaller sensitivities; the mass beyond the last edge is left out.
        return edges[1:], mass
    if which == "middle":
        moment = np.diff(special.gammainc(half + 1, inner))
        means = np.where(mass > 1e-12, moment / np.maximum(mass, 1e-300), edges[1:])
        return np.clip(means, edges[:-1], edges[1:]), mass
    # The mass below the first edge, 1e-19, is put where the sensitivity is without bound.
    first = special.gammaincinv(half, 1e-60) / half
    return (
        np.concatenate([[first], edges[:-1], edges[-1:]]),
        np.concatenate([below[:1], mass, above[-1:]]),
    )
