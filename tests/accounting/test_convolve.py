"""Composition is never below the closed form of the Gaussian, and close to it."""

import math

import numpy as np
import pytest

from dprc import accounting
from dprc.accounting.convolve import convolve
from dprc.accounting.hull import concave_majorant, hockey_stick_hull
from dprc.accounting.lattice import LossPmf, dominating_pmf
from dprc.errors import PrivacyError
from tests.accounting import truth


@pytest.mark.parametrize("delta", [1e-5, 1e-8, 1e-12])
@pytest.mark.parametrize("steps", [1, 7, 1000, pytest.param(10**5, marks=pytest.mark.slow), 10**6])
@pytest.mark.parametrize("epsilon_scale", [0.1, 1.0, 4.0])
def test_composition_is_never_below_the_gaussian_truth(steps, delta, epsilon_scale):
    """N Gaussian steps are one Gaussian of √n times the sensitivity."""
    sigma = math.sqrt(steps) / epsilon_scale
    exact = truth.gaussian_epsilon(epsilon_scale, delta)
    bound = accounting.epsilon(
        noise_multiplier=sigma, delta=delta, sample_rate=1.0, steps=steps, estimator="exact"
    )
    # 1e-9: error of the truth, which has a relative error of its own.
    assert exact * (1 - 1e-9) <= bound <= exact * (1 + 5e-4)


def binomial_pmf():
    """Losses ±1 of randomized response with e¹: its composition is a binomial."""
    p = math.e / (1 + math.e)
    return LossPmf(np.array([-1.0, 1.0]), np.array([1 - p, p]), 0.0), p


@pytest.mark.parametrize("order", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("steps", [1, 10, 300])
def test_convolution_bounds_a_binomial_from_both_sides(steps, order):
    mpmath = pytest.importorskip("mpmath")
    pmf, _ = binomial_pmf()
    index = [np.array([-1, 1])]
    with mpmath.workdps(50):
        p = mpmath.e / (1 + mpmath.e)
        for epsilon in (0.5, math.sqrt(steps), 0.4 * steps):
            exact = sum(
                mpmath.binomial(steps, j) * p**j * (1 - p) ** (steps - j)
                * (1 - mpmath.exp(mpmath.mpf(epsilon) - (2 * j - steps)))
                for j in range(steps + 1)
                if 2 * j - steps > epsilon
            )  # fmt: skip
            upper, lower = (
                convolve([pmf], index, [steps], 1.0, order, pessimistic=side)
                for side in (True, False)
            )
            assert mpmath.mpf(lower.delta(epsilon)) <= exact <= mpmath.mpf(upper.delta(epsilon))
            if order == 0.0 and exact > 1e-6:
                assert upper.delta(epsilon) - lower.delta(epsilon) <= 1e-9


@pytest.mark.parametrize("delta", [1e-3, 1e-20])
def test_lower_end_is_found_where_the_tilt_is_accurate(delta):
    """Far below, rounding leaves nothing of a lower bound on δ: the search may not begin there."""
    pmf, _ = binomial_pmf()
    order = 0.06 if delta == 1e-3 else 0.2
    lower, upper = (
        convolve([pmf], [np.array([-1, 1])], [3000], 1.0, order, pessimistic=side)
        for side in (False, True)
    )
    assert 0.99 * upper.epsilon(delta) <= lower.epsilon(delta) <= upper.epsilon(delta)
    assert lower.delta(0.0) == 0.0
    assert lower.delta(lower.epsilon(delta)) > delta


def test_tilting_keeps_the_relative_accuracy_of_the_tail():
    """At δ = 3e-22 the untilted transform knows nothing, the tilted one all but a thousandth."""
    pmf, p = binomial_pmf()
    exact = p**300 * -math.expm1(-1.0)
    epsilon = 299.0
    untilted, tilted = (
        convolve([pmf], [np.array([-1, 1])], [300], 1.0, order) for order in (0.0, 4.0)
    )
    assert tilted.delta(epsilon) == pytest.approx(exact, rel=1e-3)
    assert untilted.delta(epsilon) > 1e3 * exact


def test_delta_below_the_floating_point_term_is_refused():
    with pytest.raises(PrivacyError, match=r"delta=1e-12 is too small"):
        accounting.epsilon(
            noise_multiplier=1.0, delta=1e-12, sample_rate=1e-6, steps=10**6, sketch="shared"
        )


def test_hull_is_below_all_points_and_convex():
    generator = np.random.default_rng(0)
    losses = np.sort(generator.uniform(-3, 8, 400))
    deltas = np.minimum.accumulate(
        np.exp(-np.maximum(losses, 0)) * 0.5 * (1 + 0.3 * generator.random(400))
    )
    kept = hockey_stick_hull(losses, deltas)
    hull = np.interp(np.exp(losses), np.exp(losses[kept]), deltas[kept])
    assert np.all(hull <= deltas * (1 + 1e-12))
    slopes = np.diff(deltas[kept]) / np.diff(np.exp(losses[kept]))
    assert np.all(np.diff(slopes) >= -1e-12 * np.abs(slopes[:-1]))


def test_hull_of_a_long_concave_stretch_is_found_quickly():
    """Removing one point per pass over all of them would take minutes."""
    losses = np.linspace(0.0, 5.0, 100_000)
    kept = hockey_stick_hull(losses, np.maximum(1.0 - 0.9 * np.exp(2 * (losses - 5.0)), 0.0))
    assert kept.size <= 2


def test_dominating_pmf_has_the_curve_of_the_points_it_connects():
    losses = np.array([-1.0, 0.0, 0.3, 1.0, 2.5])
    deltas = np.array([0.7, 0.2, 0.14, 0.05, 0.001])
    pmf = dominating_pmf(losses, deltas)
    for loss, delta in zip(losses, deltas, strict=True):
        curve = pmf.infinite_mass + pmf.masses @ np.maximum(-np.expm1(loss - pmf.losses), 0.0)
        assert delta <= curve * (1 + 1e-15) <= delta * (1 + 1e-12) + 1e-14
    assert 1.0 <= pmf.masses.sum() + pmf.infinite_mass <= 1.0 + 1e-14


def test_concave_majorant_is_the_maximum_over_all_lines():
    generator = np.random.default_rng(1)
    x, y = np.sort(generator.random(300)), np.sort(generator.random(300))
    log_gamma = np.linspace(-6, 6, 101)
    best = np.maximum((y - np.exp(log_gamma)[:, None] * x).max(axis=1), 0.0)
    got = concave_majorant(x, y)(log_gamma)
    assert np.all(got >= best)
    assert np.allclose(got, best, rtol=1e-11, atol=1e-12)
