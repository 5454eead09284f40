"""Laws, how they combine, and the paper's envelope."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from dprc.accounting import ScaleLaw, combine_laws, scale_law
from dprc.accounting.envelope import envelope_bins, envelope_cdf, middle_edge
from dprc.accounting.puts import chi2_puts
from tests.accounting import truth


def test_names_map_to_laws():
    assert all(scale_law(name).is_exact for name in ("exact", "ghost", "tiled"))
    assert scale_law("hutchinson", 48) == ScaleLaw.chi2(48)
    assert scale_law("hutchpp", 26) == ScaleLaw.chi2(26)
    assert scale_law("hutchpp", 26, head_rank=2) == ScaleLaw.small_head(2, 26)


def test_fewest_probes_govern_and_exact_layers_never_hurt():
    assert combine_laws([ScaleLaw.chi2(64), ScaleLaw.exact(), ScaleLaw.chi2(16)]).num_probes == 16
    assert combine_laws([ScaleLaw.exact()] * 3).is_exact
    with pytest.raises(ValueError, match="at least one law"):
        combine_laws([])


@pytest.mark.parametrize(
    ("kind", "probes"), [("exact", 3), ("chi2", None), ("chi2", 0), ("chi2", True), ("sign", 3)]
)
def test_impossible_laws_are_refused(kind, probes):
    with pytest.raises(ValueError, match=r"num_probes|kind"):
        ScaleLaw(kind, probes)


def test_signs_for_gaussians_would_break_the_law_however_many_probes():
    """For v = (1, 1)/√2 the ratio of ±1 probes is 2·Bin(k, ½)/k, which can be 0."""
    k, strikes = 32, np.array([0.15, 0.2, 0.24, 0.3])
    agreeing = np.arange(k + 1)
    masses = stats.binom.pmf(agreeing, k, 0.5)
    signs = np.maximum(strikes[:, None] - 2.0 * agreeing / k, 0.0) @ masses
    ratios = signs / chi2_puts(strikes, k)
    assert ratios[:2] == pytest.approx([58.0, 5.94], rel=0.01)
    assert ratios[2] > 1.0 > ratios[3]


@settings(derandomize=True, max_examples=20, deadline=None, database=None)
@given(
    weights=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3),
    ratio=st.floats(0.5, 2.0),
    k=st.sampled_from([8, 16, 32]),
)
def test_envelope_is_above_the_cdf_of_every_spectrum(weights, ratio, k):
    weights = np.sort(np.array(weights) / sum(weights))
    # The largest share is integrated in closed form, the others by quadrature.
    ratios, masses = truth.spectrum_law(weights[:-1], 0.0, k)
    room = np.maximum(ratio - ratios, 0.0) / weights[-1]
    exact = masses @ special.gammainc(k / 2, room * k / 2)
    for rank in (weights.size, weights.size + 2):
        assert exact <= envelope_cdf(ratio, k, rank) + 2e-4
    assert exact <= envelope_cdf(ratio, k) + 1e-9


def test_envelope_has_three_segments():
    k, rank = 32, 4
    edge = middle_edge(k, rank)
    assert 1.0 < edge < 1.1
    assert envelope_cdf(0.9, k, rank) == special.gammainc(k / 2, 0.9 * k / 2)
    assert envelope_cdf(1.5, k, rank) == special.gammainc(rank * k / 2, 1.5 * rank * k / 2)
    inside = 1.0 + 0.5 * (edge - 1.0)
    single = special.gammainc(k / 2, inside * k / 2)
    flat = special.gammainc(rank * k / 2, inside * rank * k / 2)
    assert envelope_cdf(inside, k, rank) > max(single, flat)


def test_envelope_bins_hold_all_mass():
    bins = envelope_bins(ScaleLaw.chi2(32))
    total = bins.low.sum() + bins.high.sum() + bins.at_one + bins.mass_at_zero
    assert 1.0 <= total <= 1.0 + 1e-9
    assert bins.at_one == pytest.approx(special.gammaincc(16, 16))


@pytest.mark.parametrize(("ratio", "k", "rank"), [(0.0, 32, 2), (1.0, 0, 2), (1.0, 32, 0)])
def test_envelope_refuses_what_has_no_meaning(ratio, k, rank):
    with pytest.raises(ValueError, match="must be"):
        envelope_cdf(ratio, k, rank)
