"""Bounds against closed forms and simulation, the one-run theorem, detectors, the command."""

import json
import math
import re
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

from dprc.audit import (
    AuditSettings,
    Event,
    best_lower_bound,
    choose_event,
    detectors,
    epsilon_lower_bound,
    gaussian_mu_lower_bound,
    guesses_p_value,
    one_run_epsilon,
    rig,
)
from dprc.audit.bounds import proportion_lower, proportion_upper
from dprc.audit.experiments import PairTrials, Record
from dprc.audit.one_run import count_right
from dprc.audit.report import membership_scores, simulated_scores
from dprc.cli import main
from tests import faults
from tests.truth import per_sample_gradients

pytestmark = pytest.mark.filterwarnings("ignore:num_probes")


def gaussian_pair(mu, trials, seed):
    """Outputs N(0,1) without and N(mu,1) with the sample, in worlds drawn by a fair coin."""
    rng = np.random.default_rng(seed)
    present = rng.random(trials) < 0.5
    return rng.standard_normal(trials) + mu * present, present


def gaussian_epsilon(mu, delta):
    """ε of that pair: Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ) = δ, by bisection."""
    low, high = 0.0, 60.0
    for _ in range(200):
        middle = (low + high) / 2
        value = stats.norm.cdf(mu / 2 - middle / mu)
        value -= math.exp(middle) * stats.norm.cdf(-mu / 2 - middle / mu)
        low, high = (middle, high) if value > delta else (low, middle)
    return low


