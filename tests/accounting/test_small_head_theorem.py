"""The theorem behind small heads (docs/small_head.md) step by step, and its law against samples."""

import numpy as np
import pytest
from scipy import special

from dprc.accounting import certified_pairs
from dprc.accounting.certification import cells as bounds
from dprc.accounting.certification.cells import Cell
from dprc.accounting.small_head import load_table
from tests.accounting import hutchpp_truth, truth

STRIKES = np.array([0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3])
TABLE = (2, 26)


def charged(pair=TABLE):
    return load_table(*pair).puts.at(STRIKES) - np.maximum(STRIKES - 1.0, 0.0)


def sketches(rng, values, rank, *, failing):
    """Gaussian sketches; of failing ones the rows of the largest eigenvalues are nearly zero."""
    sketch = rng.standard_normal((*values.shape, rank))
    if failing:
        rows = rng.integers(1, rank + 1, size=(len(values), 1, 1))
        small = 10.0 ** rng.uniform(-6, 0, size=(len(values), 1, 1))
        sketch *= np.where(np.arange(values.shape[1])[:, None] < rows, small, 1.0)
    return sketch


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_what_a_head_leaves_is_weakly_majorised(rank, failing):
    """Partial sums of the residual's eigenvalues, for each sketch: no mean is taken."""
    rng = np.random.default_rng(rank)
    values = hutchpp_truth.spectra(rng, 3000, 9)
    sketch = sketches(rng, values, rank, failing=failing)
    left = hutchpp_truth.residual(values, hutchpp_truth.head(values, sketch))
    eigenvalues = np.linalg.eigvalsh(left)[:, ::-1]
    weights, c, trace = hutchpp_truth.bound(values, sketch)
    limit = np.cumsum(
        np.concatenate([weights, np.repeat(c[:, None], 9 - rank, axis=1)], axis=1), axis=1
    )
    limit = np.minimum(limit, trace[:, None])
    assert np.all(np.diff(weights, axis=1) <= 1e-12)
    assert np.all(trace <= 1.0 + 1e-12)
    excess = np.cumsum(eigenvalues, axis=1) - limit
    assert excess.max() < 1e-9
    # The inequalities have no room to hide a wrong one: with spectra of few directions they are
    # nearly attained, and a head that leaves a little more breaks them.
    one_sided = hutchpp_truth.head(values, sketch, powered=False)
    worse = np.linalg.eigvalsh(hutchpp_truth.residual(values, one_sided))[:, ::-1]
    assert (np.cumsum(worse, axis=1) - limit).max() > 1e-3


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_angle_ratio_is_below_one_with_its_mean_in_the_numerator(rank):
    """P(q/ξ > a) ≤ P(b/ξ > a), where ξ has the least concave majorant of χ²'s distribution."""
    rng = np.random.default_rng(rank)
    values = hutchpp_truth.spectra(rng, 12, 8)[:, :, None]
    q = (values * rng.chisquare(1, size=(12, 8, 8000))).sum(1)
    for degrees in range(1, rank + 1):
        grid = np.linspace(0.0, 60.0, 60_001)
        cdf = special.gammainc(degrees / 2, grid / 2)
        majorant = cdf
        if degrees > 2:
            touch = int(np.argmax(cdf[1:] / grid[1:])) + 1
            majorant = np.where(grid < grid[touch], cdf[touch] * grid / grid[touch], cdf)
        assert np.all(np.diff(majorant, 2) <= 1e-9)
        for a in (0.02, 0.1, 0.5, 2.0, 10.0):
            mean = special.gammainc(degrees / 2, q / a / 2).mean(1)
            assert np.all(mean <= np.interp(1.0 / a, grid, majorant) + 0.02)


def test_puts_rise_with_weak_majorisation():
    """E(x − R)₊ given the residual's eigenvalues: more in the first sums is never less."""
    rng = np.random.default_rng(5)
    for _ in range(30):
        more = np.sort(rng.dirichlet(np.ones(3)) * rng.uniform(0.2, 1.0))[::-1]
        mix = rng.dirichlet(np.ones(6))
        orders = ([0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0])
        less = sum(m * more[order] for m, order in zip(mix, orders, strict=True))
        less *= rng.uniform(0.7, 1.0)
        laws = [truth.spectrum_law(w, 1.0 - w.sum(), 8) for w in (less, more)]
        for x in (0.5, 0.8, 1.0, 1.2):
            low, high = (float(np.maximum(x - r, 0.0) @ m) for r, m in laws)
            assert low <= high + 2e-4


def test_a_gamma_fills_a_fraction_of_a_direction():
    """The weight f < c on one direction is below c times a gamma of the same mean."""
    k, c = 10, 0.4
    gauss, masses = truth.chi2_rule(k)
    for f in (0.05, 0.2, 0.39):
        shape = k * f / (2 * c)
        points, weights = special.roots_genlaguerre(60, shape - 1)
        filled, weights = points * 2 * c / k, weights / weights.sum()
        assert filled @ weights == pytest.approx(f)
        for x in np.linspace(0.02, 0.6, 12):
            exact = np.maximum(x - f * gauss, 0.0) @ masses
            assert exact <= np.maximum(x - filled, 0.0) @ weights + 1e-3


