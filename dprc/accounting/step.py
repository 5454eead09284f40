"""The privacy curve of one step: δ(ε), never below the truth.

A curve is given for each direction of the neighbouring relation: ``remove`` compares the step with
the differing sample to the step without it, ``add`` the other way round. Both are upper bounds on
the hockey-stick divergence for every gradient the estimator's law allows, floating-point error
included. Theorem and lemma numbers are those of docs/theory.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dprc.accounting.arrays import Array
from dprc.accounting.envelope import envelope_bins
from dprc.accounting.events import StepEvent
from dprc.accounting.hull import concave_majorant
from dprc.accounting.nodes import RatioNodes, ratio_nodes
from dprc.accounting.normal import density, gaussian_hockey_stick, lower_tail
from dprc.accounting.scale import ScaleLaw

# Two units in the last place: every rounding below is a small multiple of it.
_UNIT = 2.0 * np.finfo(float).eps
# Values that underflow to zero are replaced by something no smaller than they were.
_TINY = 1e-300
# Relative error of the normal distribution function for |x| < 40, with a margin.
_TAIL_ERROR = 1e-12
# max |x φ(x)|, rounded up: the largest second derivative of the normal distribution function.
_MAX_CURVATURE = 0.24198
# φ(0)/2, rounded up: a tangent at μ* rises by at most this times μ* on the way to R = 0.
_TANGENT_RISE = 0.2

CurveFn = Callable[[Array], Array]


@dataclass(frozen=True)
class StepCurves:
    """One step's curves, as functions of ε (an array) that return δ of the same shape."""

    remove: CurveFn
    add: CurveFn


@lru_cache(maxsize=32)
def step_curves(event: StepEvent, coarseness: float = 1.0) -> StepCurves:
    """The curves of one step.

    Args:
        event: The step's settings; noise_multiplier above 0.
        coarseness: Above 1 for quicker and slightly larger bounds.

    Returns:
        Upper bounds on the hockey-stick divergence in both directions.

    Raises:
        ValueError: The event does not say who sees the sketch, or which analysis applies.
    """
    rate, sigma = event.sample_rate, event.noise_multiplier
    if event.analysis == "envelope" and event.sketch == "shared":
        bound = envelope_curve(sigma, event.law)
        return subsampled(bound, bound, rate)
    if event.analysis != "tight" or (
        not event.law.is_exact and event.sketch not in ("shared", "per_sample")
    ):
        raise ValueError(f"there is no analysis of {event!r}")
    shared = shared_curve(sigma, ratio_nodes(event.law), convex_order=not event.law.is_exact)
    curves = subsampled(shared, shared, rate)
    if event.law.is_exact or event.sketch == "shared":
        return curves
    hidden = subsampled(*per_sample_curves(sigma, event.law, coarseness), rate)
    # Hiding the sketch only takes from the adversary: the shared bound holds as well (Remark 3).
    return StepCurves(
        lambda epsilon: np.minimum(hidden.remove(epsilon), curves.remove(epsilon)),
        lambda epsilon: np.minimum(hidden.add(epsilon), curves.add(epsilon)),
    )