class TestBounds:
    @pytest.mark.parametrize("successes", [0, 1, 37, 99, 100])
    def test_proportions_are_those_of_clopper_and_pearson(self, successes):
        expected = stats.binomtest(successes, 100).proportion_ci(0.9, method="exact")
        low, high = (bound(successes, 100, 0.05) for bound in (proportion_lower, proportion_upper))
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)

    @pytest.mark.parametrize(
        ("event", "right", "of_right", "wrong", "of_wrong"),
        [
            (Event("remove", -math.inf, 5.0), 60, 100, 10, 80),
            (Event("add", 1.0, math.inf), 50, 80, 7, 100),
            (Event("both", 1.0, 5.0), 110, 180, 17, 180),
        ],
    )
    def test_a_bound_from_counts_by_hand(self, event, right, of_right, wrong, of_wrong):
        with_sample = [9.0] * 60 + [3.0] * 33 + [0.0] * 7
        without = [9.0] * 10 + [3.0] * 20 + [0.0] * 50
        scores = np.array(with_sample + without)
        present = np.arange(180) < 100
        low = stats.binomtest(right, of_right).proportion_ci(0.95, method="exact").low
        high = stats.binomtest(wrong, of_wrong).proportion_ci(0.95, method="exact").high
        got = epsilon_lower_bound(scores, present, event, delta=0.01, confidence=0.95)
        assert got == pytest.approx(math.log((low - 0.01) / high), abs=1e-12)

    @pytest.mark.parametrize("kind", ["remove", "add", "both"])
    def test_the_truth_is_exceeded_as_rarely_as_promised(self, kind):
        truth = gaussian_epsilon(1.0, 0.01)
        # Where the likelihood ratio is e^±ε: the event that shows most.
        high = truth + 0.5
        low = -math.inf if kind == "remove" else 1.0 - high
        event = Event(kind, low, math.inf if kind == "add" else high)
        exceeded = naive = 0
        for seed in range(300):
            scores, present = gaussian_pair(1.0, 3000, seed)
            bound = epsilon_lower_bound(scores, present, event, delta=0.01, confidence=0.9)
            exceeded += bound > truth
            # Without bounds on the proportions the truth is exceeded often.
            right = ((scores >= event.high) & present) | ((scores <= event.low) & ~present)
            wrong = ((scores >= event.high) & ~present) | ((scores <= event.low) & present)
            sizes = {
                "remove": (present.mean(), 1 - present.mean()),
                "add": (1 - present.mean(), present.mean()),
                "both": (1, 1),
            }[kind]
            shown = (right.mean() / sizes[0] - 0.01) / max(wrong.mean() / sizes[1], 1e-9)
            naive += shown > math.exp(truth)
        assert exceeded <= stats.binom.ppf(0.999, 300, 0.1)
        assert naive > 60

    @pytest.mark.parametrize("mu", [0.6, 1.0, 1.5])
    def test_a_chosen_event_shows_most_of_the_truth(self, mu):
        chosen = choose_event(
            *gaussian_pair(mu, 200_000, 1), delta=0.01, confidence=0.95, trials=30_000
        )
        shown = [
            epsilon_lower_bound(
                *gaussian_pair(mu, 30_000, seed), chosen, delta=0.01, confidence=0.95
            )
            for seed in range(2, 12)
        ]
        assert 0.8 < np.mean(shown) / gaussian_epsilon(mu, 0.01) < 1

    def test_less_noise_than_planned_for_shows_more(self):
        """The planned event shows little: its tails are nearly empty."""
        planned = choose_event(
            *gaussian_pair(0.9, 200_000, 1), delta=0.01, confidence=0.95, trials=12_000
        )
        target = {"delta": 0.01, "confidence": 0.95}
        claimed = gaussian_epsilon(0.9, 0.01)
        for seed in range(2, 12):
            scores, present = gaussian_pair(0.9 / 0.7, 12_000, seed)
            found = best_lower_bound(0.7 * scores, present, planned, **target)
            assert found.epsilon > claimed
            of_claim = best_lower_bound(*gaussian_pair(0.9, 12_000, seed), planned, **target)
            assert 0.55 * claimed < of_claim.epsilon < claimed

    def test_the_better_of_two_events_is_as_seldom_wrong(self):
        truth, planned = gaussian_epsilon(1.0, 0.01), Event("both", -1.5, 2.5)
        bounds = [
            best_lower_bound(*gaussian_pair(1.0, 3000, seed), planned, delta=0.01, confidence=0.9)
            for seed in range(100)
        ]
        assert sum(b.epsilon > truth for b in bounds) <= stats.binom.ppf(0.999, 100, 0.1)

    def test_no_event_is_chosen_that_was_not_seen(self):
        scores, present = gaussian_pair(0.0, 400, 0)
        event = choose_event(scores, present, delta=0.0, confidence=0.95, trials=100_000)
        fresh = gaussian_pair(0.0, 100_000, 1)
        assert epsilon_lower_bound(*fresh, event, delta=0.0, confidence=0.95) < 0.1

    def test_mu_is_exceeded_as_rarely_as_promised_and_nearly_reached(self):
        bounds = [
            gaussian_mu_lower_bound(*gaussian_pair(1.0, 4000, seed), 0.5, confidence=0.9)
            for seed in range(300)
        ]
        assert (np.array(bounds) > 1.0).sum() <= stats.binom.ppf(0.999, 300, 0.1)
        assert np.mean(bounds) > 0.85

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"delta": 1.0}, "delta .* got 1.0"),
            ({"confidence": 1.0}, "confidence .* got 1.0"),
            ({"present": np.ones(4, bool)}, "4 are too few"),
            ({"present": np.ones(3, bool)}, "shapes"),
        ],
    )
    def test_bad_arguments_are_named(self, changes, message):
        arguments = {
            "scores": np.zeros(4),
            "present": np.array([True, False, True, False]),
            "event": Event("remove", -math.inf, 0.0),
            "delta": 0.01,
            "confidence": 0.95,
        }
        with pytest.raises(ValueError, match=message):
            epsilon_lower_bound(**arguments | changes)


