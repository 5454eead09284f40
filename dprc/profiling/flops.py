"""Floating-point operations of norm estimation: counted, and beside them the formula."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from dprc import estimators
from dprc.estimators import Estimator
from dprc.noise import Stream
from dprc.sketch import SketchSource


@dataclass(frozen=True)
class LayerShape:
    """One linear layer at one sequence length.

    Raises:
        ValueError: A size below 1.
    """

    in_features: int
    out_features: int
    tokens: int
    batch: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name}: must be at least 1, got {value}")


class ShapesOnlySketch(SketchSource):
    """A sketch without numbers, made as one matrix, for tensors without memory."""

    def blocks(
        self,
        rows: int,
        num_probes: int,
        *,
        batch: int,
        device: torch.device,
        dtype: torch.dtype,
        role: int = 0,
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield all rows at once."""
        copies = 1 if self.kind == "shared" else batch
        yield slice(0, rows), torch.empty(copies, rows, num_probes, device=device, dtype=dtype)


def _batched_product_flops(
    total: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...], **_: Any
) -> int:
    batch, rows, inner = left
    return 2 * batch * rows * inner * right[-1]


def count_flops(estimator: Estimator, shape: LayerShape) -> int:
    """Count what one layer's norm takes, by running the estimator on tensors without memory.

    Args:
        estimator: Any of the registry's.
        shape: Of the layer.

    Returns:
        Operations as ``torch.utils.flop_counter`` counts them: a multiply-add is 2, only matrix
        products count; the QR of Hutch++ does not.
    """
    activations = torch.empty(shape.batch, shape.tokens, shape.in_features, device="meta")
    grads = torch.empty(shape.batch, shape.tokens, shape.out_features, device="meta")
    source = ShapesOnlySketch(Stream((0, 0)), getattr(estimator, "sketch", "per_sample"))
    # torch's counter knows baddbmm, not its in-place form.
    in_place = {torch.ops.aten.baddbmm_: _batched_product_flops}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        norm = estimator.begin(
            shape.out_features, shape.in_features, batch=shape.batch, source=source
        )
        norm.add(activations, grads)
        norm.finish()
    return int(counter.get_total_flops())


def flops_table(
    layers: Iterable[tuple[int, int]], tokens: Iterable[int], num_probes: Iterable[int]
) -> list[dict[str, Any]]:
    """Count every estimator on every layer.

    Args:
        layers: (in_features, out_features) of each.
        tokens: Sequence lengths.
        num_probes: Probe counts; deterministic estimators repeat with each.

    Returns:
        One row for each combination: the shape, ``flops_counted``, ``flops_formula`` and
        ``saving_vs_exact`` = 1 - counted/exact, as a fraction.

    Raises:
        ValueError: A size or a count below 1.
    """
    rows = []
    lengths, probes = list(tokens), list(num_probes)
    for in_features, out_features in layers:
        for length in lengths:
            shape = LayerShape(in_features, out_features, length)
            # Once for all probe counts: the tiles of a language-model head are a thousand.
            same_for_all = {
                name: count_flops(estimators.get(name), shape)
                for name in estimators.names()
                if not estimators.get(name).randomized
            }
            for count in probes:
                for name in estimators.names():
                    estimator = estimators.get(name, num_probes=count)
                    counted = same_for_all.get(name)
                    if counted is None:
                        counted = count_flops(estimator, shape)
                    rows.append(
                        {
                            **asdict(shape),
                            "num_probes": count,
                            "estimator": name,
                            "flops_counted": counted,
                            "flops_formula": estimator.flops(1, length, in_features, out_features),
                            "saving_vs_exact": 1 - counted / same_for_all["exact"],
                        }
                    )
    return rows
