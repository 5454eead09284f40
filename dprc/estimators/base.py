"""What an estimator is, and the running sum it makes of a parameter's uses."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch

from dprc.accounting.scale import ScaleLaw
from dprc.noise import Stream
from dprc.precision import full_precision, work_dtype
from dprc.sketch import SketchSource

# Tokens of a low-precision input converted to float32 at once.
CONVERTED_TOKENS = 2048


class Use(NamedTuple):
    """One use of a parameter: the gradient is leftᵀ right, summed over tokens."""

    left: torch.Tensor  # (B, T, rows) floating, or (B, T) ids of the rows
    right: torch.Tensor  # (B, T, columns)

    @property
    def by_ids(self) -> bool:
        """Whether left is given by the ids of its one-hot rows."""
        return not self.left.is_floating_point()


def token_blocks(use: Use) -> Iterator[Use]:
    """Yield the use in the working dtype, low-precision inputs a block of tokens at a time.

    Drop a block before the next is asked for, or two of them live at once.
    """
    dtype = work_dtype(use.right.dtype)
    low = use.right.dtype != dtype or (not use.by_ids and use.left.dtype != dtype)
    tokens = use.right.shape[1]
    for start in range(0, tokens, CONVERTED_TOKENS if low else max(tokens, 1)):
        part = slice(start, start + CONVERTED_TOKENS) if low else slice(None)
        left, right = use.left[:, part], use.right[:, part].to(dtype)
        block = Use(left if use.by_ids else left.to(dtype), right)
        del left, right
        yield block
        del block


def converted(factor: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (tokens, factor of those) in a dtype: a block of tokens at a time where it differs.

    Drop a block before the next is asked for, or two of them live at once.
    """
    if factor.dtype == dtype or not factor.is_floating_point():
        yield slice(None), factor
        return
    for start in range(0, factor.shape[1], CONVERTED_TOKENS):
        tokens = slice(start, start + CONVERTED_TOKENS)
        yield tokens, factor[:, tokens].to(dtype)


def squared_sum(matrix: torch.Tensor) -> torch.Tensor:  # (B, …) -> (B,), overwrites matrix
    """Return the squared norm of each sample's part."""
    # sum() adds pairwise; vector_norm's running sum loses 1e-4 on large layers.
    return matrix.flatten(1).square_().sum(1)


class Accumulation(ABC):
    """The squared norm of one parameter in one micro-batch, from any number of uses."""

    def __init__(self, rows: int, columns: int, batch: int) -> None:
        self.rows, self.columns, self.batch = rows, columns, batch

    def add(self, activations_or_ids: torch.Tensor, output_grads: torch.Tensor) -> None:
        """Add a use by a linear layer or an embedding.

        Args:
            activations_or_ids: (B, T, columns) inputs of a linear layer, or (B, T) integer ids.
            output_grads: (B, T, rows) of a linear layer, or (B, T, columns) of an embedding.

        Raises:
            ValueError: The shapes do not fit the parameter.
        """
        if activations_or_ids.is_floating_point():
            self.add_use(Use(output_grads, activations_or_ids))
        else:
            self.add_use(Use(activations_or_ids, output_grads))

    def add_use(self, use: Use) -> None:
        """Add a use given by its factors.

        Raises:
            ValueError: The shapes do not fit the parameter.
        """
        tokens = use.right.shape[1] if use.right.dim() == 3 else None
        left_shape = (self.batch, tokens) if use.by_ids else (self.batch, tokens, self.rows)
        if use.right.shape != (self.batch, tokens, self.columns) or use.left.shape != left_shape:
            raise ValueError(
                f"factors of shape {tuple(use.left.shape)} and {tuple(use.right.shape)} do not fit "
                f"a ({self.rows}, {self.columns}) parameter and {self.batch} samples"
            )
        with full_precision(use.right.device), torch.no_grad():
            self._add(use)

    def finish(self) -> torch.Tensor:  # (B,)
        """Return the squared norms, float32 (float64 for float64 inputs)."""
        return self._finish()

    @abstractmethod
    def _add(self, use: Use) -> None: ...

    @abstractmethod
    def _finish(self) -> torch.Tensor: ...


class Estimator(ABC):
    """An estimator of squared per-sample gradient norms.

    Guarantee: ``scale_law()`` names the law that dominates the estimate divided by the truth, in
    convex order, for every gradient. Privacy accounting uses nothing else of an estimator.
    """

    name: ClassVar[str]
    randomized: ClassVar[bool] = False

    def __repr__(self) -> str:
        """Name the estimator and its options: a saved run is compared by this text."""
        options = (f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({', '.join(options)})"

    @abstractmethod
    def begin(
        self, rows: int, columns: int, *, batch: int, source: SketchSource | None = None
    ) -> Accumulation:
        """Start the norm of one parameter in one micro-batch.

        Args:
            rows: First dimension of the parameter (out_features of a linear layer).
            columns: Second dimension (in_features).
            batch: Number of samples, B.
            source: Where the sketch comes from; only randomized estimators use it.

        Raises:
            ValueError: A randomized estimator got no source.
        """

    def of_several_uses(self) -> "Estimator":
        """Return what takes the norm of a parameter whose uses come one by one: this, if it can."""
        return self

    @abstractmethod
    def flops(self, batch: int, tokens: int, in_features: int, out_features: int) -> int:
        """Count the operations for one use by a linear layer; a multiply-add counts 2."""

    @abstractmethod
    def workspace_elements(
        self, batch: int, tokens: int, in_features: int, out_features: int
    ) -> int:
        """Count the float32 numbers that live at the peak beyond activations and gradients."""

    @abstractmethod
    def scale_law(self) -> ScaleLaw:
        """Return the law of the ratio of estimate and truth."""

    def workspace_bytes(
        self,
        batch: int,
        tokens: int,
        in_features: int,
        out_features: int,
        dtype: torch.dtype = torch.float32,
    ) -> int:
        """Return the bytes beyond activations and gradients for one use by a linear layer.

        Args:
            batch: Number of samples.
            tokens: Tokens of each.
            in_features: Input width d.
            out_features: Output width p.
            dtype: Of the inputs; low precision adds the float32 copy of one block of tokens.
        """
        dtype_bytes = work_dtype(dtype).itemsize
        elements = self.workspace_elements(batch, tokens, in_features, out_features)
        if dtype.itemsize < dtype_bytes:
            elements += batch * min(tokens, CONVERTED_TOKENS) * (in_features + out_features)
        return dtype_bytes * elements

    def squared_norm(
        self,
        activations: torch.Tensor,
        output_grads: torch.Tensor,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Return the squared norms of AᵀG, one for each sample.

        Args:
            activations: (B, T, d).
            output_grads: (B, T, p).
            generator: A CPU generator that keys the sketch; randomized estimators need one.

        Returns:
            (B,), float32, or float64 for float64 inputs.

        Raises:
            ValueError: Shapes do not fit, or a randomized estimator got no generator.
        """
        source = None
        if self.randomized:
            if generator is None:
                raise ValueError(f"generator: {self.name} is random and needs a torch.Generator")
            key = torch.randint(2**62, (2,), generator=generator).tolist()
            source = SketchSource(Stream((key[0], key[1])), getattr(self, "sketch", "per_sample"))
        accumulation = self.begin(
            output_grads.shape[-1],
            activations.shape[-1],
            batch=activations.shape[0],
            source=source,
        )
        accumulation.add(activations, output_grads)
        return accumulation.finish()
