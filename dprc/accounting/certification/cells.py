"""Bounds on what a head leaves, valid for every spectrum in a cell of the simplex.

The names are those of docs/small_head.md, section 2: λ_1 ≥ … ≥ λ_r are the largest eigenvalues,
b_i = 1 − λ_1 − … − λ_i, c bounds the next one, ξ_i tells how well the head's column i meets its
direction, μ_0 ≥ … ≥ μ_{r−1} bound the largest eigenvalues of what is left, and t_0 its trace.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dprc.accounting.arrays import Array

# Each bound below takes some tens of roundings; its relative error is far less than this.
_MARGIN = 1e-12
# A smaller remaining eigenvalue is rounded up to it: rounding up is safe, and keeps 1/c finite.
_SMALLEST_REST = 1e-4


@dataclass(frozen=True)
class Cell:
    """Spectra with low_i ≤ λ_i ≤ high_i, λ_1 ≥ … ≥ λ_r ≥ 0 and sum at most 1.

    Attributes:
        low: Lower ends; shape (r,).
        high: Upper ends; shape (r,).
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    def clipped(self) -> "Cell | None":
        """The same spectra in the smallest box that is easily found; None if there are none."""
        low, high = [max(value, 0.0) for value in self.low], list(self.high)
        for i in range(len(low) - 1, 0, -1):
            low[i - 1] = max(low[i - 1], low[i])
        for i in range(len(low)):
            others = sum(low) - low[i]
            high[i] = min(high[i], 1.0 - others, high[i - 1] if i else 1.0)
        # Rounding must not lose spectra on the border.
        if any(a > b + _MARGIN for a, b in zip(low, high, strict=True)):
            return None
        return Cell(tuple(low), tuple(max(a, b) for a, b in zip(low, high, strict=True)))

    def split(self) -> "list[Cell]":
        """Halves in every direction, those without spectra left out."""
        boxes: list[tuple[tuple[float, ...], tuple[float, ...]]] = [((), ())]
        for a, b in zip(self.low, self.high, strict=True):
            middle = 0.5 * (a + b)
            ends = [(a, middle), (middle, b)] if b > a else [(a, b)]
            boxes = [((*low, x), (*high, y)) for low, high in boxes for x, y in ends]
        cells = (Cell(low, high).clipped() for low, high in boxes)
        return [cell for cell in cells if cell is not None]

    @property
    def rest(self) -> tuple[float, ...]:
        """Upper bounds on b_1, …, b_r; shape (r,)."""
        return tuple(
            max(1.0 - sum(self.low[: i + 1]), 0.0) * (1.0 + _MARGIN) + _MARGIN
            for i in range(len(self.low))
        )

    @property
    def next_eigenvalues(self) -> tuple[float, ...]:
        """Upper bounds on λ_2, …, λ_r, and on c = min(λ_r, b_r); shape (r,)."""
        bounds = (*self.high[1:], min(self.high[-1], self.rest[-1]))
        return tuple(max(bound, _SMALLEST_REST) for bound in bounds)


def largest_left(cell: Cell, i: int, inner: Array, xi: Array) -> Array:
    """Upper bound on μ_{i−1} = μ_i + p_i(λ_i − μ_i), p_i = A/(λ_i²ξ + A), A = λ_{i+1}b_i.

    Args:
        cell: Where the spectrum is.
        i: From 1 to r.
        inner: Upper bounds on μ_i, at most about λ_{i+1}.
        xi: ξ_i; broadcast against inner.

    Source:
        docs/small_head.md, Lemma 5: increasing in μ_i and A; in λ_i it rises up to
        μ_i + √(μ_i² + A/ξ), then falls.
    """
    a = cell.next_eigenvalues[i - 1] * cell.rest[i - 1]
    with np.errstate(divide="ignore", over="ignore"):
        peak = inner + np.sqrt(inner * inner + a / xi)
    eigenvalue = np.clip(peak, cell.low[i - 1], cell.high[i - 1])
    gain = np.maximum(eigenvalue - inner, 0.0) * a / (eigenvalue**2 * xi + a)
    bound: Array = (inner + gain) * (1.0 + _MARGIN)
    return bound


def least_caught(cell: Cell, i: int, xi: Array) -> Array:
    """Lower bound on what column i takes off the trace.

    That is the least mean of λ_i and y over y ≤ λ_{i+1}, with weights λ_i²ξ and y·b_i.

    Args:
        cell: Where the spectrum is.
        i: From 1 to r.
        xi: ξ_i.

    Source:
        docs/small_head.md, Lemma 5: it rises in λ_i and falls in b_i; in y it falls, then rises.
    """
    eigenvalue, b = cell.low[i - 1], cell.rest[i - 1]
    largest = min(cell.next_eigenvalues[i - 1], eigenvalue)
    if eigenvalue <= 0.0:
        return np.zeros_like(xi)
    weight = eigenvalue**2 * xi
    with np.errstate(invalid="ignore", divide="ignore"):
        best = eigenvalue * weight / (weight + np.sqrt(weight * weight + b * weight * eigenvalue))
        y = np.minimum(np.where(weight > 0.0, best, 0.0), largest)
        mean = (eigenvalue * weight + y * y * b) / (weight + y * b)
    bound: Array = np.where(weight > 0.0, mean, 0.0) * (1.0 - _MARGIN)
    return bound


def simplex_cells(head_rank: int, parts: int) -> list[Cell]:
    """A first partition: boxes of side 1/parts, those without spectra left out."""
    ends = np.linspace(0.0, 1.0, parts + 1).tolist()
    sides: Sequence[tuple[float, float]] = list(itertools.pairwise(ends))
    boxes: list[tuple[tuple[float, ...], tuple[float, ...]]] = [((), ())]
    for _ in range(head_rank):
        boxes = [((*low, a), (*high, b)) for low, high in boxes for a, b in sides]
    cells = (Cell(low, high).clipped() for low, high in boxes)
    return [cell for cell in cells if cell is not None]
