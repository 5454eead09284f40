"""The curve of one step is never below that of any spectrum, and rank one attains it."""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dprc.accounting import step
from dprc.accounting.events import StepEvent
from dprc.accounting.nodes import ratio_nodes
from dprc.accounting.normal import gaussian_hockey_stick
from dprc.accounting.scale import ScaleLaw
from tests.accounting import truth

# Error of the truth: quadrature and cancellation in its closed form.
RELATIVE, ABSOLUTE = 1e-5, 1e-10


def curves_of(sigma, rate, num_probes, sketch):
    return step.step_curves(StepEvent(sigma, rate, ScaleLaw.chi2(num_probes), sketch, "tight"))


def violation(curves, sketch, epsilon, sigma, rate, ratios, masses):
    """By how much the truth exceeds the bound; 0 if it does not."""
    curve = truth.shared_curve if sketch == "shared" else truth.per_sample_curve
    remove, add = curve(epsilon, sigma, rate, ratios, masses)
    bounds = curves.remove(np.array([epsilon]))[0], curves.add(np.array([epsilon]))[0]
    return max(
        exact * (1 - RELATIVE) - ABSOLUTE - bound
        for exact, bound in zip((remove, add), bounds, strict=True)
    )


spectra = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=4).filter(lambda w: sum(w) > 0.01)


@pytest.mark.parametrize("sketch", ["shared", "per_sample"])
@settings(derandomize=True, max_examples=40, deadline=None, database=None)
@given(
    weights=spectra,
    num_probes=st.sampled_from([4, 8, 16, 32, 64]),
    sigma=st.sampled_from([0.1, 0.3, 0.5, 0.8, 1.0, 2.0, 6.0, 40.0]),
    rate=st.sampled_from([1e-3, 0.05, 0.5, 1.0]),
    epsilon=st.floats(-1.0, 8.0),
    dependence=st.sampled_from(["independent", "same"]),
)
def test_curve_dominates_every_spectrum(
    sketch, weights, num_probes, sigma, rate, epsilon, dependence
):
    share, *rest = np.array(weights) / sum(weights)
    ratios, masses = truth.spectrum_law(rest, share, num_probes, dependence=dependence)
    curves = curves_of(sigma, rate, num_probes, sketch)
    assert violation(curves, sketch, epsilon, sigma, rate, ratios, masses) <= 0


def worst_violation(make_curves, cases):
    return max(
        violation(
            make_curves(sigma, rate, k), sketch, epsilon, sigma, rate,
            *truth.spectrum_law(rest, share, k),
        )
        for sketch, sigma, rate, k, epsilon, share, rest in cases
    )  # fmt: skip


RANK_ONE = (0.0, [1.0])
ORDINARY = [
    (sketch, sigma, rate, k, epsilon, *RANK_ONE)
    for sketch in ("shared",)
    for sigma, rate, k in [(1.0, 0.05, 16), (2.0, 1.0, 16), (0.8, 0.5, 32)]
    for epsilon in (0.0, 0.3, 1.0, 2.0)
]


def test_hiding_a_shared_sketch_is_caught():
    @cache
    def hidden(sigma, rate, k):
        return step.subsampled(*step.per_sample_curves(sigma, ScaleLaw.chi2(k)), rate)

    assert worst_violation(hidden, ORDINARY) > 0


@pytest.mark.parametrize("sketch", ["shared", "per_sample"])
def test_two_probes_too_many_are_caught(sketch):
    cases = [(sketch, *case[1:]) for case in ORDINARY]
    assert worst_violation(lambda s, q, k: curves_of(s, q, k, sketch), cases) <= 0
    assert worst_violation(lambda s, q, k: curves_of(s, q, k + 2, sketch), cases) > 0


def test_leaving_out_the_tangent_is_caught():
    """At small noise the divergence is concave in R: rank one is not the worst spectrum."""
    cases = [
        ("shared", 0.1, rate, 16, epsilon, share, rest)
        for rate in (0.05, 1.0)
        for epsilon in (5.0, 20.0, 40.0, 60.0)
        for share, rest in [(0.0, [0.5, 0.5]), (0.5, [0.5]), (0.9, [0.1]), (0.0, [1.0])]
    ]

    def without_tangent(sigma, rate, k):
        curve = step.shared_curve(sigma, ratio_nodes(ScaleLaw.chi2(k)), convex_order=False)
        return step.subsampled(curve, curve, rate)

    assert worst_violation(lambda s, q, k: curves_of(s, q, k, "shared"), cases) <= 0
    assert worst_violation(without_tangent, cases) > 1e-3


