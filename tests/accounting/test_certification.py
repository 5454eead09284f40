"""The search for small-head laws: its integrals, its cells, and what it shipped."""

import itertools
import json
from importlib import resources

import numpy as np
import pytest

from dprc.accounting import certified_pairs
from dprc.accounting.certification import search, tables
from dprc.accounting.certification.cells import Cell, simplex_cells
from dprc.accounting.certification.inversion import Line
from dprc.accounting.puts import PutBound, chi2_puts
from dprc.accounting.small_head import dominates, load_table
from tests.accounting import hutchpp_truth

INTRINSIC = np.maximum(search.STRIKES - 1.0, 0.0)


def stored(pair):
    name = f"small_head_r{pair[0]}_k{pair[1]}.json"
    return json.loads((resources.files("dprc.accounting") / "tables" / name).read_text())


@pytest.mark.parametrize(
    ("line", "strikes"),
    [
        (Line(12.0, 3.0, 130.0), (0.6, 0.9, 1.2)),
        (Line(48.0, 1.2, 400.0), (0.3, 0.5)),
        (Line(-5.0, 4.0, 130.0), (1.2, 1.5, 2.0)),
    ],
)
def test_inversion_encloses_the_puts_of_a_known_law(line, strikes):
    """χ²_k/k, whose transform and puts have closed forms."""
    strikes, k = np.array(strikes), 26
    transform = (1.0 + 2.0 * line.points / k) ** (-k / 2)
    lower, upper = line.puts(strikes, transform, abs(transform[-1]))
    truth = chi2_puts(strikes, k) - np.maximum(strikes - 1.0, 0.0)
    assert np.all(upper >= truth * (1 - 1e-9))
    assert upper == pytest.approx(truth, rel=1e-4)
    if line.sigma > 0:
        assert np.all(lower <= truth)
        assert lower == pytest.approx(truth, rel=1e-4)


@pytest.mark.parametrize("spectrum", [(0.45,), (0.28, 0.28), (0.4, 0.4), (0.5, 0.1), (0.85, 0.09)])
def test_point_bounds_enclose_samples_of_the_law(spectrum):
    rng = np.random.default_rng(1)
    k, cell = 26, Cell(spectrum, spectrum)
    samples = hutchpp_truth.bound_ratios(rng, np.array(spectrum), k, 100_000)
    near = (search.STRIKES > 0.75) & (search.STRIKES < 1.25)
    mean, error = hutchpp_truth.puts(samples, search.STRIKES[near])
    upper = search.cell_puts(cell, k, 96)[near]
    lower = search.cell_puts(cell, k, 96, side="lower")[near]
    assert np.all(mean <= upper + 5 * error)
    assert np.all(mean >= lower - 5 * error)
    # Close enough that a wrong law would show; accounting k+2 probes for k does.
    middle = np.abs(search.STRIKES[near] - 1.0) < 1e-9
    assert upper[middle] == pytest.approx(mean[middle], rel=0.04)
    if sum(spectrum) < 0.9:  # beyond, the head's failures decide, and not k
        assert np.any(search.cell_puts(cell, k + 2, 96)[near] < mean - 5 * error)


def test_a_cell_bounds_its_points():
    rng = np.random.default_rng(2)
    for low, high in (((0.25, 0.2), (0.3, 0.26)), ((0.7, 0.1), (0.8, 0.15))):
        cell = Cell(low, high).clipped()
        bound = search.cell_puts(cell, 26, 24)
        for _ in range(3):
            point = tuple(rng.uniform(cell.low, cell.high))
            assert np.all(search.cell_puts(Cell(point, point), 26, 24, side="lower") <= bound)


def test_cells_cover_the_simplex():
    rng = np.random.default_rng(3)
    cells = simplex_cells(2, 4)
    cells = [part for cell in cells for part in cell.split()]
    for spectrum in hutchpp_truth.spectra(rng, 500, 3)[:, :2]:
        assert any(
            np.all(spectrum >= np.array(cell.low) - 1e-12)
            and np.all(spectrum <= np.array(cell.high) + 1e-12)
            for cell in cells
        )


