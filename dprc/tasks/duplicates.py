"""Which texts are the same document: equal after normalisation, or almost equal."""

import hashlib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_NO_WORD = re.compile(r"[\W_]+")
_Hashes = npt.NDArray[np.uint64]

SIMILARITY = 0.8  # from here on two texts are one document
_WORDS = 5  # of a sequence
# A pair of similarity 0.8 agrees in all rows of no band with probability (1 - 0.8**4)**32 < 1e-7.
_BANDS, _ROWS = 32, 4


def normalised(text: str) -> str:
    """Return the form in which texts are compared.

    Letters and digits only, without case, Unicode's variants of a character made one: texts that
    differ in punctuation, quotes, spacing or line breaks are equal.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _NO_WORD.sub(" ", folded).strip()


def fingerprint(text: str) -> str:
    """Return a hash of the normalised text; it orders documents the same way everywhere."""
    return hashlib.sha256(normalised(text).encode()).hexdigest()


def similarity(one: str, other: str) -> float:
    """Return the Jaccard index of two texts' sequences of five words, after normalisation."""
    first, second = _sequences(one), _sequences(other)
    common = np.intersect1d(first, second, assume_unique=True).size
    return common / (first.size + second.size - common)


def near_duplicates(texts: Sequence[str]) -> set[int]:
    """Find texts that are almost equal to an earlier one that stays.

    Args:
        texts: In order.

    Returns:
        Indices of those to drop: whose similarity to an earlier text that is not dropped is at
        least ``SIMILARITY``. Pairs are found by the smallest hashes they share (MinHash), which
        misses a pair with probability below 1e-7, and decided by their similarity itself.

    Source:
        Broder 1997, "On the resemblance and containment of documents".
    """
    buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    dropped: set[int] = set()
    for index, text in enumerate(texts):
        keys = [(band, row.tobytes()) for band, row in enumerate(_signature(_sequences(text)))]
        candidates = sorted({earlier for key in keys for earlier in buckets[key]})
        if any(similarity(texts[earlier], text) >= SIMILARITY for earlier in candidates):
            dropped.add(index)
            continue
        for key in keys:
            buckets[key].append(index)
    return dropped


def _sequences(text: str) -> _Hashes:
    """Return the distinct hashes of a text's sequences of words, sorted; of all, if it is short."""
    words = normalised(text).split()
    digests = {w: hashlib.blake2b(w.encode(), digest_size=8).digest() for w in set(words)}
    hashes = np.frombuffer(b"".join(digests[word] for word in words), dtype="<u8")
    length = min(_WORDS, hashes.size)
    count = hashes.size - length + 1
    total = np.zeros(count, dtype=np.uint64)
    for place in range(length):
        total = _mixed(total ^ hashes[place : place + count])  # the order of words counts
    return np.unique(total)


def _signature(sequences: _Hashes) -> _Hashes:
    """Return the smallest of each of many rehashings: (bands, rows)."""
    keys = _mixed(np.arange(1, _BANDS * _ROWS + 1, dtype=np.uint64))
    smallest = [_mixed(sequences ^ key).min() for key in keys]
    return np.array(smallest, dtype=np.uint64).reshape(_BANDS, _ROWS)


def _mixed(values: _Hashes) -> _Hashes:
    """Scramble 64-bit integers one to one (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