class TestOneRun:
    @pytest.mark.parametrize(
        ("canaries", "guesses", "right", "delta", "published"),
        [
            # Appendix D of arXiv 2305.08846, and the run of its section 7 (truncated there).
            (100, 100, 75, 0.0, 0.702),
            (100, 100, 75, 1e-4, 0.699),
            (1000, 100, 75, 1e-4, 0.673),
            (100_000, 1510, 1439, 1e-5, 2.675),
        ],
    )
    def test_the_published_bounds(self, canaries, guesses, right, delta, published):
        bound = one_run_epsilon(
            canaries=canaries, guesses=guesses, right=right, delta=delta, confidence=0.95
        )
        assert bound == pytest.approx(published, abs=1e-3)

    def test_the_p_value_is_the_theorems_sum(self):
        canaries, guesses, right, epsilon, delta = 50, 12, 9, 0.7, 1e-3
        share = math.exp(epsilon) / (1 + math.exp(epsilon))

        def at_least(count):
            return sum(
                math.comb(guesses, j) * share**j * (1 - share) ** (guesses - j)
                for j in range(max(count, 0), guesses + 1)
            )

        excess = max((at_least(right - i) - at_least(right)) / i for i in range(1, canaries + 1))
        expected = at_least(right) + 2 * canaries * delta * excess
        got = guesses_p_value(
            canaries=canaries, guesses=guesses, right=right, epsilon=epsilon, delta=delta
        )
        assert got == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("delta", [0.0, 0.002])
    def test_the_truth_is_exceeded_as_rarely_as_promised(self, delta):
        """Randomized response that gives itself away with probability δ is (ε, δ)-private."""
        epsilon, canaries = 1.0, 200
        shown = []

        @cache
        def bound(right):
            return one_run_epsilon(
                canaries=canaries, guesses=canaries, right=right, delta=delta, confidence=0.9
            )

        for seed in range(200):
            rng = np.random.default_rng(seed)
            included = rng.random(canaries) < 0.5
            honest = rng.random(canaries) < 1 / (1 + math.exp(-epsilon))
            scores = np.where(included == honest, 1.0, -1.0)
            given_away = rng.random(canaries) < delta
            scores[given_away] = np.where(included[given_away], 2.0, -2.0)
            right = count_right(scores + 1e-6 * rng.random(canaries), included, canaries)
            shown.append(bound(right))
        assert (np.array(shown) > epsilon).sum() <= stats.binom.ppf(0.999, 200, 0.1)
        assert np.mean(shown) > (0.7 if delta == 0 else 0.4)

    def test_guesses_are_the_extremes(self):
        scores = np.array([5.0, -3.0, 0.1, 2.0, -1.0, 0.0])
        included = np.array([True, False, False, True, True, False])
        assert count_right(scores, included, 2) == 2
        assert count_right(scores, included, 4) == 3

    def test_nothing_is_shown_by_a_coin(self):
        options = {"canaries": 1000, "guesses": 100, "delta": 1e-5, "confidence": 0.95}
        assert one_run_epsilon(right=52, **options) == 0.0

    @pytest.mark.parametrize(("right", "guesses"), [(5, 4), (-1, 4), (3, 11)])
    def test_impossible_counts_are_refused(self, right, guesses):
        with pytest.raises(ValueError, match="0 <= right <= guesses <= canaries"):
            guesses_p_value(canaries=10, guesses=guesses, right=right, epsilon=1.0, delta=0.0)


def record(num_probes=32, sketch="per_sample", sample_rate=1.0):
    law = {"kind": "exact" if num_probes is None else "chi2", "num_probes": num_probes}
    event = {
        "noise_multiplier": 1.0,
        "sample_rate": sample_rate,
        "law": law,
        "sketch": sketch,
        "analysis": "tight",
    }
    return Record(1, 1, event)


