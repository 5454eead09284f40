"""Estimators of the squared norm of one parameter's per-sample gradient.

The gradient of a weight W of shape (rows, columns) for one sample is a sum over its uses of
``leftᵀ right``, with factors left (T, rows) and right (T, columns). For a linear layer left is
the output gradient G and right the activation A; for an embedding left is a one-hot matrix, given
by its ids, and right the output gradient. The randomized estimators never form the product.

============  ===================================  ==================================
name          what                                 floating-point operations (FMA = 2)
============  ===================================  ==================================
exact         form the gradient, take its norm     2BTdp
ghost         inner product of two Gram matrices   2BT²(d+p)
tiled         exact, block of rows by block        2BTdp
hutchinson    project one side on k probes         2BTk(d+p)
hutchpp       exact head, projected tail           2BT(3r+k)(d+p) + 2Brk(d+p)
============  ===================================  ==================================

All arithmetic is float32 (float64 for float64 inputs), with autocast and TF32 off: a norm rounded
to bfloat16 would clip too little.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from dprc.accounting.scale import ScaleLaw, scale_law
from dprc.noise import Stream
from dprc.sketch import BLOCK_ROWS, SKETCHES, SketchSource

# Tokens of a low-precision input converted to float32 at once.
CONVERTED_TOKENS = 2048
# Rows of the gradient that `tiled` forms at once.
TILE_ROWS = 128


class Use(NamedTuple):
    """One use of a parameter: the gradient is leftᵀ right, summed over tokens."""

    left: torch.Tensor  # (B, T, rows) floating, or (B, T) ids of the rows
    right: torch.Tensor  # (B, T, columns)

    @property
    def by_ids(self) -> bool:
        """Whether left is given by the ids of its one-hot rows."""
        return not self.left.is_floating_point()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Switch autocast and rounded float32 products (TF32, bfloat16) off for the block."""
    castable = torch.amp.is_autocast_available(device.type)
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    with torch.autocast(device.type, enabled=False) if castable else nullcontext():
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that norms are computed in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _token_blocks(use: Use) -> Iterator[Use]:
    """Yield the use in the working dtype, low-precision inputs a block of tokens at a time."""
    dtype = work_dtype(use.right.dtype)
    low = use.right.dtype != dtype or (not use.by_ids and use.left.dtype != dtype)
    tokens = use.right.shape[1]
    for start in range(0, tokens, CONVERTED_TOKENS if low else max(tokens, 1)):
        part = slice(start, start + CONVERTED_TOKENS) if low else slice(None)
        left, right = use.left[:, part], use.right[:, part].to(dtype)
        yield Use(left if use.by_ids else left.to(dtype), right)


def _squared_sum(matrix: torch.Tensor) -> torch.Tensor:  # (B, …) -> (B,), overwrites matrix
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
    # Whether uses of a parameter may come one by one: the sum of sketches is the sketch of the sum.
    linear: ClassVar[bool] = True

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


_REGISTRY: dict[str, Callable[[int, str, int | None], Estimator]] = {}


def names() -> tuple[str, ...]:
    """Return the names that ``get`` knows."""
    return tuple(_REGISTRY)


def get(
    name: str, *, num_probes: int = 32, sketch: str = "per_sample", head_rank: int | None = None
) -> Estimator:
    """Make an estimator by name.

    Args:
        name: One of ``names()``.
        num_probes: Random probes k of a randomized estimator; of the tail for ``hutchpp``.
        sketch: ``"per_sample"`` or ``"shared"``, for a randomized estimator.
        head_rank: Rank of the exact head of ``hutchpp``; ``num_probes`` when None.

    Raises:
        ValueError: An unknown name or sketch, num_probes < 1, or head_rank for another estimator.
        TypeError: A count that is not an int.

    Example:
        >>> get("hutchinson", num_probes=16).scale_law().num_probes
        16
    """
    if name not in _REGISTRY:
        raise ValueError(f"estimator: must be one of {', '.join(names())}, got {name!r}")
    if sketch not in SKETCHES:
        raise ValueError(f"sketch: must be one of {', '.join(SKETCHES)}, got {sketch!r}")
    if head_rank is not None and name != "hutchpp":
        raise ValueError(f"head_rank: only hutchpp has a head, got {head_rank!r} for {name!r}")
    for label, count in (("num_probes", num_probes), ("head_rank", head_rank)):
        if count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{label}: must be an int, got {count!r}")
        if count < 1:
            raise ValueError(f"{label}: must be at least 1, got {count}")
    return _REGISTRY[name](num_probes, sketch, head_rank)