def subsampled(remove: CurveFn, add: CurveFn, sample_rate: float) -> StepCurves:
    """The curves under Poisson sampling, from the curves of a step that includes the sample.

    Args:
        remove: log γ -> sup over events E of P₁(E) − γ Q(E), P₁ with the sample, Q without it.
        add: log γ -> sup over events E of Q(E) − γ P₁(E).
        sample_rate: q in (0, 1].

    Source:
        docs/theory.md, Lemma 6: exact, for each given sketch and for hidden ones.
    """
    q = sample_rate

    def remove_fn(epsilon: Array) -> Array:
        epsilon = np.asarray(epsilon, dtype=float)
        # γ' = (e^ε − 1 + q)/q; where it is not positive the whole space is the worst event.
        near = np.expm1(np.minimum(epsilon, 1.0)) / q
        positive = (near > -1.0) | (epsilon > 1.0)
        safe = np.where(positive, near, 0.0)
        with np.errstate(divide="ignore", over="ignore"):
            log_gamma = np.where(
                epsilon > 1.0,
                epsilon - math.log(q) + np.log1p(-(1.0 - q) * np.exp(-np.maximum(epsilon, 1.0))),
                np.log1p(safe),
            )
            # The bound decreases in γ: rounding γ down is safe.
            loss = (1.0 + np.abs(safe)) / (1.0 + safe) * (1.0 + np.abs(epsilon))
        log_gamma = log_gamma - 4 * _UNIT * (np.where(epsilon > 1.0, 2.0 + epsilon, loss))
        log_gamma = log_gamma - 4 * _UNIT * (np.abs(log_gamma) + abs(math.log(q)))
        bound = q * remove(log_gamma) * (1.0 + _UNIT)
        trivial = -np.expm1(np.minimum(epsilon, 0.0)) * (1.0 + _UNIT)
        return np.where(positive, np.maximum(bound, trivial), trivial)

    def add_fn(epsilon: Array) -> Array:
        epsilon = np.asarray(epsilon, dtype=float)
        if q == 1.0:
            scale = np.ones_like(epsilon)
            size = np.zeros_like(epsilon)
        else:
            power = np.exp(np.minimum(epsilon, 40.0))
            # c = 1 − (1−q)e^ε, from the form that does not cancel; the bound increases in c.
            if q < 0.5:
                scale, size = q * power - np.expm1(np.minimum(epsilon, 40.0)), 1.0 + power
                size = np.abs(np.expm1(np.minimum(epsilon, 40.0))) + q * power
            else:
                scale, size = 1.0 - (1.0 - q) * power, 1.0 + (1.0 - q) * power
        scale = scale + 4 * _UNIT * size * (1.0 + np.abs(epsilon))
        positive = scale > 0.0
        safe = np.where(positive, scale, 1.0)
        log_gamma = epsilon + math.log(q) - np.log(safe)
        log_gamma = log_gamma - 4 * _UNIT * (
            np.abs(epsilon) + abs(math.log(q)) + np.abs(np.log(safe))
        )
        bound = safe * add(log_gamma) * (1.0 + _UNIT)
        return np.where(positive, bound, 0.0)

    return StepCurves(remove_fn, add_fn)


def shared_curve(sigma: float, nodes: RatioNodes, *, convex_order: bool) -> CurveFn:
    """E over S of the Gaussian hockey-stick divergence at sensitivity S/σ, bounded.

    Args:
        sigma: Noise multiplier.
        nodes: Where R = S⁻² is, and with what mass.
        convex_order: Whether the true R is only known to be below the nodes' law in convex order.
            The divergence then is replaced by its convex majorant; otherwise it is used as it is.

    Returns:
        log γ -> bound, at most 1; the same in both directions.
    """
    mu = 1.0 / (sigma * np.sqrt(nodes.ratios))

    def curve(log_gamma: Array) -> Array:
        log_gamma = np.atleast_1d(np.asarray(log_gamma, dtype=float))
        total = np.empty_like(log_gamma)
        for part in _blocks(log_gamma.size, mu.size):
            value = _majorant(log_gamma[part, None], mu, convex_order=convex_order)
            total[part] = value @ nodes.masses
        # Towards R = 0 the tangent rises above 1, to its value there (Lemma 7).
        at_zero = nodes.mass_at_zero * (1.0 + _TANGENT_RISE * _inflection(log_gamma))
        total = (total + at_zero) * (1.0 + mu.size * _UNIT) + _TINY
        return np.minimum(total, 1.0)

    return curve


def _majorant(log_gamma: Array, mu: Array, *, convex_order: bool) -> Array:
    """The hockey-stick divergence of N(μ,1) and N(0,1), made convex in R ∝ μ⁻²."""
    value, error = gaussian_hockey_stick(log_gamma, mu)
    value = value + error
    if not convex_order:
        return value
    # Convex in R exactly below this μ (Lemma 2); beyond, the tangent there (Lemma 3).
    star = _inflection(log_gamma)
    beyond = mu > star
    if not beyond.any():
        return value
    at_star, error_star = gaussian_hockey_stick(log_gamma, star)
    slope = density(star / 2 - log_gamma / star) * star / 2
    rise = slope * (1.0 - (star / np.maximum(mu, star)) ** 2)
    tangent = at_star + error_star + rise * (1.0 + _TAIL_ERROR)
    return np.where(beyond, tangent, value)


