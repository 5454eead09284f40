"""Hutch++: an exact head, and Hutchinson's estimate of what the head leaves."""

from dataclasses import dataclass

import torch

from dprc.accounting.scale import ScaleLaw, scale_law
from dprc.accounting.small_head import certified_pairs, matched_probes
from dprc.estimators.base import (
    CONVERTED_TOKENS,
    Accumulation,
    Estimator,
    Use,
    squared_sum,
    token_blocks,
)
from dprc.estimators.hutchinson import Hutchinson, needs_source, projects_rows
from dprc.estimators.products import NARROW_COLUMNS, collect_, project
from dprc.precision import work_dtype
from dprc.sketch import BLOCK_ROWS, SketchSource


class _HeadAndTail(Accumulation):
    """‖M Q‖² + ‖M (P − Q Qᵀ P)‖² with M = farᵀ near, in three passes over the factors.

    Near is the projected factor, (B, T, side); far the other, (B, T, width).
    """

    def __init__(
        self, rows: int, columns: int, batch: int, estimator: "HutchPlusPlus", source: SketchSource
    ) -> None:
        super().__init__(rows, columns, batch)
        self._source, self._num_probes = source, estimator.num_probes
        self._rank = min(estimator.head_rank or estimator.num_probes, rows, columns)
        self._on_rows = projects_rows(rows, columns, source.kind)
        self._norms: torch.Tensor | None = None

    def _add(self, use: Use) -> None:
        if self._norms is not None:
            raise ValueError(
                "hutchpp: a parameter with several uses has no single head; use hutchinson for it"
            )
        if use.by_ids:
            raise ValueError("hutchpp: an embedding has no dense factor; use exact for it")
        if use.right.shape[1] <= CONVERTED_TOKENS:  # one block: converted once for all passes
            use = next(token_blocks(use), use)
        rank, probes = self._rank, self._num_probes
        sketch = self._sketch(use)
        basis = self._basis(use, sketch[..., :rank])
        # The basis takes the place of S: head and tail are one product.
        sketch[..., :rank] = basis
        inner = basis.mT @ sketch[..., rank:]
        del basis
        both = self._apply(use, sketch)
        del sketch
        head, tail = both[:, :rank], both[:, rank:]
        tail.baddbmm_(inner.mT, head, alpha=-1)
        # Entries of the sketch have variance 1/(rank + probes); those of P should have 1/probes.
        self._norms = squared_sum(tail) * ((rank + probes) / probes) + squared_sum(head)

    def _sketch(self, use: Use) -> torch.Tensor:  # (B, side, rank + probes)
        """Draw S and P side by side; writable, for each sample its own."""
        side = self.rows if self._on_rows else self.columns
        count, dtype = self._rank + self._num_probes, work_dtype(use.right.dtype)
        blocks = self._source.blocks(
            side, count, batch=self.batch, device=use.right.device, dtype=dtype
        )
        if side <= BLOCK_ROWS and self._source.kind == "per_sample":
            return next(blocks)[1]
        sketch = use.right.new_empty(self.batch, side, count, dtype=dtype)
        for rows, block in blocks:
            sketch[:, rows] = block
            del block  # before the next one is made
        return sketch

    def _basis(self, use: Use, start: torch.Tensor) -> torch.Tensor:  # (B, side, rank), twice
        """Return an orthonormal basis of Mᵀ M S."""
        image = self._apply(use, start)
        powered = self._apply(use, image.mT, transposed=True)
        del image
        basis: torch.Tensor = torch.linalg.qr(powered.mT)[0]
        return basis

    def _apply(
        self, use: Use, columns: torch.Tensor, *, transposed: bool = False
    ) -> torch.Tensor:  # (B, side, c) -> (B, c, width)
        """Return (M·columns)ᵀ; with ``transposed`` (Mᵀ·columns)ᵀ, from (B, width, c)."""
        from_rows = self._on_rows != transposed
        into = self.columns if from_rows else self.rows
        total = columns.new_zeros(self.batch, columns.shape[2], into)
        for block in token_blocks(use):
            near, far = block if from_rows else reversed(block)
            collect_(total, project(near, columns), far)
            del block, near, far
        return total

    def _finish(self) -> torch.Tensor:
        return torch.zeros(self.batch) if self._norms is None else self._norms


