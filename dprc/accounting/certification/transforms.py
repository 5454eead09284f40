"""E e^(−sR) of the law that bounds a cell, with the directions of the head discretised upwards.

Everything is non-decreasing as ξ_i falls (docs/small_head.md, Lemma 4): a bin of ξ_i counts with
its lower end.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import special

from dprc.accounting.arrays import Array, Ints
from dprc.accounting.certification.cells import Cell, largest_left, least_caught
from dprc.accounting.certification.inversion import Complex, log1p

# Candidates for the ends of bins, and bins for a first look.
_CANDIDATES = 400
_FIRST_LOOK = 20
# Values of μ_0 that are told apart.
_LEVELS = 200
_MASS_ERROR = 1e-12
# Weights below it are rounded up to it.
_SMALLEST = 1e-9


@dataclass(frozen=True)
class Bins:
    """A law of ξ in bins.

    Attributes:
        low: Lower ends, the first is 0; shape (bins,).
        high: Upper ends, the last is infinite; shape (bins,).
        masses: Rounded up; shape (bins,).
    """

    low: Array
    high: Array
    masses: Array

    @classmethod
    def between(cls, edges: Array, degrees: int) -> "Bins":
        """Bins of χ² with 1 or 2 degrees between edges, 0 and infinity."""
        low, high = np.append(0.0, edges), np.append(edges, np.inf)
        above = special.gammaincc(degrees / 2, low / 2), special.gammaincc(degrees / 2, high / 2)
        below = special.gammainc(degrees / 2, low / 2), special.gammainc(degrees / 2, high / 2)
        masses = np.where(low < 1.0, below[1] - below[0], above[0] - above[1])
        slack = _MASS_ERROR * np.where(low < 1.0, below[1], above[0])
        return cls(low, high, np.maximum(masses, 0.0) + slack)


Side = Literal["upper", "lower"]


def transforms(
    cell: Cell,
    num_probes: int,
    bins: tuple[Bins, ...],
    points: Complex,
    side: Side = "upper",
) -> tuple[Complex, float]:
    """E e^(−sR) at the points, for a law whose puts are at least those of all spectra in the cell.

    Args:
        cell: Where the spectrum is.
        num_probes: k.
        bins: Laws of ξ_1, …, ξ_r; r is 1 or 2.
        points: s on a line; shape (points,).
        side: ``"lower"`` takes the other end of each bin, for an estimate from below at a cell of
            one point.

    Returns:
        The transform, and a bound on its modulus at the last point and beyond: given the head's
        directions each modulus falls along the line.
    """
    half = num_probes / 2
    c = cell.next_eigenvalues[-1]
    ends = [b.low if side == "upper" else np.minimum(b.high, 1e9) for b in bins]
    inner = np.full(1, c)
    caught, row_masses = np.zeros(1), np.ones(1)
    if len(bins) == 2:
        inner = largest_left(cell, 2, inner, ends[1])
        caught, row_masses = least_caught(cell, 2, ends[1]), bins[1].masses
    outer = largest_left(cell, 1, inner[:, None], ends[0])
    outer_caught = least_caught(cell, 1, ends[0])

    trace = 1.0 - caught[:, None] - outer_caught
    with_inner = float(len(bins) == 2)

    # μ_0 is rounded to one of a few levels, the trace kept: partial sums only rise.
    levels, level = _levels(outer, side)
    filled = trace - levels[level] - with_inner * inner[:, None] >= 0.0

    # With slope = (k/2c)·log(1 + 2cs/k) and η = s − slope, the exponent of what is left is
    # −slope·(1 − Σμ) − η·Σcaught − Σ(k/2)·log(1 + 2μs/k). Each factor is taken relative to its
    # largest, so that none overflows.
    slope = half / c * log1p(c / half * points)
    eta = points - slope
    top = float(levels[-1]) + with_inner * float(inner.max())
    inner_gap = with_inner * (inner - inner.max())[:, None]
    rows = row_masses[:, None] * np.exp(
        inner_gap * slope
        - np.outer(caught, eta)
        - with_inner * half * log1p(_outer(inner / half, points))
        + (top - 1.0) * slope
    )
    columns = bins[0].masses[:, None] * np.exp(-np.outer(outer_caught, eta))
    level_gap = (levels - levels[-1])[:, None]
    steps = np.exp(level_gap * slope - half * log1p(_outer(levels / half, points)))

    total = np.zeros(points.size, dtype=np.complex128)
    cut = 0.0
    # |·| factor by factor, at the last point only: that is where the sum is cut.
    last_columns, last_steps = np.abs(columns[:, -1]), np.abs(steps[:, -1])
    for j in np.flatnonzero(filled.any(axis=1)).tolist():
        kept = filled[j]
        chosen = level[j][kept]
        total += rows[j] * np.einsum("is,is->s", columns[kept], steps[chosen])
        cut += abs(rows[j, -1]) * float(last_columns[kept] @ last_steps[chosen])
    if not filled.all():
        joint = (row_masses[:, None] * bins[0].masses)[~filled]
        first = np.minimum(outer, trace)[~filled]
        second = trace[~filled] - first if len(bins) == 2 else None
        bare, bare_cut = _without_fill(first, second, joint, half, points, side)
        total, cut = total + bare, cut + bare_cut
    return total, cut


def _without_fill(
    first: Array, second: Array | None, masses: Array, half: float, points: Complex, side: Side
) -> tuple[Complex, float]:
    """The part of the transform where the trace is used up by the first one or two weights w.

    The exponent is −s·(1 − Σw) − Σ(k/2)·log(1 + 2ws/k): a function of each weight's level.
    """
    levels, level = _levels(np.maximum(first, _SMALLEST), side)
    outer, top = _bare_weight(levels, half, points), float(levels[-1])
    if second is None:
        counts = np.bincount(level, masses, minlength=levels.size)[:, None]
        inner = np.ones((1, points.size), dtype=np.complex128)
    else:
        # What is nearly nothing is rounded up to a thousandth of the largest.
        floor = 1e-3 * max(float(second.max()), _SMALLEST)
        inner_levels, inner_level = _levels(np.maximum(second, floor), side)
        inner, top = _bare_weight(inner_levels, half, points), top + float(inner_levels[-1])
        joint, size = level * inner_levels.size + inner_level, levels.size * inner_levels.size
        counts = np.bincount(joint, masses, minlength=size).reshape(levels.size, -1)
    scale = np.exp((top - 1.0) * points)
    total = scale * np.einsum("gs,gs->s", outer, counts @ inner)
    cut = abs(scale[-1]) * (np.abs(outer[:, -1]) @ (counts @ np.abs(inner[:, -1])))
    return total, float(cut)


def _bare_weight(levels: Array, half: float, points: Complex) -> Complex:
    """exp(s·w)·(1 + 2ws/k)^(−k/2) for each level w, with the last level's exp(s·w) left out."""
    gap = (levels - levels[-1])[:, None]
    product: Complex = np.exp(gap * points - half * log1p(_outer(levels / half, points)))
    return product


