"""What the accountant promises, for every kind of step."""

import json
import math
import warnings

import numpy as np
import pytest

from dprc import accounting
from dprc.accounting import Accountant, ScaleLaw, prv
from dprc.accounting.events import StepEvent
from dprc.accounting.step import step_curves
from dprc.errors import PrivacyError

DELTA = 1e-5
KINDS = {
    "exact": {"law": ScaleLaw.exact(), "sketch": "per_sample", "analysis": "tight"},
    "envelope": {"law": ScaleLaw.chi2(32), "sketch": "shared", "analysis": "envelope"},
    "shared": {"law": ScaleLaw.chi2(32), "sketch": "shared", "analysis": "tight"},
    "per_sample": {"law": ScaleLaw.chi2(32), "sketch": "per_sample", "analysis": "tight"},
}
STEP = {"noise_multiplier": 1.0, "sample_rate": 0.02}


def accountant(kind, count=100, **changes):
    result = Accountant()
    result.step(**{**STEP, **KINDS[kind], **changes}, count=count)
    return result


@pytest.mark.parametrize("kind", KINDS)
class TestContract:
    def test_nothing_recorded_costs_nothing(self, kind):
        assert Accountant().epsilon(DELTA) == 0.0
        assert Accountant().delta(1.0) == 0.0
        assert Accountant().epsilon_bounds(DELTA) == (0.0, 0.0)

    def test_counting_one_by_one_equals_counting_at_once(self, kind):
        single = Accountant()
        for _ in range(20):
            single.step(**STEP, **KINDS[kind])
        assert single.steps == 20
        assert single.epsilon(DELTA) == accountant(kind, 20).epsilon(DELTA)

    def test_epsilon_and_delta_are_inverse(self, kind):
        recorded = accountant(kind)
        epsilon = recorded.epsilon(DELTA)
        assert recorded.delta(epsilon) == pytest.approx(DELTA, rel=0.02)

    def test_lower_bound_is_below_upper_bound(self, kind):
        if kind == "envelope":
            pytest.skip("the envelope is not attained by a gradient")
        lower, upper = accountant(kind).epsilon_bounds(DELTA)
        assert 0.95 * upper <= lower <= upper

    def test_more_steps_more_data_less_noise_cost_more(self, kind):
        recorded = accountant(kind)
        base = recorded.epsilon(DELTA)
        assert accountant(kind, 110).epsilon(DELTA) > base
        assert accountant(kind, sample_rate=0.022).epsilon(DELTA) > base
        assert accountant(kind, noise_multiplier=0.95).epsilon(DELTA) > base
        assert recorded.epsilon(DELTA / 10) > base

    def test_state_survives_json(self, kind):
        recorded = accountant(kind)
        restored = Accountant()
        restored.load_state_dict(json.loads(json.dumps(recorded.state_dict())))
        assert restored.steps == recorded.steps
        assert restored.epsilon(DELTA) == recorded.epsilon(DELTA)
        restored.step(**STEP, **KINDS[kind])
        assert restored.epsilon(DELTA) > recorded.epsilon(DELTA)

    def test_a_step_without_noise_is_recorded_and_costs_everything(self, kind):
        recorded = accountant(kind)
        recorded.step(**{**STEP, "noise_multiplier": 0}, **KINDS[kind])
        assert recorded.epsilon(DELTA) == math.inf
        assert recorded.delta(3.0) == 1.0
        with pytest.raises(PrivacyError, match="noise_multiplier"):
            recorded.privacy_loss_distribution()

    def test_exported_distribution_agrees(self, kind):
        if kind == "envelope":
            pytest.skip("its curve is exported like that of any shared sketch")
        recorded = accountant(kind)
        pld = recorded.privacy_loss_distribution()
        assert pld.get_epsilon_for_delta(DELTA) == pytest.approx(recorded.epsilon(DELTA), rel=5e-3)
        # The lattices differ, each with an excess of at most 1e-4.
        assert pld.get_epsilon_for_delta(DELTA) >= recorded.epsilon(DELTA) * (1 - 5e-4)
        for pmf in (pld._pmf_remove, pld._pmf_add):
            assert 1.0 <= pmf._probs.sum() + pmf._infinity_mass <= 1.0 + 1e-3