# --- deterministic estimators -------------------------------------------------------------------


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
        for part in _token_blocks(use):
            if self._gradient is None:
                self._gradient = part.left.transpose(1, 2) @ part.right
            else:
                self._gradient.baddbmm_(part.left.transpose(1, 2), part.right)

    def _finish(self) -> torch.Tensor:
        if self._gradient is None:
            return _norm_of_rows(self._by_ids, self.rows, self.columns, self.batch)
        flat = self._gradient.view(-1, self.columns)
        for use in self._by_ids:
            _scatter_rows_(flat, use, self.rows)
        return _squared_sum(self._gradient)


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
    return norms.index_add_(0, distinct // rows, _squared_sum(summed))


def _register(name: str, factory: Callable[[int, str, int | None], Estimator]) -> None:
    _REGISTRY[name] = factory


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
        return first.to(dtype) @ second.to(dtype).transpose(1, 2)
    if first.is_floating_point():
        # (B,T,rows) against ids (B,T'): pick the columns.
        index = second.long().unsqueeze(1).expand(-1, first.shape[1], -1)
        return first.to(dtype).gather(2, index)
    if second.is_floating_point():
        return _gram(second, first, dtype).transpose(1, 2).contiguous()
    return (first.unsqueeze(2) == second.unsqueeze(1)).to(dtype)


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
                for part in _token_blocks(Use(use.left[..., start:stop], use.right)):
                    tile.baddbmm_(part.left.transpose(1, 2), part.right)
            total += _squared_sum(tile)


@dataclass(frozen=True)
class Tiled(Estimator):
    """Exact norm, formed a block of rows at a time: exact's operations, little memory."""

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


# --- randomized estimators ----------------------------------------------------------------------


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
        for part in _token_blocks(use):
            self._add_block(part)

    def _add_block(self, use: Use) -> None:
        if self._on_rows:
            thin = self._project(use.left, self.rows, use.right)  # (B, T, k)
            other = use.right
        else:
            thin = self._project(use.right, self.columns, use.right)
            other = use.left
        if self._sketched is None:
            width = self.columns if self._on_rows else self.rows
            shape = (self.batch, self._num_probes, width)
            self._sketched = torch.zeros(shape, dtype=thin.dtype, device=thin.device)
        if other.is_floating_point():
            self._sketched.baddbmm_(thin.transpose(1, 2), other)
        else:
            index = other.long().unsqueeze(1).expand(-1, self._num_probes, -1)
            self._sketched.scatter_add_(2, index, thin.transpose(1, 2))

    def _project(
        self, factor: torch.Tensor, side: int, like: torch.Tensor
    ) -> torch.Tensor:  # (B, T, side) or ids (B, T) -> (B, T, k)
        batch, tokens = factor.shape[:2]
        thin = like.new_zeros(batch, tokens, self._num_probes)
        for block, probes in self._source.blocks(
            side, self._num_probes, batch=batch, device=like.device, dtype=like.dtype
        ):
            if factor.is_floating_point():
                part = factor[..., block]
                if probes.shape[0] == 1:
                    thin += part @ probes[0]
                else:
                    thin.baddbmm_(part, probes)
            else:
                inside = (factor >= block.start) & (factor < block.stop)
                sample, token = inside.nonzero(as_tuple=True)
                row = factor[sample, token].long() - block.start
                owner = sample if probes.shape[0] > 1 else torch.zeros_like(sample)
                thin[sample, token] = probes[owner, row]
        return thin

    def _finish(self) -> torch.Tensor:
        if self._sketched is None:
            return torch.zeros(self.batch)
        return _squared_sum(self._sketched)


def _needs_source(estimator: Estimator, source: SketchSource | None) -> SketchSource:
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
        return _Projection(rows, columns, batch, self.num_probes, _needs_source(self, source))

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


class _HeadAndTail(Accumulation):
    def __init__(
        self, rows: int, columns: int, batch: int, estimator: "HutchPlusPlus", source: SketchSource
    ) -> None:
        super().__init__(rows, columns, batch)
        self._estimator, self._source = estimator, source
        self._norms: torch.Tensor | None = None

    def _add(self, use: Use) -> None:
        if self._norms is not None:
            raise ValueError(
                "hutchpp: a parameter with several uses has no single head; use hutchinson for it"
            )
        if use.by_ids:
            raise ValueError("hutchpp: an embedding has no dense factor; use exact for it")
        dtype = work_dtype(use.right.dtype)
        on_rows = projects_rows(self.rows, self.columns, self._source.kind)
        near, far = (use.left, use.right) if on_rows else (use.right, use.left)
        side, width = (self.rows, self.columns) if on_rows else (self.columns, self.rows)
        near, far = near.to(dtype), far.to(dtype)
        rank = min(self._estimator.head_rank or self._estimator.num_probes, side, width)

        def times(probes: torch.Tensor) -> torch.Tensor:  # M·probes, M = farᵀ near
            return far.transpose(1, 2) @ (near @ probes)

        start = self._probes(rank, side, near, role=1)
        powered = near.transpose(1, 2) @ (far @ times(start))  # (B, side, rank): Mᵀ M S
        basis = torch.linalg.qr(powered).Q
        probes = self._probes(self._estimator.num_probes, side, near, role=0)
        probes = probes.expand(self.batch, -1, -1)
        both = times(torch.cat([basis, probes], dim=2))  # one pass for head and tail
        head, tail = both[..., :rank], both[..., rank:]
        tail = tail - head @ (basis.transpose(1, 2) @ probes)
        self._norms = _squared_sum(tail) + head.flatten(1).square().sum(1)

    def _probes(self, count: int, side: int, like: torch.Tensor, *, role: int) -> torch.Tensor:
        blocks = self._source.blocks(
            side, count, batch=self.batch, device=like.device, dtype=like.dtype, role=role
        )
        return torch.cat([block for _, block in blocks], dim=1)

    def _finish(self) -> torch.Tensor:
        return torch.zeros(self.batch) if self._norms is None else self._norms


@dataclass(frozen=True)
class HutchPlusPlus(Estimator):
    """Hutch++: the energy in a random subspace exactly, the rest by projection.

    With S and P independent Gaussian and Q an orthonormal basis of Mᵀ M S, the estimate is
    ‖M Q‖² + ‖M P − (M Q)(Qᵀ P)‖².

    Guarantee: unbiased given Q; the ratio to the truth lies below χ²_k/k in convex order, with k
    the number of *tail* probes.

    Source: Ullah et al. (arXiv 2605.24879), Hutch++ variant; theirs has ``head_rank=num_probes``.
    """

    num_probes: int = 32
    sketch: str = "per_sample"
    head_rank: int | None = None
    name = "hutchpp"
    randomized = True
    linear = False

    def begin(
        self, rows: int, columns: int, *, batch: int, source: SketchSource | None = None
    ) -> Accumulation:
        """Start the norm of one parameter; see :meth:`Estimator.begin`."""
        return _HeadAndTail(rows, columns, batch, self, _needs_source(self, source))

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
        """Count the thin factor of head and tail, their products, basis and probes."""
        rank = min(self.head_rank or self.num_probes, in_features, out_features)
        both = rank + self.num_probes
        on_rows = projects_rows(out_features, in_features, self.sketch)
        side, other = (out_features, in_features) if on_rows else (in_features, out_features)
        return batch * (both * (tokens + other + side) + rank * side)

    def scale_law(self) -> ScaleLaw:
        """Return χ²_k/k of the tail's probes."""
        return scale_law(self.name, num_probes=self.num_probes, head_rank=self.head_rank)


_register("exact", lambda num_probes, sketch, head_rank: Exact())
_register("ghost", lambda num_probes, sketch, head_rank: Ghost())
_register("tiled", lambda num_probes, sketch, head_rank: Tiled())
_register("hutchinson", lambda num_probes, sketch, head_rank: Hutchinson(num_probes, sketch))
_register("hutchpp", HutchPlusPlus)
