"""Accounting for a small head: laws, how they combine, and what is charged."""

import json
import warnings

import numpy as np
import pytest

from dprc import accounting
from dprc.accounting import Accountant, ScaleLaw, combine_laws, matched_probes, prv, scale_law
from dprc.accounting.nodes import ratio_nodes
from dprc.accounting.puts import chi2_puts
from dprc.accounting.small_head import load_table
from dprc.cli import main
from dprc.errors import PrivacyError
from tests.accounting import truth

HEAD = {"estimator": "hutchpp", "num_probes": 26, "head_rank": 2}
# sigma by an independent search and implementation: exact, per_sample, shared, per_sample k = 42.
REFERENCE = {
    (0.05, 500, 1e-5, 0.7): (5.8956, 5.9282, 5.9404, 5.9159),
    (0.05, 500, 1e-5, 9.0): (0.9147, 0.9221, 0.9272, 0.9193),
    (0.01, 1000, 1e-5, 2.0): (0.9593, 0.9678, 0.9773, 0.9645),
    (0.01, 1000, 1e-5, 9.0): (0.5650, 0.5720, 0.5780, 0.5694),
    (0.001, 20000, 1e-6, 2.0): (0.7029, 0.7132, 0.7355, 0.7093),
    (0.001, 20000, 1e-6, 9.0): (0.4818, 0.4896, 0.4983, 0.4866),
}
COLUMNS = (
    {"estimator": "exact"},
    HEAD,
    {**HEAD, "sketch": "shared"},
    {**HEAD, "num_probes": 42},
)


def check_row(row):
    rate, steps, delta, epsilon = row
    settings = {"sample_rate": rate, "steps": steps, "delta": delta}
    for column, sigma in zip(COLUMNS, REFERENCE[row], strict=True):
        found = accounting.noise_multiplier(epsilon=epsilon, **settings, **column)
        assert found == pytest.approx(sigma, rel=3e-3)


def test_a_reference_row_is_met():
    check_row((0.01, 1000, 1e-5, 2.0))


@pytest.mark.slow
@pytest.mark.parametrize("row", REFERENCE)
def test_every_reference_row_is_met(row):
    check_row(row)


def test_uncertified_pairs_are_charged_like_hutchinson_and_say_so():
    with pytest.warns(UserWarning, match=r"head_rank=3 with num_probes=26 .* \(2, 26\)") as said:
        assert scale_law("hutchpp", 26, head_rank=3) == ScaleLaw.chi2(26)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Nothing was lost where nothing small was asked for.
        assert scale_law("hutchpp", 26) == ScaleLaw.chi2(26)
        assert scale_law("hutchpp", 26, head_rank=26) == ScaleLaw.chi2(26)
        settings = {"noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.1, "steps": 2}
        paper = {"sketch": "shared", "analysis": "envelope"}
        plain = accounting.epsilon(**settings, **paper, num_probes=26)
        assert accounting.epsilon(**settings, **paper, **HEAD) == plain
        odd = {**HEAD, "head_rank": 3}
        assert accounting.epsilon(**settings, **paper, **odd) == plain


@pytest.mark.parametrize("question", ["epsilon", "delta", "noise_multiplier"])
def test_uncertified_pairs_are_refused_where_a_certificate_is_required(question):
    settings = {"noise_multiplier": 1.0, "epsilon": 1.0, "delta": 1e-3}
    del settings[question]
    settings |= {"sample_rate": 0.1, "steps": 1, "require_certified": True}
    ask = getattr(accounting, question)
    ask(**settings, **HEAD)
    with pytest.raises(PrivacyError, match=r"must be one of .*\(2, 26\)"):
        ask(**settings, **{**HEAD, "num_probes": 27})


def test_the_matched_probes_keep_the_law_and_fewer_do_not():
    head = ScaleLaw.small_head(2, 26)
    matched = matched_probes(2, 26)
    assert combine_laws([head, ScaleLaw.exact(), ScaleLaw.chi2(matched)]) == head
    assert combine_laws([ScaleLaw.chi2(matched - 8), head]).kind == "largest"
    with pytest.raises(PrivacyError, match="no certified law"):
        matched_probes(5, 26)


def test_laws_that_rule_others_out():
    head = ScaleLaw.small_head(2, 26)
    # Fewer probes without a head are worse at every strike; a larger tail is never worse.
    assert combine_laws([head, ScaleLaw.chi2(20)]) == ScaleLaw.chi2(20)
    assert combine_laws([head, ScaleLaw.small_head(2, 42)]) == head
    mixed = combine_laws([head, ScaleLaw.small_head(1, 29), ScaleLaw.chi2(64)])
    assert mixed == combine_laws([ScaleLaw.chi2(64), mixed, head])
    assert hash(mixed) == hash(ScaleLaw.from_dict(json.loads(json.dumps(mixed.as_dict()))))


def test_nodes_of_combined_laws_are_above_each_part():
    mixed = combine_laws([ScaleLaw.small_head(2, 26), ScaleLaw.chi2(64)])
    nodes, strikes = ratio_nodes(mixed), np.linspace(0.1, 2.4, 500)

    def puts(law_nodes):
        gain = np.maximum(strikes[:, None] - law_nodes.ratios, 0.0)
        return gain @ law_nodes.masses + law_nodes.mass_at_zero * strikes

    total = puts(nodes) * (1 + 1e-9)
    assert np.all(total >= load_table(2, 26).puts.at(strikes))
    assert np.all(total >= chi2_puts(strikes, 64))
    # Straight lines between the strikes of both: no better where the two cross.
    most = np.maximum(load_table(2, 26).puts.at(strikes), chi2_puts(strikes, 64))
    assert np.all((total <= 1.05 * most)[strikes > 0.5])
    assert nodes.masses.sum() + nodes.mass_at_zero == pytest.approx(1.0, abs=1e-9)
    assert nodes.masses @ nodes.ratios == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("sketch", ["shared", "per_sample"])
def test_charges_are_between_exact_and_hutchinson(sketch):
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.02, "steps": 100}
    exact = accounting.epsilon(**settings, estimator="exact")
    head = accounting.epsilon(**settings, **HEAD, sketch=sketch)
    tail = accounting.epsilon(**settings, num_probes=26, sketch=sketch)
    assert exact < head < exact + 0.3 * (tail - exact)


