"""Estimators that give the norm itself: the gradient whole, by Gram matrices, or by tiles."""

from abc import abstractmethod
from dataclasses import dataclass

import torch

from dprc.accounting.scale import ScaleLaw, scale_law
from dprc.estimators.base import (
    CONVERTED_TOKENS,
    Accumulation,
    Estimator,
    Use,
    squared_sum,
    token_blocks,
)
from dprc.precision import full_precision, work_dtype
from dprc.sketch import SketchSource

# Rows of the gradient that `tiled` forms at once.
TILE_ROWS = 128


class _Dense(Accumulation):
    """The whole per-sample gradient, or its distinct rows while only ids were seen."""

    def __init__(self, rows: int, columns: int, batch: int) -> None:
        super().__init__(rows, columns, batch)
        self._gradient: torch.Tensor | None = None  # (B, rows, columns)
        self._by_ids: list[Use] = []

    def _add(self, use: Use) -> None:
        if use.by_ids:
            # Kept, since most embeddings have no dense use: rows are few, the vocabulary is large.
            self._by_ids.append(use)
            return
        for part in token_blocks(use):
            if self._gradient is None:
                self._gradient = part.left.transpose(1, 2) @ part.right
            else:
                self._gradient.baddbmm_(part.left.transpose(1, 2), part.right)
            del part

    def _finish(self) -> torch.Tensor:
        if self._gradient is None:
            return _norm_of_rows(self._by_ids, self.rows, self.columns, self.batch)
        flat = self._gradient.view(-1, self.columns)
        for use in self._by_ids:
            _scatter_rows_(flat, use, self.rows)
        return squared_sum(self._gradient)


def _flat_ids(use: Use, rows: int) -> torch.Tensor:  # (B*T,) row of a (B*rows, …) table
    batch = use.left.shape[0]
    offsets = torch.arange(batch, device=use.left.device).unsqueeze(1) * rows
    return (use.left.long() + offsets).flatten()


def _scatter_rows_(flat: torch.Tensor, use: Use, rows: int) -> None:  # flat (B*rows, columns)
    flat.index_add_(0, _flat_ids(use, rows), use.right.flatten(0, 1).to(flat.dtype))