def test_exported_distribution_of_a_heavy_tail_has_a_bounded_length(monkeypatch):
    """Removing a sample has a long tail, adding one a fine lattice: both at once would explode."""
    monkeypatch.setattr("dprc.accounting.compose._MAX_CELLS", 2**15)
    recorded = accountant("shared", law=ScaleLaw.chi2(16), noise_multiplier=0.7, count=20)
    pld = recorded.privacy_loss_distribution()
    assert pld._pmf_remove._probs.size + pld._pmf_add._probs.size <= 2**16
    assert pld.get_epsilon_for_delta(DELTA) >= recorded.epsilon(DELTA) * (1 - 1e-3)


def test_different_steps_compose_between_their_pure_runs():
    mixed = Accountant()
    mixed.step(**STEP, **KINDS["exact"], count=50)
    mixed.step(**STEP, **KINDS["shared"], count=50)
    low, high = accountant("exact").epsilon(DELTA), accountant("shared").epsilon(DELTA)
    assert low < mixed.epsilon(DELTA) < high


def test_noise_may_change_between_steps_and_gaussians_add_up():
    """Without sampling, all steps are one Gaussian: squared sensitivities add up."""
    from tests.accounting import truth

    mixed = Accountant()
    mixed.step(noise_multiplier=20.0, sample_rate=1.0, **KINDS["exact"], count=100)
    mixed.step(noise_multiplier=30.0, sample_rate=1.0, **KINDS["exact"], count=300)
    exact = truth.gaussian_epsilon(math.sqrt(100 / 400 + 300 / 900), DELTA)
    assert exact <= mixed.epsilon(DELTA) <= exact * 1.001


def test_sketch_of_an_exact_law_does_not_matter():
    shared = accountant("exact", sketch="shared")
    assert shared.epsilon(DELTA) == accountant("exact").epsilon(DELTA)


def test_order_of_guarantees():
    values = [accountant(kind).epsilon(DELTA) for kind in ("exact", "per_sample", "shared")]
    values.append(accountant("envelope").epsilon(DELTA))
    assert values == sorted(values)
    assert len(set(values)) == 4


def test_bounds_that_contradict_each_other_are_reported(monkeypatch):
    recorded = accountant("exact")
    wrong = prv.EpsilonInterval(9.0, 9.0, 9.0)
    monkeypatch.setattr(prv, "epsilon_interval", lambda counts, delta: wrong)
    with pytest.raises(RuntimeError, match=r"lower bound 9.0 .* a defect"):
        recorded.epsilon_bounds(DELTA)


@pytest.mark.slow
def test_lower_end_of_many_noisy_steps_is_near_the_upper():
    lower, upper = accounting.epsilon_bounds(
        noise_multiplier=2.194, sample_rate=0.0514, steps=10_000, num_probes=64, delta=1.4e-8
    )
    assert 0.99 * upper <= lower <= upper


def test_more_probes_cost_less():
    epsilons = [
        accountant("per_sample", law=ScaleLaw.chi2(k)).epsilon(DELTA) for k in (16, 32, 64, 1024)
    ]
    assert epsilons == sorted(epsilons, reverse=True)
    assert epsilons[-1] >= accountant("exact").epsilon(DELTA)


