"""Poisson sampling: logical batches of random size, cut into physical ones that fit in memory."""

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dprc.noise import Position, Stream


class MapDataset(Protocol):
    """A dataset that is read by index; one item is one privacy unit."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def poisson_indices(
    stream: Stream, *, size: int, sample_rate: float, step: int, rank: int = 0
) -> npt.NDArray[np.int64]:
    """Draw the logical batch of one step.

    Args:
        stream: The sampling stream.
        size: Number of items to choose from.
        sample_rate: Probability q with which each is chosen, independently of all others.
        step: Index of the step.
        rank: Which process's share is sampled.

    Returns:
        Sorted indices; possibly none.

    Guarantee: each item is in with probability at most ``sample_rate``, to 2**-53.
    """
    uniform = stream.generator(Position(step=step, rank=rank)).random(size)
    return np.flatnonzero(uniform < sample_rate)


class LogicalBatch(Sized):
    """The samples of one optimizer step; iterating gives physical batches.

    An empty one gives none, and the step is still to be taken: its noise hides that it was empty.

    Attributes:
        step: Index of the optimizer step.
        indices: Indices of the samples in the dataset.
    """

    def __init__(
        self,
        dataset: MapDataset,
        indices: Sequence[int],
        *,
        step: int,
        max_physical_batch: int,
        collate_fn: Callable[[list[Any]], Any],
    ) -> None:
        self.step, self.indices = step, list(indices)
        self._dataset, self._max, self._collate_fn = dataset, max_physical_batch, collate_fn

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.indices)

    def __getitem__(self, key: object) -> Any:
        """Refuse to be taken for a batch: it is a sequence of physical ones."""
        raise TypeError(
            "a logical batch is not a batch: write `for batch in logical_batch`, call "
            "engine.backward() for each, then engine.step() once"
        )

    def __iter__(self) -> Iterator[Any]:
        """Yield collated batches of at most ``max_physical_batch`` samples."""
        for start in range(0, len(self.indices), self._max):
            chosen = self.indices[start : start + self._max]
            yield self._collate_fn([self._dataset[index] for index in chosen])


class Sampler(Protocol):
    """Who samples: the engine, which knows the step and holds the stream."""

    def begin_logical_batch(self, dataset: MapDataset) -> tuple[int, list[int]]:
        """Draw the samples of the next step: (step, indices)."""


class PoissonLoader(Sized):
    """Logical batches for a number of steps; made by ``PrivacyEngine.poisson_loader``.

    Iterating again goes on with the steps that follow: no sample is drawn twice from one step.

    Args:
        dataset: Read by index; one item is one privacy unit.
        sampler: Draws the samples of a step.
        steps: Number of steps of one iteration.
        max_physical_batch: Most samples that go through the model at once.
        collate_fn: Makes a batch of a list of items.

    Raises:
        TypeError: A count is not an int, or the dataset cannot be indexed.
        ValueError: A count is below 1.
    """

    def __init__(
        self,
        dataset: MapDataset,
        sampler: Sampler,
        *,
        steps: int,
        max_physical_batch: int,
        collate_fn: Callable[[list[Any]], Any],
    ) -> None:
        for name, count in (("steps", steps), ("max_physical_batch", max_physical_batch)):
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(f"{name}: must be an int, got {count!r}")
            if count < 1:
                raise ValueError(f"{name}: must be at least 1, got {count}")
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"dataset: Poisson sampling needs __len__ and __getitem__, got "
                f"{type(dataset).__name__}; an iterable dataset cannot be sampled"
            )
        self._dataset, self._sampler, self._steps = dataset, sampler, steps
        self._max, self._collate_fn = max_physical_batch, collate_fn

    def __len__(self) -> int:
        """Return the number of logical batches, which is the number of optimizer steps."""
        return self._steps

    def __iter__(self) -> Iterator[LogicalBatch]:
        """Yield the logical batches."""
        for _ in range(self._steps):
            step, indices = self._sampler.begin_logical_batch(self._dataset)
            yield LogicalBatch(
                self._dataset,
                indices,
                step=step,
                max_physical_batch=self._max,
                collate_fn=self._collate_fn,
            )


class PlainSampler:
    """Poisson sampling without an engine, for runs without privacy.

    Args:
        stream: The sampling stream.
        sample_rate: Inclusion probability q.

    Attributes:
        next_step: Index of the step whose samples are drawn next; to be set to go on with a run.
    """

    def __init__(self, stream: Stream, sample_rate: float) -> None:
        self._stream, self._sample_rate, self.next_step = stream, sample_rate, 0

    def begin_logical_batch(self, dataset: MapDataset) -> tuple[int, list[int]]:
        """Draw the samples of the next step."""
        step = self.next_step
        self.next_step += 1
        indices = poisson_indices(
            self._stream, size=len(dataset), sample_rate=self._sample_rate, step=step
        )
        return step, indices.tolist()
