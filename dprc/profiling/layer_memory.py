"""Peak memory of one linear layer's norm, with and without the inputs it is taken from."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dprc import estimators
from dprc.estimators import Estimator
from dprc.profiling.flops import LayerShape, ShapesOnlySketch
from dprc.profiling.meter import MemoryMeter, ShapesOnlyStream, Storage
from dprc.sketch import SketchSource

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that one layer's norm needs at its peak.

    Attributes:
        input_bytes: Activations (B, T, d) and output gradients (B, T, p), which the backward pass
            has anyway.
        workspace_bytes: Beyond the inputs.
        token_workspace_bytes: The part of all workspaces over time that has one row for each
            token, at its own peak: what published counts of kT and 3kT numbers speak of. The
            projection matrix and the sketched gradient are not in it.
    """

    input_bytes: int
    workspace_bytes: int
    token_workspace_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Inputs and workspace."""
        return self.input_bytes + self.workspace_bytes


def layer_memory(
    estimator: Estimator | None,
    shape: LayerShape,
    *,
    dtype: str = "fp32",
    whole_projection: bool = False,
) -> LayerMemory:
    """Weigh one layer's norm by running its estimator on fake tensors.

    Args:
        estimator: Of the registry. None stands for an exact norm that squares the formed gradient
            into a second matrix, as plain code does; ``exact`` squares in place.
        shape: Of the layer.
        dtype: Of activations and output gradients, ``"fp32"`` or ``"bf16"``.
        whole_projection: Make the sketch as one matrix, not by block as the engine does.

    Returns:
        Bytes at the peak. Random numbers count, as they do on a GPU.

    Raises:
        ValueError: An unknown dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}, got {dtype!r}")
    meter = MemoryMeter()
    kind = ShapesOnlySketch if whole_projection else SketchSource
    source = kind(ShapesOnlyStream((0, 0), meter), getattr(estimator, "sketch", "per_sample"))
    with FakeTensorMode():
        leading = (shape.batch, shape.tokens)
        activations = torch.empty(*leading, shape.in_features, dtype=DTYPES[dtype])
        grads = torch.empty(*leading, shape.out_features, dtype=DTYPES[dtype])
        meter.hold([activations, grads], "inputs")
        with meter:
            if estimator is None:
                _squared_norm_by_copy(activations, grads)
            else:
                norm = estimator.begin(
                    shape.out_features, shape.in_features, batch=shape.batch, source=source
                )
                norm.add(activations, grads)
                norm.finish()
    inputs = sum(tensor.untyped_storage().nbytes() for tensor in (activations, grads))
    thin = [s for s in meter.storages if s.label is None and shape.tokens in s.shape]
    return LayerMemory(inputs, meter.peak().num_bytes - inputs, _peak_of(thin))


def _squared_norm_by_copy(activations: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
    gradient = activations.float().transpose(1, 2) @ grads.float()
    return (gradient**2).sum((1, 2))


def _peak_of(storages: Sequence[Storage]) -> int:
    """Return the most bytes of these alone that live at once."""
    moments = {storage.born for storage in storages}
    return max(
        (
            sum(s.num_bytes for s in storages if s.born <= m and (s.died is None or s.died > m))
            for m in moments
        ),
        default=0,
    )


def layer_rows(
    layers: Iterable[tuple[int, int]],
    tokens: Iterable[int],
    num_probes: Iterable[int],
    *,
    sketches: Iterable[str] = ("shared", "per_sample"),
    batch: int = 1,
    dtype: str = "fp32",
) -> list[dict[str, Any]]:
    """Weigh every estimator on every layer.

    Args:
        layers: (in_features, out_features) of each.
        tokens: Sequence lengths.
        num_probes: Probe counts of the randomized estimators.
        sketches: Kinds of sketch of the randomized estimators.
        batch: Samples.
        dtype: Of the inputs.

    Returns:
        A row for each deterministic estimator and for each randomized one, probe count, sketch and
        way to make the projection matrix; docs/profiling.md says what is in it.
    """
    rows = []
    lengths, probes, kinds = list(tokens), list(num_probes), list(sketches)
    for in_features, out_features in layers:
        for length in lengths:
            shape = LayerShape(in_features, out_features, length, batch)
            in_place = layer_memory(estimators.get("exact"), shape, dtype=dtype)
            copied = layer_memory(None, shape, dtype=dtype)
            for variant, memory in _variants(shape, probes, kinds, dtype, copied):
                savings = {
                    "saving_excluding_inputs": _saving(
                        memory.workspace_bytes, in_place.workspace_bytes
                    ),
                    "saving_including_inputs": _saving(memory.peak_bytes, in_place.peak_bytes),
                    "saving_including_inputs_copied": _saving(memory.peak_bytes, copied.peak_bytes),
                    "saving_token_workspace": _saving(
                        memory.token_workspace_bytes, in_place.workspace_bytes
                    )
                    if memory.token_workspace_bytes
                    else None,
                }
                rows.append(
                    {
                        **asdict(shape),
                        "dtype": dtype,
                        **variant,
                        **asdict(memory),
                        "peak_bytes": memory.peak_bytes,
                        **savings,
                    }
                )
    return rows


def _saving(mine: int, reference: int) -> float:
    return 1 - mine / reference


def _variants(
    shape: LayerShape, probes: list[int], kinds: list[str], dtype: str, copied: LayerMemory
) -> Iterator[tuple[dict[str, Any], LayerMemory]]:
    fixed = {"num_probes": None, "sketch": None, "projection": None}
    yield {"estimator": "exact", "convention": "copied", **fixed}, copied
    for name in estimators.names():
        if not estimators.get(name).randomized:
            variant = {"estimator": name, "convention": "in_place", **fixed}
            yield variant, layer_memory(estimators.get(name), shape, dtype=dtype)
            continue
        for count in probes:
            for sketch in kinds:
                estimator = estimators.get(name, num_probes=count, sketch=sketch)
                for projection in ("by_block", "whole"):
                    options: dict[str, Any] = {
                        "estimator": name,
                        "convention": "in_place",
                        "num_probes": count,
                        "sketch": sketch,
                        "projection": projection,
                    }
                    whole = projection == "whole"
                    yield (
                        options,
                        layer_memory(estimator, shape, dtype=dtype, whole_projection=whole),
                    )
