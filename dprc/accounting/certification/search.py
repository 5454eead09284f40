"""Branch and bound over the simplex: an upper bound on the put function of every spectrum."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dprc.accounting.arrays import Array
from dprc.accounting.certification.cells import Cell, simplex_cells
from dprc.accounting.certification.inversion import Line
from dprc.accounting.certification.transforms import Side, tilted_bins, transforms

# Cells are split down to this width.
_SMALLEST_WIDTH = 2.0**-11

Mask = npt.NDArray[np.bool_]

# Where the put function is bounded: dense where it decides the noise.
STRIKES: Array = np.concatenate(
    [
        np.geomspace(0.03, 0.5, 13),
        [0.54, 0.58, 0.62, 0.64, 0.66, 0.68],
        np.arange(56, 104) / 80,
        [1.3, 1.325, 1.35, 1.375, 1.4, 1.45, 1.5, 1.55, 1.6, 1.65, 1.8, 2.0, 2.5],
    ]
)


@dataclass(frozen=True)
class Band:
    """Lines that share bins of ξ, and the strikes they serve.

    Attributes:
        tilt: The σ the bins suit.
        lines: Lines of integration.
        low: Smallest strike.
        high: Largest strike.
    """

    tilt: float
    lines: tuple[Line, ...]
    low: float
    high: float


def bands(num_probes: int) -> tuple[Band, ...]:
    """The lines that all strikes need; calls have a transform where |σ| < k/2.

    Nearer to k/2 the images at x + jL, which a sum for calls amplifies, would count.
    """
    near, far = -0.2 * num_probes, -0.3 * num_probes
    return (
        Band(12.0, (Line(6.0, 4.0, 130.0), Line(12.0, 3.0, 130.0)), 0.75, math.inf),
        Band(near, (Line(near, 4.0, 130.0), Line(far, 4.0, 300.0)), 1.1, math.inf),
        Band(40.0, (Line(24.0, 2.0, 130.0), Line(48.0, 1.2, 200.0)), 0.39, 0.9),
        Band(
            200.0,
            (
                Line(96.0, 0.7, 300.0),
                Line(192.0, 0.4, 400.0),
                Line(384.0, 0.22, 700.0),
                Line(768.0, 0.12, 1300.0),
                Line(1536.0, 0.07, 2600.0),
            ),
            0.0,
            0.5,
        ),
    )


@dataclass(frozen=True)
class Effort:
    """How finely to search.

    Attributes:
        tolerance: How far a cell's bound may be above that of the best point, relative to the put
            below strike 1 and to the call above, at strikes from 0.8 to 1.3.
        bins: Bins of each ξ in cells wider than 1/32, than 1/128, and in smaller ones.
        point_bins: Bins at the points that cells are compared with.
    """

    tolerance: float = 0.02
    bins: tuple[int, int, int] = (24, 48, 96)
    point_bins: int = 160

    def slack(self) -> Array:
        """The tolerance at each strike: what hardly moves the noise need not be known closely."""
        near = np.interp(STRIKES, [0.5, 0.65, 0.8, 1.3, 1.5], [25.0, 7.0, 1.0, 1.0, 25.0])
        slack: Array = self.tolerance * near
        return slack


@dataclass(frozen=True)
class Certificate:
    """What the search proved.

    Attributes:
        excess: Upper bounds on E(x − R*)₊ − (x − 1)₊ at STRIKES.
        attained: Lower bounds on its supremum, from points of the search.
        points: The points that attain them.
        cells: Cells evaluated.
    """

    excess: Array
    attained: Array
    points: tuple[tuple[float, ...], ...]
    cells: int


@dataclass(frozen=True)
class Progress:
    """How far the search is.

    Attributes:
        cells: Evaluated.
        open_cells: Still to be split.
        gap: Largest excess of an open cell over the best point, relative as in ``Effort``.
    """

    cells: int
    open_cells: int
    gap: float


def cell_puts(
    cell: Cell,
    num_probes: int,
    bins: int,
    wanted: Mask | None = None,
    side: Side = "upper",
) -> Array:
    """Upper bounds on E(x − R)₊ − (x − 1)₊ at STRIKES for a cell; infinite where not wanted.

    Args:
        cell: Where the spectrum is.
        num_probes: k.
        bins: Of each ξ; eight times as many where there is only one.
        wanted: Strikes to bound; None for all.
        side: ``"lower"``: an estimate from below at a cell of one point.
    """
    wanted = np.ones(STRIKES.size, dtype=bool) if wanted is None else wanted
    best = np.full(STRIKES.size, np.inf if side == "upper" else 0.0)
    for band in bands(num_probes):
        chosen = np.flatnonzero(wanted & (band.low <= STRIKES) & (band.high >= STRIKES))
        if chosen.size == 0:
            continue
        laws = tilted_bins(cell, num_probes, band.tilt, bins if len(cell.low) > 1 else 8 * bins)
        for line in band.lines:
            transform, cut = transforms(cell, num_probes, laws, line.points, side)
            lower, upper = line.puts(STRIKES[chosen], transform, cut)
            if side == "upper":
                best[chosen] = np.minimum(best[chosen], upper)
            else:
                best[chosen] = np.maximum(best[chosen], lower)
    return best


def best_points(
    head_rank: int, num_probes: int, effort: Effort
) -> tuple[Array, Array, list[tuple[float, ...]]]:
    """Puts at spectra where they are large: what cells are compared with.

    Returns:
        Upper bounds and lower bounds on the largest put at these points, and the points.
    """
    found: dict[tuple[float, ...], Array] = {}

    def look(points: Iterator[tuple[float, ...]]) -> None:
        for point in points:
            cell = Cell(point, point).clipped()
            if cell is not None and cell.low == point and point not in found:
                found[point] = cell_puts(cell, num_probes, effort.bins[0])

    def winners() -> list[tuple[float, ...]]:
        names, values = list(found), np.array(list(found.values()))
        return [names[i] for i in dict.fromkeys(np.argmax(values, axis=0).tolist())]

    shares = (1.0,) if head_rank == 1 else (0.03, 0.08, 0.15, 0.3, 0.6, 0.8, 1.0)
    grid = np.arange(1, 32) / 32
    look(
        (float(a), *(float(a) * share for _ in range(head_rank - 1)))
        for a in grid
        for share in shares
    )
    for step in (0.02, 0.01, 0.005):
        moves = [
            move for move in itertools.product((-step, 0.0, step), repeat=head_rank) if any(move)
        ]
        look(
            tuple(a + b for a, b in zip(point, move, strict=True))
            for point in winners()
            for move in moves
        )
    points = winners()
    cells = [Cell(point, point) for point in points]
    above = np.max([cell_puts(cell, num_probes, effort.point_bins) for cell in cells], axis=0)
    below = np.max(
        [cell_puts(cell, num_probes, effort.point_bins, side="lower") for cell in cells], axis=0
    )
    return above, below, points


def certify(
    head_rank: int,
    num_probes: int,
    effort: Effort | None = None,
    report_fn: Callable[[Progress], None] | None = None,
) -> Certificate:
    """Bound the put function of every spectrum from above.

    Args:
        head_rank: 1 or 2.
        num_probes: At least 4.
        effort: How finely to search.
        report_fn: Called after every cell that was split.

    Returns:
        What no spectrum exceeds.

    Raises:
        ValueError: An argument is out of range.

    Guarantee:
        Every spectrum is in a cell whose bound was kept, at each strike; the bound of a cell holds
        for all its spectra, floating-point error included (docs/small_head.md, section 4).
    """
    if head_rank not in (1, 2):
        raise ValueError(f"head_rank must be 1 or 2 for the search, got {head_rank}")
    if num_probes < 4:
        raise ValueError(f"num_probes must be at least 4, got {num_probes}")
    effort = effort or Effort()
    above, below, points = best_points(head_rank, num_probes, effort)
    kept = np.zeros(STRIKES.size)
    queue: list[tuple[float, int, Cell, Mask]] = []
    order, cells = itertools.count(), 0

    def visit(cell: Cell, wanted: Mask) -> None:
        """Bound a cell; keep the strikes that are done, queue it for the others."""
        width = max(b - a for a, b in zip(cell.low, cell.high, strict=True))
        bins = effort.bins[(width < 1 / 32) + (width < 1 / 128)]
        bound = cell_puts(cell, num_probes, bins, wanted)
        # A cell that is nearly a point is not split further: its bound is a bound, near or not.
        done = wanted & ((bound <= above * (1.0 + effort.slack())) | (width < _SMALLEST_WIDTH))
        kept[done] = np.maximum(kept[done], bound[done])
        left = wanted & ~done
        if left.any():
            excess = np.where(left, bound / above - 1.0, 0.0) / effort.slack()
            heapq.heappush(queue, (-float(excess.max()), next(order), cell, left))

    start = simplex_cells(head_rank, 64 if head_rank == 1 else 16)
    for cell in start:
        visit(cell, np.ones(STRIKES.size, dtype=bool))
    cells = len(start)
    while queue:
        excess, _, cell, wanted = heapq.heappop(queue)
        if max(b - a for a, b in zip(cell.low, cell.high, strict=True)) < 1 / 64:
            point = Cell(cell.low, cell.low)
            higher = cell_puts(point, num_probes, effort.bins[2], wanted)
            lower = cell_puts(point, num_probes, effort.bins[2], wanted, side="lower")
            above[wanted] = np.maximum(above[wanted], higher[wanted])
            below[wanted] = np.maximum(below[wanted], lower[wanted])
        for part in cell.split():
            visit(part, wanted)
            cells += 1
        if report_fn is not None:
            report_fn(Progress(cells, len(queue), -excess * effort.tolerance))
    if not np.all(np.isfinite(kept) & (kept > 0.0)):
        raise ArithmeticError("a bound is not a number: the certificate would be void")
    return Certificate(np.maximum(kept, above), below, tuple(points), cells)