@pytest.mark.parametrize("sketch", ["shared", "per_sample"])
def test_the_curve_is_above_that_of_spectra_with_a_known_law(sketch):
    """Flat of rank d > r: R = r/d + χ²_{k(d−r)}/(kd) exactly."""
    recorded = Accountant()
    recorded.step(
        noise_multiplier=0.8,
        sample_rate=0.2,
        law=ScaleLaw.small_head(2, 26),
        sketch=sketch,
        analysis="tight",
    )
    curve = truth.shared_curve if sketch == "shared" else truth.per_sample_curve
    for d in (3, 4, 6, 12):
        points, masses = truth.chi2_rule(26 * (d - 2))
        ratios = 2 / d + (1 - 2 / d) * points
        kept = masses > 1e-25
        for epsilon in (0.1, 0.5, 1.5):
            exact = max(curve(epsilon, 0.8, 0.2, ratios[kept], masses[kept]))
            assert exact <= recorded.delta(epsilon) * (1 + 1e-9)


def test_the_lower_bound_belongs_to_a_gradient_with_a_head():
    """Not of rank one: that is caught whole. Flat of rank 2r: half is caught, half estimated."""
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.02, "steps": 10}
    exact = accounting.epsilon(**settings, estimator="exact")
    lower, upper = accounting.epsilon_bounds(**settings, **HEAD)
    assert exact < lower < upper
    # The rank-one gradient of the tail alone would be above the truth.
    rank_one = accounting.epsilon_bounds(**settings, num_probes=26)[0]
    assert rank_one > upper
    # The same where the head is not charged for.
    assert accounting.epsilon_bounds(**settings, estimator="hutchpp", num_probes=26)[0] < rank_one
    witness = prv.witness_of(ScaleLaw.small_head(2, 26))
    assert (witness.exact_share, witness.degrees) == (0.5, 52)
    mixed = combine_laws([ScaleLaw.small_head(2, 26), ScaleLaw.chi2(64)])
    assert prv.witness_of(mixed) == prv.Witness(0.0, 64)


def test_saved_states_keep_the_law_and_old_ones_load():
    mixed = combine_laws([ScaleLaw.small_head(2, 26), ScaleLaw.chi2(64)])
    for law in (ScaleLaw.small_head(2, 26), mixed):
        recorded = Accountant()
        recorded.step(
            noise_multiplier=1.0, sample_rate=0.02, law=law, sketch="shared", analysis="tight"
        )
        restored = Accountant()
        restored.load_state_dict(json.loads(json.dumps(recorded.state_dict())))
        assert restored.state_dict() == recorded.state_dict()
        assert restored.epsilon(1e-5) == recorded.epsilon(1e-5)
    state = recorded.state_dict()
    state["steps"][0]["law"] = {"kind": "chi2", "num_probes": 32}
    recorded.load_state_dict(state)
    for law in (
        {"kind": "small_head", "num_probes": 27, "head_rank": 2},
        {"kind": "small_head", "num_probes": 26},
        {"kind": "chi2", "num_probes": 26, "head_rank": 2},
        {"kind": "largest", "num_probes": 26},
        {"kind": "chi2", "num_probes": 26, "rank": 2},
    ):
        state["steps"][0]["law"] = law
        with pytest.raises((ValueError, PrivacyError)):
            recorded.load_state_dict(state)


WORDS = "--noise-multiplier 1 --delta 1e-5 --sample-rate 0.1 --steps 2"


def test_the_command_charges_a_certified_head(capsys):
    words = f"epsilon {WORDS} --estimator hutchpp --num-probes 26 --head-rank 2 --json"
    assert main([*words.split(), "--require-certified"]) == 0
    answer = json.loads(capsys.readouterr().out)
    settings = {"noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.1, "steps": 2}
    assert answer["epsilon_upper"] == accounting.epsilon(**settings, **HEAD)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--estimator hutchpp --head-rank 0", "head_rank must be an int of at least 1, got 0"),
        ("--head-rank 2", "head_rank=2 is only for hutchpp"),
        (
            "--estimator hutchpp --num-probes 27 --head-rank 2 --require-certified",
            "head_rank=2 with num_probes=27 has no certified law",
        ),
    ],
)
def test_bad_heads_are_one_line(words, message, capsys):
    assert main(f"epsilon {WORDS} {words}".split()) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert message in error


def test_the_search_refuses_what_it_cannot_certify(capsys):
    assert main(["certify-law", "--head-rank", "3", "--num-probes", "26"]) == 2
    assert "head_rank must be 1 or 2" in capsys.readouterr().err
    assert main(["certify-law", "--head-rank", "2", "--num-probes", "26", "--tolerance", "2"]) == 2
    assert "tolerance must be in (0, 1), got 2.0" in capsys.readouterr().err