class TestDetectors:
    @pytest.mark.parametrize(("degrees", "passes"), [(32, True), (30, False), (64, False)])
    def test_the_law_of_the_ratio(self, degrees, passes):
        ratios = np.random.default_rng(0).chisquare(degrees, 18_000) / degrees
        p = detectors.scale_law(ratios, record(32), rank=1).p_value
        assert p > 0.01 if passes else p < 1e-3

    def test_the_law_behind_a_head(self):
        ratios = (2 + np.random.default_rng(0).chisquare(26, 4000) / 26) / 3
        assert detectors.scale_law(ratios, record(26), rank=3).p_value > 0.01
        assert detectors.scale_law(ratios, record(26), rank=1).p_value < 1e-6

    def test_an_exact_norm_has_no_law(self):
        assert detectors.scale_law(np.full(9, 1 + 1e-6), record(None), rank=1).p_value == 1
        assert detectors.scale_law(np.full(9, 1.01), record(None), rank=1).p_value == 0

    @pytest.mark.parametrize("k", [4, 32])
    def test_the_mean_of_the_scale(self, k):
        x = np.random.default_rng(0).chisquare(k, 400_000) / k
        error = 5 * np.std(x**-0.5) / math.sqrt(len(x))
        assert detectors.mean_scale(record(k)) == pytest.approx(np.mean(x**-0.5), abs=error)
        assert detectors.mean_scale(record(None)) == 1

    def test_a_weak_excess_of_a_contribution(self):
        noise = np.random.default_rng(0).standard_normal(2000)
        assert detectors.sensitivity({"a": 1 + noise}, record(None)).p_value > 0.01
        assert detectors.sensitivity({"a": noise, "b": 1.2 + noise}, record(None)).p_value < 1e-3

    @pytest.mark.parametrize(("scale", "passes"), [(1.0, True), (1.1, True), (0.95, False)])
    def test_only_too_little_noise_is_a_fault(self, scale, passes):
        noise = {n: scale * np.random.default_rng(n).standard_normal((50, 100)) for n in (0, 1)}
        p = detectors.noise_scale(noise, {}, record(None)).p_value
        assert p > 0.01 if passes else p < 1e-3

    def test_batches_of_one_size_are_not_poisson(self):
        rng = np.random.default_rng(0)
        offered = np.full(2000, 40.0)

        def p(sizes):
            trials = PairTrials(offered > 0, offered, offered, sizes, offered,
                                record(None, sample_rate=0.25), 2000)  # fmt: skip
            return detectors.sampling(trials).p_value

        assert p(rng.binomial(40, 0.25, 2000).astype(float)) > 0.01
        assert p(np.full(2000, 10.0)) < 1e-6
        assert p(rng.binomial(40, 0.27, 2000).astype(float)) < 1e-6

    def test_independent_ratios_pass_and_repeated_ones_do_not(self):
        rng = np.random.default_rng(0)
        ratios = rng.chisquare(8, (90, 8)) / 8
        cuts = np.tile([1, 2, 4], 30)
        assert detectors.sketch_independence(ratios, cuts).p_value > 0.01
        assert detectors.sketch_freshness(ratios).p_value > 0.01
        halves = np.where((cuts == 2)[:, None], np.tile(ratios[:, :4], 2), ratios)
        assert detectors.sketch_independence(halves, cuts).p_value < 1e-3
        shifted = ratios.copy()
        shifted[1:, 1:] = ratios[:-1, :-1]  # a sample takes the sketch its neighbour had
        assert detectors.sketch_freshness(shifted).p_value < 1e-3
        assert detectors.sketch_sharing(ratios).p_value == 0
        assert detectors.sketch_sharing(ratios[:, :1].repeat(8, 1)).p_value == 1


class TestRig:
    def gradients(self, samples):
        model = rig.AuditedModel(12, head=True)
        gradients = per_sample_gradients(model, model(samples))
        return {name: grads[0] for name, grads in gradients.items()}

    @pytest.mark.parametrize("rank", [1, 3])
    def test_a_canary_in_the_matrix_has_its_norm_its_rank_and_equal_singular_values(self, rank):
        maker = rig.SampleMaker(12, rank)
        found = self.gradients(maker.in_matrix(100.0))
        values = torch.linalg.svdvals(found[rig.MATRIX])
        expected = torch.zeros(12, dtype=torch.float64)
        expected[:rank] = 100.0 / math.sqrt(rank)
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-5)
        assert maker.along(rig.MATRIX, found[rig.MATRIX]) == pytest.approx(100.0, rel=1e-6)
        assert found[rig.HEAD].abs().max() == found[rig.BIAS].abs().max() == 0
        assert found[rig.MATRIX][maker.untouched()].abs().max() == 0

    def test_a_canary_lies_in_one_parameter(self):
        maker = rig.SampleMaker(12, 1)
        for name, sample in ((rig.HEAD, maker.in_head(7.0)), (rig.BIAS, maker.in_bias(7.0))):
            norms = {n: float(g.norm()) for n, g in self.gradients(sample).items()}
            assert norms == pytest.approx({n: 7.0 * (n == name) for n in norms})
            assert maker.along(name, self.gradients(sample)[name]) == pytest.approx(7.0)

    def test_other_samples_are_orthogonal_to_the_canary(self):
        maker = rig.SampleMaker(12, 3)
        other = self.gradients(maker.at_entry(11, 11, 3.0))[rig.MATRIX]
        assert float(other.norm()) == pytest.approx(3.0)
        assert float((other * self.gradients(maker.in_matrix(1.0))[rig.MATRIX]).sum()) == 0
        assert not maker.untouched()[11, 11]

    def test_faults_are_planted_where_their_names_say(self):
        names = [name for name, _ in rig.AuditedModel(12, head=True).named_parameters()]
        places = (faults.MATRIX, faults.HEAD, faults.BIAS)
        assert [names[place] for place in places] == [rig.MATRIX, rig.HEAD, rig.BIAS]