def _norm_of_rows(uses: list[Use], rows: int, columns: int, batch: int) -> torch.Tensor:
    """Sum the gradients of equal ids of a sample, then square: (B,)."""
    if not uses:
        return torch.zeros(batch)
    dtype, device = work_dtype(uses[0].right.dtype), uses[0].right.device
    keys = torch.cat([_flat_ids(use, rows) for use in uses])
    grads = torch.cat([use.right.flatten(0, 1).to(dtype) for use in uses])
    distinct, position = torch.unique(keys, return_inverse=True)
    summed = torch.zeros(distinct.numel(), columns, dtype=dtype, device=device)
    summed.index_add_(0, position, grads)
    norms = torch.zeros(batch, dtype=dtype, device=device)
    return norms.index_add_(0, distinct // rows, squared_sum(summed))


class Exact(Estimator):
    """Fast gradient clipping: form each sample's gradient and take its norm."""

    name = "exact"

    def begin(
        self, rows: int, columns: int, *, batch: int, source: SketchSource | None = None
    ) -> Accumulation:
        """Start the norm of one parameter; see :meth:`Estimator.begin`."""
        return _Dense(rows, columns, batch)

    def flops(self, batch: int, tokens: int, in_features: int, out_features: int) -> int:
        """Count 2BTdp."""
        return 2 * batch * tokens * in_features * out_features

    def workspace_elements(
        self, batch: int, tokens: int, in_features: int, out_features: int
    ) -> int:
        """Count Bdp: the gradients, squared in place."""
        return batch * in_features * out_features

    def scale_law(self) -> ScaleLaw:
        """Return the point mass at 1."""
        return scale_law(self.name)


class _KeptUses(Accumulation):
    """Base of the norms that need all uses at once."""

    def __init__(self, rows: int, columns: int, batch: int) -> None:
        super().__init__(rows, columns, batch)
        self._uses: list[Use] = []

    def _add(self, use: Use) -> None:
        self._uses.append(use)

    def _finish(self) -> torch.Tensor:
        if not self._uses:
            return torch.zeros(self.batch)
        right = self._uses[0].right
        total = torch.zeros(self.batch, dtype=work_dtype(right.dtype), device=right.device)
        with full_precision(right.device), torch.no_grad():
            self._sum_into(total)
        return total

    @abstractmethod
    def _sum_into(self, total: torch.Tensor) -> None: ...


class _Gram(_KeptUses):
    def _sum_into(self, total: torch.Tensor) -> None:
        # ‖Σ_u L_uᵀR_u‖² = Σ_{u,v} ⟨L_u L_vᵀ, R_u R_vᵀ⟩; the pairs (u,v) and (v,u) are equal.
        for index, first in enumerate(self._uses):
            for second in self._uses[: index + 1]:
                product = (_gram(first.left, second.left, total.dtype)).mul_(
                    _gram(first.right, second.right, total.dtype)
                )
                total += product.flatten(1).sum(1) * (1 if first is second else 2)


def _gram(
    first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:  # (B, T, T') of inner products; ids stand for one-hot rows
    if first.is_floating_point() and second.is_floating_point():
        return _inner_products(first, second, dtype)
    if first.is_floating_point():
        # (B,T,rows) against ids (B,T'): pick the columns.
        index = second.long().unsqueeze(1).expand(-1, first.shape[1], -1)
        return first.gather(2, index).to(dtype)
    if second.is_floating_point():
        return _gram(second, first, dtype).transpose(1, 2).contiguous()
    return (first.unsqueeze(2) == second.unsqueeze(1)).to(dtype)


def _inner_products(
    first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:  # (B, T, n), (B, T', n) -> (B, T, T')
    """Return first·secondᵀ; in low precision some features of all tokens at a time.

    As many as make a copy no larger than that of one block of tokens.
    """
    if first.dtype == second.dtype == dtype:
        return first @ second.transpose(1, 2)
    total = first.new_zeros(first.shape[0], first.shape[1], second.shape[1], dtype=dtype)
    width = first.shape[2]
    step = max(
        1, width * CONVERTED_TOKENS // max(first.shape[1], second.shape[1], CONVERTED_TOKENS)
    )
    for start in range(0, width, step):
        features = slice(start, start + step)
        left = first[..., features].to(dtype)
        right = left if second is first else second[..., features].to(dtype)
        total.baddbmm_(left, right.transpose(1, 2))
        del left, right  # before the next ones are made
    return total


class Ghost(Estimator):
    """Ghost clipping: the norm from two T×T Gram matrices."""

    name = "ghost"

    def begin(
        self, rows: int, columns: int, *, batch: int, source: SketchSource | None = None
    ) -> Accumulation:
        """Start the norm of one parameter; see :meth:`Estimator.begin`."""
        return _Gram(rows, columns, batch)

    def flops(self, batch: int, tokens: int, in_features: int, out_features: int) -> int:
        """Count 2BT²(d+p)."""
        return 2 * batch * tokens**2 * (in_features + out_features)

    def workspace_elements(
        self, batch: int, tokens: int, in_features: int, out_features: int
    ) -> int:
        """Count 2BT²: two Gram matrices."""
        return 2 * batch * tokens**2

    def scale_law(self) -> ScaleLaw:
        """Return the point mass at 1."""
        return scale_law(self.name)


class _Tiles(_KeptUses):
    def __init__(self, rows: int, columns: int, batch: int, tile_rows: int) -> None:
        super().__init__(rows, columns, batch)
        self._tile_rows = tile_rows
        self._whole: _Dense | None = None

    def _add(self, use: Use) -> None:
        # One use is held by its backward pass anyway. More of them, such as the chunks of a head,
        # are kept only as long as the gradient, to which they add up, is larger. Uses by ids alone
        # never make one.
        uses = (*self._uses, use)
        if self._whole is None and len(uses) > 1 and not all(each.by_ids for each in uses):
            held = sum(factor.nbytes for each in uses for factor in each)
            gradient = self.batch * self.rows * self.columns * work_dtype(use.right.dtype).itemsize
            if held > gradient:
                self._whole = _Dense(self.rows, self.columns, self.batch)
                while self._uses:
                    self._whole.add_use(self._uses.pop())
        if self._whole is None:
            self._uses.append(use)
        else:
            self._whole.add_use(use)

    def _finish(self) -> torch.Tensor:
        return super()._finish() if self._whole is None else self._whole.finish()

    def _sum_into(self, total: torch.Tensor) -> None:
        for start in range(0, self.rows, self._tile_rows):
            stop = min(start + self._tile_rows, self.rows)
            tile = torch.zeros(
                self.batch, stop - start, self.columns, dtype=total.dtype, device=total.device
            )
            for use in self._uses:
                if use.by_ids:
                    inside = (use.left >= start) & (use.left < stop)
                    sample, token = inside.nonzero(as_tuple=True)
                    row = use.left[sample, token].long() - start
                    tile.index_put_(
                        (sample, row), use.right[sample, token].to(tile.dtype), accumulate=True
                    )
                    continue
                for part in token_blocks(Use(use.left[..., start:stop], use.right)):
                    tile.baddbmm_(part.left.transpose(1, 2), part.right)
                    del part
            total += squared_sum(tile)
            del tile  # before the next one is made


@dataclass(frozen=True)
class Tiled(Estimator):
    """Exact norm, formed a block of rows at a time: exact's operations, little memory.

    Several uses of a parameter, not all by ids, are kept until the last, unless they take more than
    its gradient: then that is formed, as by ``exact``.
    """

    tile_rows: int = TILE_ROWS
    name = "tiled"

    def begin(
        self, rows: int, columns: int, *, batch: int, source: SketchSource | None = None
    ) -> Accumulation:
        """Start the norm of one parameter; see :meth:`Estimator.begin`."""
        return _Tiles(rows, columns, batch, self.tile_rows)

    def flops(self, batch: int, tokens: int, in_features: int, out_features: int) -> int:
        """Count 2BTdp."""
        return 2 * batch * tokens * in_features * out_features

    def workspace_elements(
        self, batch: int, tokens: int, in_features: int, out_features: int
    ) -> int:
        """Count B·d·tile: one tile, squared in place."""
        return batch * in_features * min(self.tile_rows, out_features)

    def scale_law(self) -> ScaleLaw:
        """Return the point mass at 1."""
        return scale_law(self.name)
