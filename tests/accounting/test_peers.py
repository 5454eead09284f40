"""dp_accounting computes the same epsilon where it can."""

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

from dprc import accounting
from dprc.accounting.compose import Composition, Part
from dprc.accounting.nodes import RatioNodes, ratio_nodes
from dprc.accounting.scale import ScaleLaw
from dprc.accounting.step import per_sample_curves, subsampled

GRID = 1e-4


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"),
    [(5.9, 0.05, 500, 1e-5), (0.96, 0.01, 1000, 1e-5), (1.5, 1.0, 1, 1e-6), (30.0, 1.0, 100, 1e-6)],
)
def test_exact_clipping_is_the_subsampled_gaussian(sigma, rate, steps, delta):
    pld = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=GRID
    ).self_compose(steps)
    ours = accounting.epsilon(
        noise_multiplier=sigma, delta=delta, sample_rate=rate, steps=steps, estimator="exact"
    )
    assert ours == pytest.approx(pld.get_epsilon_for_delta(delta), abs=1e-3)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps"),
    [(6.0, 0.05, 100), pytest.param(2.5, 0.2, 10, marks=pytest.mark.slow)],
)
def test_hidden_sketches_are_a_mixture_of_gaussians(monkeypatch, sigma, rate, steps):
    """On equal nodes, few enough for the other library."""
    full = ratio_nodes(ScaleLaw.chi2(32))
    groups = np.array_split(np.flatnonzero(full.masses > 1e-9), 24)
    masses = np.array([full.masses[g].sum() for g in groups])
    ratios = np.array([full.masses[g] @ full.ratios[g] for g in groups]) / masses
    masses /= masses.sum()
    nodes = RatioNodes(ratios, masses, masses, 0.0)
    monkeypatch.setattr("dprc.accounting.step.ratio_nodes", lambda law: nodes)
    curves = subsampled(*per_sample_curves(sigma, ScaleLaw.chi2(32)), rate)
    ours = max(
        Composition([Part(curves.remove, curves.add, steps)]).epsilon(1e-5),
        Composition([Part(curves.add, curves.remove, steps)]).epsilon(1e-5),
    )
    pld = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        standard_deviation=sigma,
        sensitivities=[0.0, *(1 / np.sqrt(ratios))],
        sampling_probs=[1 - rate, *(rate * masses)],
        value_discretization_interval=GRID,
    ).self_compose(steps)
    assert ours == pytest.approx(pld.get_epsilon_for_delta(1e-5), abs=1e-3)