def _inflection(log_gamma: Array) -> Array:
    """The μ up to which the hockey-stick divergence is convex in R: μ² = 6 + 2√(9+ε²)."""
    star: Array = np.sqrt(6.0 + 2.0 * np.hypot(3.0, log_gamma))
    return star


def envelope_curve(sigma: float, law: ScaleLaw) -> CurveFn:
    """The paper's analysis: S dominated by the law with the pointwise largest CDF of R.

    Source:
        The randomized clipping paper's envelope at unlimited rank; shared sketches only.
    """
    bins = envelope_bins(law)
    mu = 1.0 / (sigma * np.sqrt(bins.edges))

    def curve(log_gamma: Array) -> Array:
        log_gamma = np.atleast_1d(np.asarray(log_gamma, dtype=float))
        total = np.empty_like(log_gamma)
        for part in _blocks(log_gamma.size, mu.size):
            column = log_gamma[part, None]
            value, error = gaussian_hockey_stick(column, mu)
            value = value + error
            star = _inflection(column)
            # Where the integrand is convex its chord bounds it; elsewhere its largest value does.
            chord = bins.low * value[:, :-1] + bins.high * value[:, 1:]
            flat = (bins.low + bins.high) * value[:, :-1]
            convex = mu[:-1] < star
            total[part] = np.where(convex, chord, flat).sum(axis=1) + bins.at_one * value[:, -1]
        total = (total + bins.mass_at_zero) * (1.0 + mu.size * _UNIT) + _TINY
        return np.minimum(total, 1.0)

    return curve


def per_sample_curves(
    sigma: float, law: ScaleLaw, coarseness: float = 1.0
) -> tuple[CurveFn, CurveFn]:
    """The step with the sample, its sketch hidden: the mixture E_S N(S/σ, 1) against N(0, 1).

    Returns:
        The two functions of log γ that ``subsampled`` takes.

    Source:
        docs/theory.md, Theorem 4: tests are thresholds t, since the likelihood ratio increases; the
        true-positive rate at each is bounded by convex order, and between the thresholds of a grid
        by the smoothness of the true curve (Lemma 5), which is closer than the staircase.
    """
    nodes = ratio_nodes(law)
    mu = 1.0 / (sigma * np.sqrt(nodes.ratios))
    mean_mu = _mean_inverse_root(law) / sigma
    step = coarseness * min(2e-3, max(1e-3, 5e-3 / math.sqrt(sigma)))
    below = np.arange(-round(13.0 / step), 0) * step
    # 37: the last threshold that N(0,1) exceeds with a probability that a float can hold.
    above = np.arange(0, math.ceil(min(37.0, 13.0 + 1.0 / sigma) / step) + 1) * step
    thresholds = np.concatenate([below, above])
    power, miss = _threshold_bounds(thresholds, mu, nodes)

    at = np.abs(thresholds)
    # sup of |t|φ(t) within one step of each threshold
    curvature = np.minimum(
        _MAX_CURVATURE, (at + step) * density(np.maximum(at - step, 0.0)) * (1.0 + _TAIL_ERROR)
    )
    eighth = step * step / 8.0

    # Between thresholds the true f rises above both by at most step²/8 of E[μ φ(μ−t)] ≤ φ(0) E μ
    # (Lemma 5, bound a), or of its second derivative (bound b).
    drift = density(np.zeros(1)) * mean_mu * np.exp(step * (at + step)) * (1.0 + _TAIL_ERROR)
    # remove, b: |T''| ≤ (1+t²₊)T, and γ'Φ(−t) has second derivative γ'|t|φ(t).
    before = np.concatenate([[1.0], power[:-1]])
    bend = (1.0 + (np.maximum(thresholds, 0.0) + step) ** 2) * before
    lift = eighth * np.minimum(drift, bend)
    power_up = np.minimum(power * (1.0 + _TAIL_ERROR) + lift, 1.0)
    false_positive = lower_tail(-thresholds) * (1.0 - _TAIL_ERROR)
    cut = np.where(drift < bend, 0.0, eighth * curvature)
    false_positive = np.maximum(false_positive - cut, 0.0)
    # Thresholds beyond the grid: no better than all of the bound at either end.
    remove = concave_majorant(
        np.concatenate([false_positive, [false_positive[0], 0.0]]),
        np.concatenate([power_up, [1.0, power[-1] * (1.0 + _TAIL_ERROR)]]),
    )

    # add, t ≤ 0: f(t°) − f(t) ≤ φ · E[S/σ] · step²/2 from the threshold to the left of t°.
    left = below.size
    reach = density(np.minimum(thresholds[1 : left + 1], 0.0)) * (1.0 + _TAIL_ERROR)
    specificity = lower_tail(thresholds) * (1.0 + _TAIL_ERROR)
    low_part = specificity[:left] + reach * min(step, mean_mu * step * step / 2.0)
    # add, t ≥ 0: a or b again, or the staircase where the miss rate is too small for them.
    steady = drift[left:] < _MAX_CURVATURE
    miss_part = miss[left:] - eighth * np.where(steady, drift[left:], _MAX_CURVATURE)
    # Once past the staircase, never back: each interval is covered by one or the other.
    coarse = np.logical_or.accumulate((miss_part < 0.99 * miss[left:])[::-1])[::-1]
    stairs = np.concatenate([specificity[left + 1 :], [1.0]])
    bent = specificity[left:] + np.where(steady, 0.0, eighth * curvature[left:])
    high_part = np.where(coarse, stairs, bent)
    high_miss = np.where(coarse, miss[left:], np.maximum(miss_part, 0.0))
    add = concave_majorant(
        np.concatenate([miss[:left], high_miss, [0.0, miss[-1]]]),
        np.concatenate([low_part, high_part, [specificity[0], 1.0]]),
    )
    return remove, add