def _outer(weights: Array, points: Complex) -> Complex:
    """Each weight times each point."""
    product: Complex = weights[:, None] * points
    return product


def _levels(values: Array, side: Side) -> tuple[Array, Ints]:
    """Levels from the smallest to the largest value, and which one each value is rounded to."""
    low, high = float(values.min()), float(values.max())
    count = min(_LEVELS, 2 + math.ceil(math.log(high / low) / 2e-3)) if high > low else 2
    levels = np.geomspace(low, max(high, low * (1.0 + 1e-9)), count)
    # The ends are rounded by geomspace: nothing may lie above the last level.
    levels[-1] = max(float(levels[-1]), high)
    position = np.searchsorted(levels, values, side="left")
    if side == "lower":
        position = np.searchsorted(levels, values, side="right") - 1
    return levels, np.clip(position, 0, count - 1)


def tilted_bins(cell: Cell, num_probes: int, sigma: float, count: int) -> tuple[Bins, ...]:
    """Bins of ξ_1, …, ξ_r that suit a line Re s = σ at one spectrum of the cell.

    Only accuracy depends on them: what a bin loses is its mass times the fall of the transform
    across it, and bins of equal √(mass·fall) lose least.
    """
    middle = tuple(0.5 * (a + b) for a, b in zip(cell.low, cell.high, strict=True))
    # On a lattice, so that neighbouring cells share bins.
    at = tuple(max(round(value * 64), 1) / 64 for value in middle)
    return _tilted_bins(at, num_probes, sigma, count)


@lru_cache(maxsize=4096)
def _tilted_bins(
    at: tuple[float, ...], num_probes: int, sigma: float, count: int
) -> tuple[Bins, ...]:
    spectrum = Cell(at, at)
    degrees = range(len(at), 0, -1)
    largest = [2.0 * float(special.gammainccinv(d / 2, 1e-10)) for d in degrees]
    ends = [np.geomspace(1e-9, end, _CANDIDATES) for end in largest]
    looks = [end[:: _CANDIDATES // _FIRST_LOOK] for end in ends]
    result = []
    for i, d in enumerate(degrees):
        axes = [ends[j] if j == i else looks[j] for j in range(len(at))]
        value = _real_transform(spectrum, num_probes, sigma, axes)
        if len(at) == 2:
            # Rows are ξ_2, columns ξ_1.
            other = Bins.between(looks[1 - i][1:], degrees[1 - i]).masses
            value = other @ value if i == 0 else value @ other
        value = value.ravel()
        fine = Bins.between(ends[i][1:-1], d)
        loss = np.sqrt(fine.masses * np.maximum(value[:-1] - value[1:], 0.0))
        share = 0.9 * loss / max(float(loss.sum()), 1e-300) + 0.1 / loss.size
        reached = np.concatenate([[0.0], np.cumsum(share)])
        edges = np.interp(np.arange(1, count) / count * reached[-1], reached, ends[i])
        result.append(Bins.between(edges, d))
    return tuple(result)


def _real_transform(cell: Cell, num_probes: int, sigma: float, axes: list[Array]) -> Array:
    """E e^(−σR) given ξ's on a grid; rows are ξ_2 (one for rank 1), columns ξ_1."""
    half = num_probes / 2
    c = cell.next_eigenvalues[-1]
    inner, caught = np.full((1, 1), c), np.zeros((1, 1))
    weights = []
    if len(axes) == 2:
        column = axes[1][:, None]
        inner, caught = largest_left(cell, 2, inner, column), least_caught(cell, 2, column)
        weights = [inner]
    weights.append(largest_left(cell, 1, inner, axes[0]))
    trace = 1.0 - caught - least_caught(cell, 1, axes[0])
    exponent = -sigma * (1.0 - trace)
    left = trace
    for weight in reversed(weights):
        used = np.minimum(weight, left)
        left = left - used
        exponent = exponent - half * np.log1p(used * sigma / half)
    value: Array = np.exp(exponent - half / c * left * np.log1p(c / half * sigma))
    return value