def test_cell_bounds_hold_inside_the_cell():
    rng = np.random.default_rng(7)
    for _ in range(400):
        rank = int(rng.integers(1, 3))
        low = hutchpp_truth.spectra(rng, 1, 4)[0, :rank]
        high = low * (1.0 + rng.uniform(0.0, 0.5))
        cell = Cell(tuple(low), tuple(high)).clipped()
        inside = low + rng.uniform(size=(200, rank)) * (np.array(cell.high) - low)
        inside = -np.sort(-inside, axis=1)
        inside = inside[(inside.sum(1) <= 1.0) & np.all(inside <= cell.high, axis=1)]
        inside = inside[np.all(inside >= cell.low, axis=1)]
        xi = np.array([10.0 ** rng.uniform(-6, 1.5)])
        rest = 1.0 - np.cumsum(inside, axis=1)
        c = np.minimum(inside[:, -1], rest[:, -1])
        mu, upper = c, np.array([cell.next_eigenvalues[-1]])
        for i in range(rank, 0, -1):
            largest, after = inside[:, i - 1], c if i == rank else inside[:, i]
            h = rest[:, i - 1] / xi
            mu = mu + after * h / (largest**2 + after * h) * (largest - mu)
            upper = bounds.largest_left(cell, i, upper, xi)
            assert np.all(mu <= upper)
            caught = largest - hutchpp_truth.best_trade(largest, after, h)
            assert np.all(caught >= bounds.least_caught(cell, i, xi) - 1e-6)


ADVERSARIES = {
    "flat of rank 3": np.ones(3) / 3,
    "flat of rank 4": np.ones(4) / 4,
    "flat of rank 5": np.ones(5) / 5,
    "two spikes": np.array([0.45, 0.45, 0.05, 0.05]),
    "spike and bulk": np.array([0.6, *(0.4 / 8 for _ in range(8))]),
    "two spikes and bulk": np.array([0.3, 0.3, *(0.4 / 8 for _ in range(8))]),
}


@pytest.mark.parametrize("spectrum", ADVERSARIES)
def test_no_adversary_exceeds_the_law(spectrum):
    rng = np.random.default_rng(11)
    samples = hutchpp_truth.ratios(rng, ADVERSARIES[spectrum], *TABLE, 40_000)
    mean, error = hutchpp_truth.puts(samples, STRIKES)
    assert samples.mean() == pytest.approx(1.0, abs=5 * samples.std() / 200)
    assert np.all(mean <= charged() + 5 * error)


def test_a_search_over_six_eigenvalues_does_not_exceed_the_law():
    """Each of the strikes 0.7 to 1.1 is attacked by 5 spectra, each from the best so far."""
    rng = np.random.default_rng(13)
    best = np.full(STRIKES.size, -np.inf)
    where = [np.ones(6) / 6 for _ in STRIKES]
    for step in range(45):
        target = 3 + step % 9
        trial = np.abs(where[target] * np.exp(rng.normal(size=6) * 0.5))
        trial /= trial.sum()
        samples = hutchpp_truth.ratios(rng, trial, *TABLE, 6000)
        mean, error = hutchpp_truth.puts(samples, STRIKES)
        assert np.all(mean <= charged() + 5 * error)
        better = mean / charged() > best
        best = np.where(better, mean / charged(), best)
        where = [trial if better[j] else where[j] for j in range(STRIKES.size)]
    # The attack is worth its name: it gets near where the noise is decided.
    assert best[9] > 0.7


def spike_and_bulk(rng, spike, size, pair, count, *, power):
    """R for one spike and ``size`` equal small eigenvalues, from the angle of head and spike.

    With O = β + (λ−β)e eᵀ what is left is β, and once β + (λ−β)|(I−QQᵀ)e|².
    """
    rank, k = pair
    bulk = (1.0 - spike) / size
    wishart = rng.standard_normal((count, size, rank))
    gram = wishart.transpose(0, 2, 1) @ wishart
    on_spike = rng.standard_normal((count, rank, 1))
    solved = np.linalg.solve(gram, on_spike)
    angle = 1.0 / (1.0 + (spike / bulk) ** (2 * power) * (on_spike * solved).sum((1, 2)))
    top = bulk + (spike - bulk) * angle
    rest = bulk * (size - rank)
    return (
        1.0
        - top
        - rest
        + top * rng.chisquare(k, count) / k
        + rest * rng.gamma(k * (size - rank) / 2, size=count) * 2 / (k * (size - rank))
    )


def test_a_one_sided_sketch_is_caught():
    """Accounted as if it were O S, a head from one side of the gradient exceeds the law."""
    rng = np.random.default_rng(17)
    for power, exceeds in ((1.0, False), (0.5, True)):
        samples = np.concatenate(
            [spike_and_bulk(rng, 0.8, 60, TABLE, 20_000, power=power) for _ in range(5)]
        )
        mean, error = hutchpp_truth.puts(samples, STRIKES)
        assert bool(np.any(mean > charged() + 5 * error)) is exceeds


def test_a_reused_sketch_is_caught():
    """Columns of S taken as probes of the tail bias the estimate."""
    rng = np.random.default_rng(19)
    samples = hutchpp_truth.ratios(rng, np.ones(4) / 4, *TABLE, 20_000, reuse=True)
    gain = np.maximum(STRIKES[:, None] - samples, 0.0)
    mean = gain.mean(1) - np.maximum(STRIKES - 1.0, 0.0)
    assert np.any(mean > charged() + 5 * gain.std(1) / np.sqrt(samples.size))


@pytest.mark.parametrize("pair", certified_pairs())
def test_fewer_probes_than_accounted_are_caught_by_the_flat_spectrum(pair):
    """Of 2r equal eigenvalues the law is known: R = 1/2 + χ²_{kr}/(2kr)."""
    rank, k = pair
    rng = np.random.default_rng(23)
    for used, right in ((k, True), (k - 2, False)):
        samples = hutchpp_truth.ratios(rng, np.ones(2 * rank) / (2 * rank), rank, used, 40_000)
        deviation = samples.var() / (0.25 * 2 / (k * rank)) - 1.0
        assert bool(abs(deviation) < 5 * np.sqrt((2 + 12 / (k * rank)) / samples.size)) is right