def _threshold_bounds(t: Array, mu: Array, nodes: RatioNodes) -> tuple[Array, Array]:
    """Bounds on T(t) = E Φ(μ−t) from above and on 1−T(t) from below, both monotone in t."""
    power = np.empty_like(t)
    miss = np.empty_like(t)
    for part in _blocks(t.size, mu.size):
        column = t[part, None]
        hit = lower_tail(mu - column)
        complement = lower_tail(column - mu)
        # Convex in R exactly where μ(μ−t) < 3 (Lemma 2); beyond, the tangent there (Lemma 3).
        root = np.sqrt(column * column + 12.0)
        star = np.where(column >= 0, (column + root) / 2, 6.0 / (root - column))
        beyond = mu > star
        if beyond.any():
            slope = density(star - column) * star / 2
            rise = slope * (1.0 - (star / np.maximum(mu, star)) ** 2)
            hit = np.where(beyond, lower_tail(star - column) + rise, hit)
            fall = lower_tail(column - star) * (1.0 - _TAIL_ERROR) - rise * (1.0 + _TAIL_ERROR)
            complement = np.where(beyond, fall, complement)
        # Towards R = 0 the tangents end above 1, and below 0 (Lemma 7).
        rise_at_zero = nodes.mass_at_zero * _TANGENT_RISE * star[:, 0]
        power[part] = hit @ nodes.masses + nodes.mass_at_zero + rise_at_zero
        # A negative term is weighted up, a positive one down.
        miss[part] = (
            np.maximum(complement, 0.0) @ nodes.masses_low
            + np.minimum(complement, 0.0) @ nodes.masses
            - rise_at_zero
        )
    # The true T is a probability and never rises: neither need its bound.
    power = np.minimum.accumulate(np.minimum(power * (1.0 + 2 * _TAIL_ERROR), 1.0))
    miss = np.maximum.accumulate(np.maximum(miss * (1.0 - 2 * _TAIL_ERROR), 0.0))
    return power, miss


def _mean_inverse_root(law: ScaleLaw) -> float:
    """E R^(−1/2) of χ²_k/k, an upper bound for every gradient by convexity; a head never hurts."""
    if law.num_probes is None:
        return 1.0
    k = law.num_probes
    logarithm = 0.5 * math.log(k / 2) + math.lgamma((k - 1) / 2) - math.lgamma(k / 2)
    return math.exp(logarithm) * (1.0 + 1e-9)


def _blocks(rows: int, columns: int) -> list[slice]:
    """Slices of the rows that keep a block's working set inside the cache."""
    size = max(1, 65_536 // columns)
    return [slice(start, start + size) for start in range(0, rows, size)]
