"""Random projections for norm estimation: made by row block, from their own stream.

A sketch of a parameter side with ``rows`` entries is a Gaussian matrix P of shape (rows,
num_probes) with entries N(0, 1/num_probes): ‖M P‖² then estimates ‖M‖² without bias.

``shared``: one P per parameter and logical step, the same for every sample and micro-batch.
``per_sample``: an independent P for each sample, keyed by its index in the logical batch, so that
it does not depend on how the batch is cut into micro-batches or dealt to processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from dprc.noise import Position, Stream

SKETCHES = ("per_sample", "shared")
# Rows made at once: bounds the memory of a sketch, of a vocabulary of any size and at any k.
BLOCK_ROWS = 2048


@dataclass(frozen=True)
class SketchSource:
    """Everything that determines the sketches of one parameter in one micro-batch.

    Args:
        stream: The sketch stream.
        kind: ``"shared"`` or ``"per_sample"``.
        step: Index of the logical step.
        parameter: Index of the parameter.
        first_sample: Index in the logical batch of the micro-batch's first sample.
        stride: From the index of one sample to that of the next: the number of processes that
            the logical batch was dealt to.
    """

    stream: Stream
    kind: str
    step: int = 0
    parameter: int = 0
    first_sample: int = 0
    stride: int = 1

    def __post_init__(self) -> None:
        if self.kind not in SKETCHES:
            raise ValueError(f"sketch: must be one of {SKETCHES}, got {self.kind!r}")

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
        """Yield the sketch in blocks of rows.

        Args:
            rows: Length of the projected side.
            num_probes: Number of columns, k.
            batch: Number of samples in the micro-batch, B.
            device: Where the blocks are made.
            dtype: float32, or float64 for float64 inputs.
            role: Sketches of different roles are independent of each other.

        Yields:
            (rows of the block, P) with P of shape (1, r, k) if shared, (B, r, k) if per sample.
        """
        for index, start in enumerate(range(0, rows, BLOCK_ROWS)):
            stop = min(start + BLOCK_ROWS, rows)
            shape = (stop - start, num_probes)
            position = Position(step=self.step, parameter=self.parameter, block=index, role=role)
            if self.kind == "shared":
                block = self.stream.normal((1, *shape), position, device=device, dtype=dtype)
            else:
                block = torch.empty((batch, *shape), device=device, dtype=dtype)
                for sample in range(batch):
                    # Index 0 is the shared sketch's: a sample never meets it.
                    place = self.first_sample + self.stride * sample
                    at = position._replace(sample=place + 1)
                    block[sample] = self.stream.normal(shape, at, device=device, dtype=dtype)
            yield slice(start, stop), block.mul_(num_probes**-0.5)
            del block  # before the next one is made

    def of_parameter(self, parameter: int) -> "SketchSource":
        """Return the source of another parameter in the same micro-batch."""
        return replace(self, parameter=parameter)