class TestScores:
    def test_a_shared_sketch_is_used_and_a_hidden_one_is_not(self):
        outputs, ratios = np.array([1.0, 1.0, 1.0]), np.array([0.5, 2.0, math.nan])
        shared = membership_scores(outputs, ratios, record(sketch="shared"))
        mu = np.array([math.sqrt(2), math.sqrt(0.5), 1.0])
        expected = stats.norm.logpdf(1.0 - mu) - stats.norm.logpdf(1.0)
        np.testing.assert_allclose(shared, expected)
        hidden = membership_scores(outputs, ratios, record(sketch="per_sample"))
        np.testing.assert_array_equal(hidden, outputs)

    def test_the_simulated_claim_has_its_moments(self):
        scores, present = simulated_scores(record(8, sample_rate=0.5), 1, 0)
        error = 5 * scores[present].std() / math.sqrt(present.sum())
        mean = 0.5 * detectors.mean_scale(record(8))
        assert scores[present].mean() == pytest.approx(mean, abs=error)
        assert scores[~present].mean() == pytest.approx(0, abs=error)


class TestCommand:
    WORDS = ("audit", "--estimator=exact", "--trials=200", "--structure-steps=20",
             "--canaries=100", "--run-steps=2", "--seed=3")  # fmt: skip

    def test_json_and_result_file_hold_bound_and_claim(self, capsys, tmp_path):
        assert main([*self.WORDS, "--json", "--out", str(tmp_path / "audit.json")]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert 0 < printed["epsilon_lower_bound"] < printed["epsilon_claimed"] < 2.001
        assert printed["confidence"] == 0.95
        assert printed["tightness"] == printed["epsilon_lower_bound"] / printed["epsilon_claimed"]
        assert printed["gaussian_mu_lower_bound"] < 1 / printed["noise_multiplier"]
        assert printed["one_run"]["epsilon_lower_bound"] < printed["one_run"]["epsilon_claimed"]
        assert printed["refuted"] == []
        written = json.loads((tmp_path / "audit.json").read_text())
        assert written["metrics"] == printed
        assert written["valid"]

    def test_randomized_norms_are_reported_too(self, capsys):
        words = [*self.WORDS, "--estimator=hutchinson", "--sketch=shared", "--canaries=0"]
        assert main([*words, "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["gaussian_mu_lower_bound"] is None
        assert printed["one_run"] is None
        names = {finding["name"] for finding in printed["detectors"]}
        assert "sketch_sharing" in names
        assert "sketch_independence" not in names

    def test_a_refuted_claim_is_named_and_exits_with_1(self, capsys, monkeypatch):
        faults.less_noise(monkeypatch)
        assert main([*self.WORDS, "--canaries", "0"]) == 1
        out = capsys.readouterr().out
        assert "REFUTED by" in out
        assert "noise_scale" in out.splitlines()[-1]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--estimator", "hutch"], "estimator: must be one of .* got 'hutch'"),
            (["--trials", "10"], "trials: must be at least 200, got 10"),
            (["--canaries", "3"], "canaries: must be 0 or at least 16, got 3"),
            (["--confidence", "1"], r"confidence: must be in \[0.5, 1\), got 1.0"),
            (["--delta", "0"], r"delta: must be in \(0, 1\), got 0.0"),
            (["--seed", "-1"], "seed: must not be negative, got -1"),
            (["--head-rank", "2"], "head_rank=2 is only for hutchpp"),
        ],
    )
    def test_bad_input_is_one_line(self, words, message, capsys):
        assert main(["audit", *words]) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert re.search(message, error)


def test_the_settings_of_the_command_are_those_of_the_library():
    from dprc.cli import build_parser

    parsed = vars(build_parser().parse_args(["audit"]))
    defaults = AuditSettings()
    shared = [name for name in AuditSettings.__dataclass_fields__ if name in parsed]
    assert len(shared) > 12
    assert {name: parsed[name] for name in shared} == {n: getattr(defaults, n) for n in shared}