@pytest.mark.parametrize("pair", certified_pairs())
class TestShipped:
    def test_points_of_the_simplex_are_below_the_table(self, pair):
        """Random spectra and random ones near the worst, evaluated anew from below."""
        rng = np.random.default_rng(4)
        charged = load_table(*pair).puts.at(search.STRIKES) - INTRINSIC
        worst = stored(pair)["points"]
        nearest = 0.0
        for trial in range(6):
            base = np.array(worst[len(worst) // 2 + trial // 2 - 1])
            near = np.clip(base * rng.uniform(0.95, 1.05, base.size), 0.0, None)
            point = near if trial % 2 else hutchpp_truth.spectra(rng, 1, 5)[0, : pair[0]]
            point = tuple(-np.sort(-point / max(1.0, point.sum() + 1e-9)))
            lower = search.cell_puts(Cell(point, point), pair[1], 40, side="lower")
            assert np.all(lower <= charged * (1 + 1e-9))
            nearest = max(nearest, float(np.max((lower / charged)[search.STRIKES > 0.8])))
        assert nearest > 0.7

    def test_the_table_says_how_it_was_made(self, pair):
        table = stored(pair)
        assert tuple(table["strikes"]) == tuple(search.STRIKES.tolist())
        assert table["code_hash"] == tables.code_hash(), "the search changed: certify again"
        assert 0.0 < table["gap"] < 0.08
        assert np.all(np.array(table["attained"]) <= np.array(table["excess"]))

    def test_matched_probes_are_the_fewest(self, pair):
        table = load_table(*pair)
        puts = table.puts
        assert table.matched_probes % 8 == 0
        assert dominates(puts, table.matched_probes)
        assert not dominates(puts, table.matched_probes - 8)
        # Between the strikes as well.
        fine = np.linspace(0.05, 2.4, 4001)
        assert np.all(chi2_puts(fine, table.matched_probes) <= puts.at(fine))


@pytest.mark.slow
@pytest.mark.parametrize("pair", [(1, 29)])
def test_a_table_is_certified_again(pair):
    """From the start, more coarsely: both searches must enclose the same supremum."""
    effort = search.Effort(tolerance=0.05, bins=(24, 32, 64), point_bins=100)
    seen = []
    again = search.certify(*pair, effort, seen.append)
    table = stored(pair)
    assert np.all(again.attained <= np.array(table["excess"]) * (1 + 1e-9))
    assert np.all(np.array(table["attained"]) <= again.excess * (1 + 1e-9))
    near = (search.STRIKES >= 0.8) & (search.STRIKES <= 1.3)
    assert np.all(again.excess[near] <= np.array(table["excess"])[near] * 1.07)
    assert seen[-1].gap < 0.2


@pytest.mark.parametrize(
    ("rank", "probes", "message"), [(3, 26, "head_rank must be 1 or 2"), (2, 3, "at least 4")]
)
def test_impossible_searches_are_refused(rank, probes, message):
    with pytest.raises(ValueError, match=message):
        search.certify(rank, probes)


@pytest.mark.parametrize("k", [8, 32, 160])
def test_chi2_puts_are_just_above_fifty_digits(k):
    mpmath = pytest.importorskip("mpmath")
    for x in (0.05, 0.3, 0.7, 0.99, 1.0, 1.3, 2.5):
        with mpmath.workdps(50):
            half, strike = mpmath.mpf(k) / 2, mpmath.mpf(x)
            cdf, moment = (
                mpmath.gammainc(half + i, 0, strike * half, regularized=True) for i in (0, 1)
            )
            excess = float(
                (mpmath.mpf(chi2_puts(np.array([x]), k)[0]) / (strike * cdf - moment)) - 1
            )
        assert 0 < excess < 1e-10


def test_bounds_between_strikes_are_above_a_convex_function():
    """A hull of noisy points above a put function stays above it, and is a law of mean ≤ 1."""
    rng = np.random.default_rng(6)
    strikes = np.linspace(0.2, 2.5, 60)
    noisy = PutBound(strikes, chi2_puts(strikes, 20) * (1 + 0.05 * rng.random(60)))
    fine = np.linspace(0.01, 3.0, 2000)
    assert np.all(noisy.at(fine) >= chi2_puts(fine, 20))
    ratios, masses, rounding, at_zero = noisy.atoms()
    assert masses.sum() + at_zero == pytest.approx(1.0, abs=1e-12)
    assert 0.95 < masses @ ratios <= 1.0 + 1e-9
    assert rounding.max() < 1e-13
    rebuilt = np.maximum(fine[:, None] - ratios, 0.0) @ masses + at_zero * fine
    assert rebuilt == pytest.approx(noisy.at(fine), rel=1e-9, abs=1e-15)


@pytest.mark.slow
def test_equal_eigenvalues_are_not_the_worst_far_below_strike_one():
    """A point off the diagonal is above the bounds of all cells that cover the diagonal."""
    k, parts = 26, 128
    far = (search.STRIKES > 0.12) & (search.STRIKES < 0.6)
    ends = np.linspace(0.0, 0.5, parts + 1).tolist()
    diagonal = np.max(
        [
            search.cell_puts(Cell((a, a), (b, b)), k, 48, far)[far]
            for a, b in itertools.pairwise(ends)
        ],
        axis=0,
    )
    points = [(0.84, 0.09), (0.85, 0.08)]
    attained = np.max(
        [search.cell_puts(Cell(p, p), k, 96, side="lower")[far] for p in points], axis=0
    )
    assert np.all(attained > 2.0 * diagonal)
    near = np.argmin(np.abs(search.STRIKES[far] - 0.5))
    assert attained[near] == pytest.approx(21 * diagonal[near], rel=0.02)
