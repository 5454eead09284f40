"""Poisson sampling: logical batches of random size, cut into physical ones that fit in memory."""

from collections.abc import Callable, Iterator, Sized
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dprc.errors import PrivacyError
from dprc.noise import Position, Stream
from dprc.processes import OneProcess, Processes


class MapDataset(Protocol):
    """A dataset that is read by index; one item is one privacy unit."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def poisson_indices(
    stream: Stream, *, size: int, sample_rate: float, step: int
) -> npt.NDArray[np.int64]:
    """Draw the logical batch of one step.

    Args:
        stream: The sampling stream.
        size: Number of items to choose from.
        sample_rate: Probability q with which each is chosen, independently of all others.
        step: Index of the step.

    Returns:
        Sorted indices; possibly none.

    Guarantee: each item is in with probability at most ``sample_rate``, to 2**-53.
    """
    uniform = stream.generator(Position(step=step)).random(size)
    return np.flatnonzero(uniform < sample_rate)


class Share(NamedTuple):
    """What one process takes of a logical batch.

    Attributes:
        step: Index of the optimizer step.
        indices: Indices of its samples in the dataset.
        total: Samples of the logical batch, of all processes.
        idle: Physical batches that others have more, where all must go in step.
    """

    step: int
    indices: list[int]
    total: int
    idle: int

    def is_over(self, samples: int, count: int) -> bool:
        """Whether the next micro-batch only keeps step with other processes.

        Args:
            samples: Taken before.
            count: Of the micro-batch.

        Raises:
            PrivacyError: It has samples that were taken already.
        """
        mine = len(self.indices)
        if samples == mine and self.idle > 0:
            return True
        if samples + count > mine:
            raise PrivacyError(
                f"losses: the logical batch has {mine} samples, and this makes {samples + count}. "
                "Give each sample to backward() once."
            )
        return False


def refuse_out_of_step(share: Share | None, taken: int | None = None) -> None:
    """Refuse to let processes that must go through the model together part ways.

    Args:
        share: Of the loader's logical batch under way; None without one.
        taken: Samples that were taken of it, at its end.

    Raises:
        PrivacyError: Batches that the loader did not give, or did give and nobody took.
    """
    if share is None or (taken is not None and (taken < len(share.indices) or share.idle > 0)):
        raise PrivacyError(
            "poisson_loader: a sharded model needs all processes each time it is called. Take all "
            "batches of each logical batch of engine.poisson_loader, and no others, or the "
            "processes wait for each other for ever."
        )


def deal(
    drawn: npt.NDArray[np.int64], processes: Processes, *, step: int, max_physical_batch: int
) -> Share:
    """Return this process's share of a logical batch, which all have drawn alike.

    Dealt like cards: sample i goes to process i mod world_size, so that shares differ by one at
    most, and what is drawn does not depend on how many processes there are.
    """
    indices = drawn[processes.rank :: processes.world_size].tolist()
    idle = 0
    if processes.in_step:
        largest = -(-len(drawn) // processes.world_size)  # that of process 0
        mine, most = (-(-count // max_physical_batch) for count in (len(indices), largest))
        idle = most - mine
    return Share(step, indices, len(drawn), idle)


def draw_share(
    stream: Stream,
    processes: Processes,
    *,
    size: int,
    sample_rate: float,
    step: int,
    max_physical_batch: int,
) -> Share:
    """Draw the logical batch of one step and return this process's share: both functions above."""
    drawn = poisson_indices(stream, size=size, sample_rate=sample_rate, step=step)
    return deal(drawn, processes, step=step, max_physical_batch=max_physical_batch)


class LogicalBatch(Sized):
    """This process's samples of one optimizer step; iterating gives physical batches.

    An empty one gives none, and the step is still to be taken: its noise hides that it was empty.
    With a model sharded over processes, one whose samples have run out goes on with batches of one
    item that ``backward`` drops, until all processes are done.

    Attributes:
        step: Index of the optimizer step.
        indices: Indices of the samples in the dataset.
        total: Samples of the logical batch, of all processes.
    """

    def __init__(
        self,
        dataset: MapDataset,
        share: Share,
        *,
        max_physical_batch: int,
        collate_fn: Callable[[list[Any]], Any],
    ) -> None:
        self.step, self.indices, self.total, self._idle = share
        self._dataset, self._max, self._collate_fn = dataset, max_physical_batch, collate_fn

    def __len__(self) -> int:
        """Return the number of this process's samples."""
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
        for _ in range(self._idle):
            yield self._collate_fn([self._dataset[0]])


class Sampler(Protocol):
    """Who samples: the engine, which knows the step and holds the stream."""

    def begin_logical_batch(self, dataset: MapDataset, max_physical_batch: int) -> Share:
        """Draw the samples of the next step."""


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
            share = self._sampler.begin_logical_batch(self._dataset, self._max)
            yield LogicalBatch(
                self._dataset,
                share,
                max_physical_batch=self._max,
                collate_fn=self._collate_fn,
            )


class PlainSampler:
    """Poisson sampling without an engine, for runs without privacy.

    Args:
        stream: The sampling stream.
        sample_rate: Inclusion probability q.
        processes: Those that share the samples; None for this one alone.

    Attributes:
        next_step: Index of the step whose samples are drawn next; to be set to go on with a run.
        share: What was drawn last.
    """

    def __init__(
        self, stream: Stream, sample_rate: float, processes: Processes | None = None
    ) -> None:
        self._stream, self._sample_rate, self.next_step = stream, sample_rate, 0
        self.share: Share | None = None
        self._processes: Processes = processes or OneProcess()

    def begin_logical_batch(self, dataset: MapDataset, max_physical_batch: int) -> Share:
        """Draw the samples of the next step."""
        step = self.next_step
        self.next_step += 1
        self.share = draw_share(
            self._stream,
            self._processes,
            size=len(dataset),
            sample_rate=self._sample_rate,
            step=step,
            max_physical_batch=max_physical_batch,
        )
        return self.share
