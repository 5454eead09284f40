"""Randomness of private training: three separate counter-based streams, and the Gaussian noise.

Every number is a function of a 128-bit key and a position (step, parameter, sample, block), never
of what was drawn before. So a resumed run draws what an uninterrupted one draws, micro-batches
can be cut anywhere, and nothing here touches torch's or numpy's global generators.

Philox streams and floating-point Gaussians are not cryptographic: whoever learns a key learns the
noise. Keys come from the operating system unless a ``privacy_seed`` is given, and are as
sensitive as the data.
"""

import hashlib
import math
import secrets
import struct
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

_WORD = 2**32
# Gaussian numbers made at once: small enough for a processor's cache.
CHUNK = 2**17


class Position(NamedTuple):
    """Where in a stream a block of numbers lies; each field is below 2**32."""

    step: int = 0
    parameter: int = 0
    sample: int = 0
    block: int = 0
    role: int = 0


@dataclass(frozen=True)
class Stream:
    """A counter-based stream of random numbers.

    Args:
        key: 128 bits, as two unsigned 64-bit words.
    """

    key: tuple[int, int] = field(repr=False)  # out of tracebacks and logs

    def generator(self, position: Position, *, chunk: int = 0) -> np.random.Generator:
        """Return numpy's generator at a position; distinct positions never overlap.

        Philox counts in 256 bits. The low 64 count the numbers drawn from one position, the
        other 192 are the position itself. ``chunk`` skips that many chunks of ``CHUNK`` numbers.
        """
        if not all(0 <= field < _WORD for field in position):
            raise ValueError(f"position: fields must be in [0, 2**32), got {position}")
        counter = [
            chunk * CHUNK,  # one count gives four words, more than the numbers of a chunk need
            position.block | position.parameter * _WORD,
            position.sample,
            position.step | position.role * _WORD,
        ]
        # As arrays: numpy takes a list of large and small words for floating numbers.
        key, place = (np.array(words, dtype=np.uint64) for words in (self.key, counter))
        return np.random.Generator(np.random.Philox(key=key, counter=place))

    def normal(
        self,
        shape: tuple[int, ...],
        position: Position,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Draw independent standard normal numbers.

        Args:
            shape: Shape of the result.
            position: Where in the stream they lie.
            device: On a CPU the numbers are numpy's Philox stream; elsewhere those of a
                ``torch.Generator`` of that device, seeded with 64 bits of a hash of key and
                position. The two differ.
            dtype: float64 for float64 models (tests), float32 otherwise.

        Returns:
            A tensor of the given shape; a part of it is no function of the position alone.
        """
        if device.type in ("cpu", "meta"):
            if dtype == torch.float64:
                drawn = self.generator(position).standard_normal(shape)
                return torch.from_numpy(drawn).to(device=device)
            numbers = np.empty(shape, dtype=np.float32)
            flat = numbers.reshape(-1)
            for chunk, start in enumerate(range(0, flat.size, CHUNK)):
                self.fill_normal(flat[start : start + CHUNK], position, chunk=chunk)
            return torch.from_numpy(numbers).to(device=device, dtype=dtype)
        generator = torch.Generator(device=device)
        generator.manual_seed(self._hash(position))
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def add_normal_(
        self,
        total: torch.Tensor,
        position: Position,
        *,
        deviation: float,
        part: tuple[int, torch.Size] | None = None,
    ) -> None:
        """Add normal numbers of a standard deviation, those of ``normal``, in place.

        Args:
            total: What they are added to.
            position: Where in the stream they lie.
            deviation: Their standard deviation.
            part: Where ``total`` is a part of a tensor, its rows from one on: the index of its
                first entry and the shape of the whole. It gets its part of the whole's numbers.
        """
        first, shape = part or (0, total.shape)
        if total.device.type == "cpu" and total.dtype == torch.float32 and total.is_contiguous():
            _add_by_chunk(
                total.view(-1).numpy(), deviation, self, position, first=first, whole=shape.numel()
            )
            return
        drawn = self.normal(tuple(shape), position, device=total.device, dtype=total.dtype)
        mine = drawn.view(-1)[first : first + total.numel()]
        total.add_(mine.view(total.shape), alpha=deviation)

    def fill_normal(
        self, numbers: npt.NDArray[np.float32], position: Position, *, chunk: int
    ) -> None:
        """Overwrite one chunk of a position's float32 numbers, at most ``CHUNK`` of them."""
        pairs = (numbers.size + 1) // 2
        words = self.generator(position, chunk=chunk).bit_generator.random_raw(
            pairs + -(-pairs // 2)
        )
        box_muller(numbers, words[:pairs], words[pairs:].view(np.int32)[:pairs])

    def _hash(self, position: Position) -> int:
        packed = struct.pack("<2Q5Q", *self.key, *position)
        # 63 bits: manual_seed takes a signed integer.
        return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class RandomStreams:
    """The streams of noise, sketches and sampling of one run.

    Whoever knows the sketch stream gets the guarantee of a shared sketch at best; whoever knows
    the noise stream gets none. The three keys are therefore independent.
    """

    noise: Stream
    sketch: Stream
    sampling: Stream
    releasable: bool

    @classmethod
    def from_seed(cls, privacy_seed: int | None) -> Self:
        """Make the streams.

        Args:
            privacy_seed: None takes 128 bits for each key from the operating system. An integer
                repeats a run, and marks what comes of it as not releasable.

        Raises:
            TypeError: ``privacy_seed`` is neither None nor an int.
            ValueError: ``privacy_seed`` is negative.
        """
        if privacy_seed is None:
            words = [secrets.randbits(64) for _ in range(6)]
            return cls(*_three_streams(words), releasable=True)
        if isinstance(privacy_seed, bool) or not isinstance(privacy_seed, int):
            raise TypeError(f"privacy_seed: must be None or an int, got {privacy_seed!r}")
        if privacy_seed < 0:
            raise ValueError(f"privacy_seed: must not be negative, got {privacy_seed}")
        warnings.warn(
            f"privacy_seed={privacy_seed} fixes noise, sketches and sampling: whoever knows it can "
            "undo the privacy, so the result is not releasable. Use None for a release.",
            stacklevel=3,
        )
        words = np.random.SeedSequence(privacy_seed).generate_state(6, np.uint64).tolist()
        return cls(*_three_streams(words), releasable=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the keys. As sensitive as the data: keep them out of what is released."""
        return {
            "noise": list(self.noise.key),
            "sketch": list(self.sketch.key),
            "sampling": list(self.sampling.key),
            "releasable": self.releasable,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Self:
        """Restore the keys of a saved run."""
        words = [word for name in ("noise", "sketch", "sampling") for word in state[name]]
        return cls(*_three_streams(words), releasable=bool(state["releasable"]))


def box_muller(
    numbers: npt.NDArray[np.float32],
    radius_bits: npt.NDArray[np.uint64],
    angle_bits: npt.NDArray[np.int32],
) -> None:
    """Turn uniform bits into independent standard normal numbers.

    The squared radius is drawn in double precision from 63 bits: the numbers reach 9.3 standard
    deviations, beyond which less than 1e-20 of a Gaussian lies, and no angle makes one zero. The
    vectorised functions make this two to three times as fast as numpy's ``standard_normal``.

    Args:
        numbers: (n,), overwritten.
        radius_bits: (⌈n/2⌉,).
        angle_bits: (⌈n/2⌉,).
    """
    pairs = radius_bits.size
    # Signed, for processors convert those ten times as fast; in (0, 1] after the scaling.
    uniform = (radius_bits >> np.uint64(1)).view(np.int64).astype(np.float64)
    uniform += 1.0
    uniform *= 2.0**-63
    squared = np.log(uniform, out=uniform)
    squared *= -2.0
    radius = np.sqrt(squared, out=squared).astype(np.float32)
    angle = angle_bits.astype(np.float32)
    angle += np.float32(0.5)
    angle *= np.float32(math.pi * 2.0**-31)
    np.multiply(radius, np.cos(angle), out=numbers[:pairs])
    rest = numbers[pairs:]
    np.multiply(radius[: rest.size], np.sin(angle[: rest.size]), out=rest)


def _three_streams(words: Sequence[int]) -> tuple[Stream, Stream, Stream]:
    first, second, third = (Stream((words[2 * i], words[2 * i + 1])) for i in range(3))
    return first, second, third


def add_gaussian_noise_(
    total: torch.Tensor,
    *,
    standard_deviation: float,
    stream: Stream,
    step: int,
    parameter: int,
    part: tuple[int, torch.Size] | None = None,
) -> torch.Tensor:
    """Add the noise of one parameter and step, in place.

    Args:
        total: Sum of clipped gradients, float32 or float64.
        standard_deviation: noise_multiplier times max_grad_norm; 0 adds nothing.
        stream: The noise stream.
        step: Index of the optimizer step.
        parameter: Index of the parameter.
        part: Where ``total`` is of some rows alone, as for ``Stream.add_normal_``: the noise of
            an entry does not depend on who holds it.

    Returns:
        ``total``.
    """
    if standard_deviation == 0:
        return total
    position = Position(step=step, parameter=parameter)
    stream.add_normal_(total, position, deviation=standard_deviation, part=part)
    return total


def _add_by_chunk(
    flat: npt.NDArray[np.float32],
    standard_deviation: float,
    stream: Stream,
    position: Position,
    *,
    first: int,
    whole: int,
) -> None:
    """Add the numbers of ``Stream.normal`` chunk by chunk, on as many threads as torch uses.

    ``flat`` gets those from ``first`` on, of ``whole`` numbers.
    """

    def add(chunk: int) -> None:
        start, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, whole)
        noise = np.empty(stop - start, dtype=np.float32)
        stream.fill_normal(noise, position, chunk=chunk)
        noise *= np.float32(standard_deviation)
        low, high = max(start, first), min(stop, first + flat.size)
        flat[low - first : high - first] += noise[low - start : high - start]

    chunks = range(first // CHUNK, -(-(first + flat.size) // CHUNK) if flat.size else 0)
    threads = min(torch.get_num_threads(), len(chunks))
    if threads < 2:
        for chunk in chunks:
            add(chunk)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(add, chunks))
