"""Hutchinson's estimator, by random projection, and what all projections have in common."""

from dataclasses import dataclass

import torch

from dprc.accounting.scale import ScaleLaw, scale_law
from dprc.estimators.base import Accumulation, Estimator, Use, converted, squared_sum
from dprc.precision import work_dtype
from dprc.sketch import BLOCK_ROWS, SketchSource


def projects_rows(rows: int, columns: int, sketch: str) -> bool:
    """Choose the projected side: a function of the parameter alone, so the same for all its uses.

    A shared sketch takes the larger side, which leaves the smaller product for each sample. A
    sketch for each sample takes the smaller side, which needs the fewest random numbers.
    """
    return (rows >= columns) == (sketch == "shared")


class _Projection(Accumulation):
    """Σ over uses of (left P)ᵀ right, or of leftᵀ (right P): a linear sketch of the gradient."""

    def __init__(
        self, rows: int, columns: int, batch: int, num_probes: int, source: SketchSource
    ) -> None:
        super().__init__(rows, columns, batch)
        self._num_probes, self._source = num_probes, source
        self._on_rows = projects_rows(rows, columns, source.kind)
        self._sketched: torch.Tensor | None = None  # (B, k, columns) or (B, k, rows)

    def _add(self, use: Use) -> None:
        left, right = use
        near, far, side = (left, right, self.rows) if self._on_rows else (right, left, self.columns)
        dtype = work_dtype(right.dtype)
        thin = right.new_zeros(self.batch, right.shape[1], self._num_probes, dtype=dtype)
        self._project_(thin, near, side)
        if self._sketched is None:
            width = self.columns if self._on_rows else self.rows
            self._sketched = thin.new_zeros(self.batch, self._num_probes, width)
        for tokens, part in converted(far, dtype):
            weights = thin[:, tokens].transpose(1, 2)
            if part.is_floating_point():
                self._sketched.baddbmm_(weights, part)
            else:
                index = part.long().unsqueeze(1).expand(-1, self._num_probes, -1)
                self._sketched.scatter_add_(2, index, weights)
            del part

    def _project_(
        self, thin: torch.Tensor, factor: torch.Tensor, side: int
    ) -> None:  # (B, T, k), (B, T, side) or ids (B, T)
        # The blocks of the sketch outside, those of tokens inside: each number is drawn once.
        for block, probes in self._source.blocks(
            side, self._num_probes, batch=self.batch, device=thin.device, dtype=thin.dtype
        ):
            if factor.is_floating_point():
                each = probes.expand(self.batch, -1, -1)
                for tokens, part in converted(factor[..., block], thin.dtype):
                    thin[:, tokens].baddbmm_(part, each)  # in place: no second (B, T, k)
                    del part
                del each
            else:
                inside = (factor >= block.start) & (factor < block.stop)
                sample, token = inside.nonzero(as_tuple=True)
                row = factor[sample, token].long() - block.start
                owner = sample if probes.shape[0] > 1 else torch.zeros_like(sample)
                thin[sample, token] = probes[owner, row]
            del probes  # before the next block is made

    def _finish(self) -> torch.Tensor:
        if self._sketched is None:
            return torch.zeros(self.batch)
        return squared_sum(self._sketched)


def needs_source(estimator: Estimator, source: SketchSource | None) -> SketchSource:
    """Return the source, which a randomized estimator cannot do without."""
    if source is None:
        raise ValueError(f"source: {estimator.name} is random and needs a SketchSource")
    return source


@dataclass(frozen=True)
class Hutchinson(Estimator):
    """Project one side of the gradient on random probes: two thin products, linear in T.

    Guarantee: unbiased; the ratio to the truth lies below χ²_k/k in convex order.

    Source: Ullah et al. (arXiv 2605.24879), Hutchinson variant.
    """

    num_probes: int = 32
    sketch: str = "per_sample"
    name = "hutchinson"
    randomized = True

    def begin(
        self, rows: int, columns: int, *, batch: int, source: SketchSource | None = None
    ) -> Accumulation:
        """Start the norm of one parameter; see :meth:`Estimator.begin`."""
        return _Projection(rows, columns, batch, self.num_probes, needs_source(self, source))

    def flops(self, batch: int, tokens: int, in_features: int, out_features: int) -> int:
        """Count 2BTk(d+p)."""
        return 2 * batch * tokens * self.num_probes * (in_features + out_features)

    def workspace_elements(
        self, batch: int, tokens: int, in_features: int, out_features: int
    ) -> int:
        """Count the thin factor, the sketched gradient and one block of the sketch."""
        on_rows = projects_rows(out_features, in_features, self.sketch)
        side, other = (out_features, in_features) if on_rows else (in_features, out_features)
        copies = 1 if self.sketch == "shared" else batch
        block = copies * min(side, BLOCK_ROWS)
        return self.num_probes * (batch * tokens + max(batch * other, block))

    def scale_law(self) -> ScaleLaw:
        """Return χ²_k/k."""
        return scale_law(self.name, num_probes=self.num_probes)
