"""The second route to epsilon encloses the first where both are exact."""

import math

import pytest

from dprc.accounting import prv
from dprc.accounting.accountant import Accountant
from dprc.accounting.events import StepEvent
from dprc.accounting.scale import ScaleLaw
from tests.accounting import truth

CASES = {
    "exact": (StepEvent(0.92, 0.05, ScaleLaw.exact(), "none", "tight"), 500),
    "shared": (StepEvent(6.0, 0.05, ScaleLaw.chi2(32), "shared", "tight"), 500),
    "per_sample": (StepEvent(6.0, 0.05, ScaleLaw.chi2(32), "per_sample", "tight"), 500),
    "everyone": (StepEvent(5.0, 1.0, ScaleLaw.chi2(64), "per_sample", "tight"), 10),
}


@pytest.mark.parametrize(
    "case",
    [
        "exact",
        "everyone",
        pytest.param("shared", marks=pytest.mark.slow),
        pytest.param("per_sample", marks=pytest.mark.slow),
    ],
)
def test_interval_contains_the_other_route(case):
    event, steps = CASES[case]
    accountant = Accountant()
    accountant.load_state_dict(
        {
            "version": 1,
            "steps": [
                {
                    "noise_multiplier": event.noise_multiplier,
                    "sample_rate": event.sample_rate,
                    "law": {"kind": event.law.kind, "num_probes": event.law.num_probes},
                    "sketch": event.sketch,
                    "analysis": event.analysis,
                    "count": steps,
                }
            ],
        }
    )
    interval = prv.epsilon_interval({event: steps}, 1e-5)
    bound = accountant.epsilon(1e-5)
    assert interval.lower <= interval.estimate <= interval.upper
    assert interval.upper - interval.lower <= 0.01 * bound
    # 3e-4: excess of the other route's lattice and nodes.
    assert interval.lower <= bound <= interval.upper * (1 + 3e-4)


@pytest.mark.parametrize("steps", [1, 100, 10_000])
def test_interval_contains_the_gaussian_truth(steps):
    event = StepEvent(2.0 * math.sqrt(steps), 1.0, ScaleLaw.exact(), "none", "tight")
    exact = truth.gaussian_epsilon(0.5, 1e-6)
    interval = prv.epsilon_interval({event: steps}, 1e-6)
    assert interval.lower <= exact <= interval.upper
    assert interval.estimate == pytest.approx(exact, rel=2e-3)


@pytest.mark.slow
def test_too_many_probes_leave_the_interval():
    event, steps = CASES["per_sample"]
    wrong = StepEvent(6.0, 0.05, ScaleLaw.chi2(28), "per_sample", "tight")
    right = prv.epsilon_interval({event: steps}, 1e-5)
    assert prv.epsilon_interval({wrong: steps}, 1e-5).lower > right.estimate
