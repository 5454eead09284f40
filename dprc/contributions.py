"""Contributions: what one use of a parameter in one micro-batch knows of its gradient.

From a contribution the norm pass takes each sample's norm and the total pass the sum over samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from dprc.estimators.base import CONVERTED_TOKENS, Use
from dprc.precision import work_dtype


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return rows and columns of a parameter; a convolution's patch is one row of columns."""
    return shape[0], shape[1:].numel()


class Contribution(Protocol):
    """What one use of a parameter in one micro-batch knows of its gradient."""

    @property
    def batch(self) -> int:
        """Number of samples, as the use saw it."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Floating types of the factors."""

    def masked(self, excluded: torch.Tensor) -> "Contribution":  # excluded (B,) bool
        """Return the contribution with the excluded samples exactly zero, even if not finite."""

    def weighted(self, factors: torch.Tensor) -> "Contribution":  # factors (B,)
        """Return the contribution with each sample's gradient multiplied by its factor."""

    def add_total(self, total: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """Return ``total`` plus the gradient summed over samples, in place where there is a total.

        Args:
            total: Of the uses so far; None before the first.
            like: The parameter, whose shape the total has.
        """


def zero_rows(tensor: torch.Tensor, excluded: torch.Tensor) -> torch.Tensor:
    """Set the rows (first axis) of excluded samples to zero, even if not finite."""
    shape = (-1,) + (1,) * (tensor.dim() - 1)
    return tensor.masked_fill(excluded.to(tensor.device).view(shape), 0)


def scale_rows(tensor: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiply each row (first axis) by its factor, in the dtype of the factors."""
    shape = (-1,) + (1,) * (tensor.dim() - 1)
    return tensor.to(factors.dtype) * factors.to(tensor.device).view(shape)


@dataclass(frozen=True)
class MatrixUse:
    """A use of a matrix: the gradient is leftᵀ right, transposed or not as the weight is stored.

    Args:
        use: The factors.
        factors: (B,) each sample's gradient is multiplied by its factor; None for 1.
    """

    use: Use
    factors: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        """Number of samples, as the use saw it."""
        return self.use.right.shape[0]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Floating types of the factors."""
        return tuple(factor.dtype for factor in self.use if factor.is_floating_point())

    def masked(self, excluded: torch.Tensor) -> "MatrixUse":
        """Return the use with the excluded samples exactly zero."""
        left = self.use.left if self.use.by_ids else zero_rows(self.use.left, excluded)
        return MatrixUse(Use(left, zero_rows(self.use.right, excluded)), self.factors)

    def weighted(self, factors: torch.Tensor) -> "MatrixUse":
        """Return the use with each sample's gradient multiplied by its factor."""
        # Multiplied only where the total is formed: a scaled copy in full precision would add to
        # the peak of book-keeping.
        return MatrixUse(self.use, factors if self.factors is None else self.factors * factors)

    def add_total(self, total: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """Add leftᵀ right, summed over samples and tokens."""
        dtype = work_dtype(like.dtype)
        if self.use.by_ids:
            table = torch.zeros_like(like, dtype=dtype) if total is None else total
            for ids, right in self._blocks(dtype):
                table.index_add_(0, ids.long(), right)
            return table
        mine: torch.Tensor | None = None
        for left, right in self._blocks(dtype):
            if mine is None:
                mine = torch.mm(left.t(), right)
            else:
                mine.addmm_(left.t(), right)
        if mine is None:
            return torch.zeros_like(like, dtype=dtype) if total is None else total
        # Added as autograd adds it, not within the product, which rounds in another order.
        return mine.view(like.shape) if total is None else total.add_(mine.view(like.shape))

    def _blocks(
        self, dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:  # (t, rows) or ids (t,), (t, columns)
        """Yield the weighted factors of all samples' tokens, low precision a block at a time."""
        left, right = (factor.flatten(0, 1) for factor in self.use)
        weights = None
        if self.factors is not None:
            each = self.factors.to(right.device, dtype)
            weights = each.repeat_interleave(self.use.right.shape[1]).unsqueeze(1)
        low = any(known != dtype for known in self.dtypes)
        tokens = right.shape[0]
        step = CONVERTED_TOKENS if low else max(tokens, 1)
        for start in range(0, tokens, step):
            rows = slice(start, start + step)
            part = right[rows].to(dtype)
            other = left[rows] if self.use.by_ids else left[rows].to(dtype)
            if weights is None:
                yield other, part
            elif self.use.by_ids or part.shape[-1] <= other.shape[-1]:
                yield other, part * weights[rows]
            else:
                yield other * weights[rows], part


@dataclass(frozen=True)
class VectorUse:
    """A use of a bias or a scale: the gradient is the sum of ``grads`` over tokens."""

    grads: torch.Tensor  # (B, T, *parameter.shape)

    @property
    def batch(self) -> int:
        """Number of samples, as the use saw it."""
        return self.grads.shape[0]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Floating types of the factors."""
        return (self.grads.dtype,)

    def masked(self, excluded: torch.Tensor) -> "VectorUse":
        """Return the use with the excluded samples exactly zero."""
        return VectorUse(zero_rows(self.grads, excluded))

    def weighted(self, factors: torch.Tensor) -> "VectorUse":
        """Return the use with each sample's gradient multiplied by its factor."""
        # Summed over tokens first, so that a kept bias costs (B, p) and not (B, T, p).
        return VectorUse(scale_rows(self.per_sample().unsqueeze(1), factors))

    def per_sample(self) -> torch.Tensor:  # (B, *parameter.shape)
        """Return each sample's gradient, in the working dtype."""
        return self.grads.to(work_dtype(self.grads.dtype)).sum(1)

    def add_total(self, total: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """Add the sum over samples and tokens."""
        summed = self.grads.to(work_dtype(like.dtype)).sum((0, 1)).view(like.shape)
        return summed if total is None else total.add_(summed)


@dataclass(frozen=True)
class SampleUse:
    """A use whose gradient was taken for one sample alone.

    Args:
        grad: (*parameter.shape).
        sample: Which sample it is of.
        batch: Number of samples.
    """

    grad: torch.Tensor
    sample: int
    batch: int

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Floating types of the factors."""
        return (self.grad.dtype,)

    def masked(self, excluded: torch.Tensor) -> "SampleUse":
        """Return the use, exactly zero if the sample is excluded."""
        if not bool(excluded[self.sample]):
            return self
        return SampleUse(torch.zeros_like(self.grad), self.sample, self.batch)

    def weighted(self, factors: torch.Tensor) -> "SampleUse":
        """Return the use with its gradient multiplied by the sample's factor."""
        weighted = self.grad.to(factors.dtype) * factors[self.sample]
        return SampleUse(weighted, self.sample, self.batch)

    def add_total(self, total: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """Add the gradient."""
        grad = self.grad.to(work_dtype(like.dtype))
        return grad.clone() if total is None else total.add_(grad)