@dataclass(frozen=True)
class HutchPlusPlus(Estimator):
    """Hutch++: the energy in a random subspace exactly, the rest by projection.

    With S and P independent Gaussian and Q an orthonormal basis of Mᵀ M S, the estimate is
    ‖M Q‖² + ‖M P − (M Q)(Qᵀ P)‖².

    Guarantee: unbiased given Q; the ratio to the truth lies below χ²_k/k in convex order, with k
    the number of *tail* probes. With a certified pair (head_rank, num_probes) it lies below that
    pair's law, close to 1 (docs/small_head.md): 2 and 26 cost the operations of 32 probes.

    Source: Ullah et al. (arXiv 2605.24879), Hutch++ variant; theirs has ``head_rank=num_probes``.
    """

    num_probes: int = 32
    sketch: str = "per_sample"
    head_rank: int | None = None
    name = "hutchpp"
    randomized = True

    def begin(
        self, rows: int, columns: int, *, batch: int, source: SketchSource | None = None
    ) -> Accumulation:
        """Start the norm of one parameter; see :meth:`Estimator.begin`."""
        return _HeadAndTail(rows, columns, batch, self, needs_source(self, source))

    def of_several_uses(self) -> Estimator:
        """Return Hutchinson's estimator with probes enough that this one's law governs the model.

        The sketches of uses add up, which heads do not: a head needs all uses at once, twice.
        """
        if self.head_rank is None or (self.head_rank, self.num_probes) not in certified_pairs():
            return Hutchinson(self.num_probes, self.sketch)
        return Hutchinson(matched_probes(self.head_rank, self.num_probes), self.sketch)

    def flops(self, batch: int, tokens: int, in_features: int, out_features: int) -> int:
        """Count 2BT(3r+k)(d+p) and the head's part of the tail; the QR is not counted.

        With r = k this is the paper's 8BTk(d+p) + 2Bk²(d+p).
        """
        rank = min(self.head_rank or self.num_probes, in_features, out_features)
        width = in_features + out_features
        return (
            2
            * batch
            * (tokens * (3 * rank + self.num_probes) * width + rank * self.num_probes * width)
        )

    def workspace_elements(
        self, batch: int, tokens: int, in_features: int, out_features: int
    ) -> int:
        """Count what lives at the largest of five moments, the sketch (S and P) at each.

        Made of several blocks, with one of them; in the two passes of the power step, with a thin
        factor and what goes in and comes out; at the QR, with what goes in and comes out; in the
        last pass, with a thin factor and the sketched gradient.
        """
        rank = min(self.head_rank or self.num_probes, in_features, out_features)
        count = rank + self.num_probes
        on_rows = projects_rows(out_features, in_features, self.sketch)
        side, width = (out_features, in_features) if on_rows else (in_features, out_features)
        copy = rank * side if rank <= NARROW_COLUMNS else 0
        copies = 1 if self.sketch == "shared" else batch
        whole = side <= BLOCK_ROWS and self.sketch == "per_sample"
        moments = (
            0 if whole else copies * min(side, BLOCK_ROWS) * count,
            batch * (copy + rank * (tokens + width)),
            batch * rank * (width + tokens + side),
            batch * rank * (2 * side + rank),
            batch * (count * (tokens + width) + rank * self.num_probes),
        )
        return batch * side * count + max(moments)

    def scale_law(self) -> ScaleLaw:
        """Return the certified law of head and tail, or χ²_k/k of the tail's probes alone."""
        return scale_law(self.name, num_probes=self.num_probes, head_rank=self.head_rank)