def test_few_probes_are_refused_or_warned_about():
    with pytest.raises(PrivacyError, match=r"num_probes=3.*k/\(k-2\)"):
        accountant("shared", law=ScaleLaw.chi2(3))
    with pytest.warns(UserWarning, match="num_probes=15"):
        accountant("shared", law=ScaleLaw.chi2(15))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accountant("shared", law=ScaleLaw.chi2(16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier must be at least 0, got -1.0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be finite, got nan"),
        ({"noise_multiplier": True}, "noise_multiplier must be a number, got True"),
        ({"sample_rate": 0.0}, "sample_rate must be in .0, 1., got 0.0"),
        ({"sample_rate": 1.5}, "sample_rate must be in .0, 1., got 1.5"),
        ({"sketch": "mine"}, "sketch must be one of shared, per_sample, got 'mine'"),
        ({"analysis": "loose"}, "analysis must be one of tight, envelope, got 'loose'"),
        ({"analysis": "envelope"}, "needs sketch='shared'"),
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"count": 2.0}, "count must be an int, got 2.0"),
        ({"count": True}, "count must be an int, got True"),
    ],
)
def test_bad_settings_are_named(changes, message):
    recorded = Accountant()
    with pytest.raises(ValueError, match=message):
        recorded.step(**{**STEP, **KINDS["per_sample"], **changes})
    assert recorded.steps == 0


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan, "1e-5"])
def test_delta_outside_its_range_is_refused(delta):
    with pytest.raises(ValueError, match="delta must be"):
        accountant("exact").epsilon(delta)


@pytest.mark.parametrize(
    "state", [{}, {"version": 2, "steps": []}, {"version": 1}, {"version": 1, "steps": [{"a": 1}]}]
)
def test_a_foreign_state_is_refused(state):
    with pytest.raises(ValueError, match="state"):
        Accountant().load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"sketch": "Shared"}, ValueError),
        ({"sketch": None}, ValueError),
        ({"analysis": "loose"}, ValueError),
        ({"analysis": "envelope"}, ValueError),
        ({"law": {"kind": "chi2", "num_probes": 2}}, PrivacyError),
        ({"law": {"kind": "chi2"}}, ValueError),
        ({"law": {"kind": "chi2", "num_probes": 32, "more": 1}}, ValueError),
        ({"law": "exact"}, ValueError),
        ({"noise_multiplier": -1.0}, ValueError),
        ({"sample_rate": 2.0}, ValueError),
        ({"count": 0}, ValueError),
    ],
)
def test_a_state_that_could_not_be_recorded_is_refused(changes, error):
    """Settings that mean nothing must not be accounted as something cheap."""
    recorded = accountant("per_sample")
    state = recorded.state_dict()
    state["steps"][0].update(changes)
    with pytest.raises(error):
        recorded.load_state_dict(state)
    assert recorded.steps == 100


@pytest.mark.parametrize(
    ("sketch", "analysis"), [("Shared", "tight"), ("none", "tight"), ("per_sample", "envelope")]
)
def test_a_step_without_an_analysis_has_no_curve(sketch, analysis):
    with pytest.raises(ValueError, match="no analysis"):
        step_curves(StepEvent(1.0, 0.1, ScaleLaw.chi2(32), sketch, analysis))


def test_recording_only_counts(monkeypatch):
    """Nothing is computed before it is asked for: a state of ten thousand steps is one line."""
    monkeypatch.setattr("dprc.accounting.accountant.step_curves", None)
    recorded = Accountant()
    for _ in range(10_000):
        recorded.step(**STEP, **KINDS["per_sample"])
    assert len(recorded.state_dict()["steps"]) == 1


def test_numpy_numbers_are_accepted():
    recorded = Accountant()
    recorded.step(
        noise_multiplier=np.float64(1.0),
        sample_rate=np.float64(0.1),
        law=ScaleLaw.chi2(np.int64(32)),
        sketch="shared",
        analysis="tight",
        count=np.int64(3),
    )
    assert recorded.steps == 3
    assert json.dumps(recorded.state_dict())
    assert ScaleLaw.chi2(np.int64(32)) == ScaleLaw.chi2(32)


@pytest.mark.parametrize("tolerance", [0.0, -1.0, 1.0, math.nan, True, "1e-4"])
def test_tolerance_outside_its_range_is_refused(tolerance):
    with pytest.raises(ValueError, match="tolerance must be"):
        accountant("exact").epsilon(DELTA, tolerance=tolerance)


def test_public_functions_agree_with_the_accountant():
    settings = {"delta": DELTA, "sample_rate": 0.02, "steps": 100}
    assert accounting.epsilon(noise_multiplier=1.0, **settings) == accountant("per_sample").epsilon(
        DELTA
    )