@pytest.mark.parametrize("sketch", ["shared", "per_sample"])
@pytest.mark.parametrize(("sigma", "rate", "k"), [(1.0, 0.05, 32), (6.0, 0.05, 32), (2.0, 1.0, 64)])
def test_rank_one_attains_the_curve_where_no_tangent_acts(sketch, sigma, rate, k):
    """The excess is the width of the bins of R: variance h²/6 of a normal score step of 0.1."""
    curves = curves_of(sigma, rate, k, sketch)
    curve = truth.shared_curve if sketch == "shared" else truth.per_sample_curve
    for epsilon in (-0.02, 0.0, 0.02, 0.2):
        exact = curve(epsilon, sigma, rate, *truth.chi2_rule(k))
        bounds = curves.remove(np.array([epsilon]))[0], curves.add(np.array([epsilon]))[0]
        for value, bound in zip(exact, bounds, strict=True):
            if value > 1e-6:
                assert value <= bound * (1 + 1e-9)
                assert bound <= value * 1.002


@pytest.mark.parametrize("rate", [1e-6, 0.01, 1.0])
@pytest.mark.parametrize("sketch", ["shared", "per_sample"])
def test_curves_are_probabilities_that_fall(rate, sketch):
    epsilon = np.linspace(-5, 30, 701)
    curves = curves_of(0.7, rate, 32, sketch)
    for curve in (curves.remove, curves.add):
        delta = curve(epsilon)
        assert np.all((delta >= 0) & (delta <= 1))
        # Running minimum and hull are taken later; here only bounded rounding may rise.
        assert np.all(np.diff(delta) <= 1e-6 * delta[:-1] + 1e-15)


def test_hidden_sketch_is_never_worse_than_a_shared_one():
    epsilon = np.linspace(-2, 10, 200)
    for sigma in (0.2, 1.0, 5.0):
        shared, hidden = (curves_of(sigma, 0.1, 16, s) for s in ("shared", "per_sample"))
        assert np.all(hidden.remove(epsilon) <= shared.remove(epsilon))
        assert np.all(hidden.add(epsilon) <= shared.add(epsilon))


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 5.0, 100.0])
def test_gaussian_divergence_error_bound_holds(mu):
    """Against arithmetic of 60 digits."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        for score in (-6.0, -1.0, -0.1, 0.0, 0.1, 1.0, 4.0, 9.0):
            log_gamma = mu * mu / 2 + score * mu
            value, error = gaussian_hockey_stick(np.array([log_gamma]), np.array([mu]))
            m, level = mpmath.mpf(mu), mpmath.mpf(log_gamma)
            exact = mpmath.ncdf(m / 2 - level / m) - mpmath.exp(level) * mpmath.ncdf(
                -m / 2 - level / m
            )
            assert abs(mpmath.mpf(value[0]) - exact) <= mpmath.mpf(error[0]) + mpmath.mpf(1e-300)


@pytest.mark.parametrize("k", [1, 4, 16, 33, 64, 1000, 10**6])
def test_nodes_keep_mass_and_mean(k):
    nodes = ratio_nodes(ScaleLaw.chi2(k))
    slack = 1e-9
    assert 1 <= nodes.masses.sum() + nodes.mass_at_zero <= 1 + slack
    assert nodes.masses_low.sum() <= 1
    assert math.isclose(nodes.masses @ nodes.ratios, 1.0, abs_tol=slack + 1e-12)


@pytest.mark.parametrize("k", [4, 16, 64, 4096])
def test_node_masses_bound_those_of_exact_arithmetic(k):
    mpmath = pytest.importorskip("mpmath")
    nodes = ratio_nodes(ScaleLaw.chi2(k))
    with mpmath.workdps(50):

        def cdf(degrees, ratio):
            return mpmath.gammainc(mpmath.mpf(degrees) / 2, 0, ratio * k / 2, regularized=True)

        ratios = [mpmath.mpf(float(r)) for r in nodes.ratios]
        mass = [cdf(k, r) for r in ratios]
        moment = [cdf(k + 2, r) for r in ratios]
        for i in range(1, len(ratios) - 1, 7):
            below = (moment[i] - moment[i - 1]) - ratios[i - 1] * (mass[i] - mass[i - 1])
            above = ratios[i + 1] * (mass[i + 1] - mass[i]) - (moment[i + 1] - moment[i])
            exact = below / (ratios[i] - ratios[i - 1]) + above / (ratios[i + 1] - ratios[i])
            assert nodes.masses_low[i] <= exact <= nodes.masses[i]
