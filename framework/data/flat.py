"""Long arrays that need not lie in memory, nor in one piece: what the tokens of a data set are, so that choosing samples copies none.

    stored    a b c d e f g                         an array in memory, or mapped from disk
    gathered  e f | b c d | c d e                   parts of another array: segments in any order, which may overlap
    chained   a b c d e f g | x y z                 arrays one after the other
    mask      . 1 1 1 | . 1 1 | . 1                 all but the first of each sample: nothing is stored at all

A slice is read from where it lies and is then a plain numpy array. A segment takes 16 bytes of memory, however long it is.

Unusual: each array can say what it is without being read (`identify`), so that data sets larger than memory are compared in a moment.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np

BLOCK_BYTES = 1 << 22
"""Of an array, hashed by itself: a reader of a large file can check some blocks of it."""


class Hash(Protocol):
    def update(self, data: bytes | np.ndarray, /) -> None: ...


class FlatArray(ABC):
    """`array[start:stop]` is a numpy array; `len(array)` items."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, start: int, stop: int) -> np.ndarray:
        """Items start ... stop - 1; 0 <= start <= stop <= len."""

    @abstractmethod
    def identify(self, into: Hash) -> None:
        """Feed `into` with what tells this array from others."""

    @property
    @abstractmethod
    def largest(self) -> int:
        """No item is larger (an array that was gathered from may hold larger ones than those chosen)."""

    def __getitem__(self, key: slice) -> np.ndarray:
        start, stop, step = key.indices(len(self))
        assert step == 1
        return self.read(start, max(start, stop))

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """All of it, in memory."""
        return np.array(self.read(0, len(self)), dtype=dtype)


class Stored(FlatArray):
    """A one-dimensional numpy array, mapped or not. `digest` (of `content_digest`) and `largest` where they are known already."""

    def __init__(self, array: np.ndarray, *, digest: str | None = None, largest: int | None = None) -> None:
        self.array, self._digest, self._largest = array, digest, largest
        self._plain = array.view(np.ndarray)  # a slice of a memmap is one, too, and takes ten times as long to make

    def __len__(self) -> int:
        return len(self.array)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._plain[start:stop]

    def identify(self, into: Hash) -> None:
        if self._digest is None:
            self._digest = content_digest(self.array)
        into.update(self._digest.encode())

    @property
    def largest(self) -> int:
        if self._largest is None:
            self._largest = int(self.array.max())
        return self._largest


class Segments:
    """Where parts of an array lie in it, and where they lie when put one after the other. Neighbours become one."""

    def __init__(self, starts: np.ndarray, lengths: np.ndarray) -> None:
        """starts, lengths [segments] int64; no segment is empty"""
        follows = starts[1:] == starts[:-1] + lengths[:-1]
        first = np.concatenate([[True], ~follows])[: len(starts)]
        self.starts = starts[first]
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])[np.append(first, True)].astype(np.int64)


class Gathered(FlatArray):
    """Segments of `base`, one after the other."""

    def __init__(self, base: FlatArray, segments: Segments) -> None:
        self.base, self.segments = base, segments

    def __len__(self) -> int:
        return int(self.segments.offsets[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        if start == stop:
            return self.base.read(0, 0)
        offsets = self.segments.offsets
        first, last = int(offsets.searchsorted(start, side="right")) - 1, int(offsets.searchsorted(stop))
        places = zip(self.segments.starts[first:last].tolist(), offsets[first:last].tolist(), strict=True)
        parts = []
        for (at, begin), end in zip(places, offsets[first + 1 : last + 1].tolist(), strict=True):
            parts.append(self.base.read(at + max(start - begin, 0), at + min(stop, end) - begin))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def identify(self, into: Hash) -> None:
        self.base.identify(into)
        into.update(self.segments.starts)
        into.update(self.segments.offsets)

    @property
    def largest(self) -> int:
        return self.base.largest


class Chained(FlatArray):
    """`parts`, one after the other."""

    def __init__(self, parts: Sequence[FlatArray]) -> None:
        self.parts, self.starts = tuple(parts), np.cumsum([0, *(len(part) for part in parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        if start == stop:
            return self.parts[0].read(0, 0)
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        found = []
        while start < stop:
            end = min(stop, int(self.starts[number + 1]))
            found.append(self.parts[number].read(start - int(self.starts[number]), end - int(self.starts[number])))
            start, number = end, number + 1
        return found[0] if len(found) == 1 else np.concatenate(found)

    def identify(self, into: Hash) -> None:
        for part in self.parts:
            part.identify(into)

    @property
    def largest(self) -> int:
        return max(part.largest for part in self.parts)


class AllButFirst(FlatArray):
    """A mask that is False at the first item of each sample and True elsewhere. offsets [samples + 1]"""

    def __init__(self, offsets: np.ndarray) -> None:
        self.offsets = offsets

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        first, last = self.offsets.searchsorted(start), self.offsets.searchsorted(stop)
        mask = np.ones(stop - start, dtype=bool)
        mask[self.offsets[first:last] - start] = False
        return mask

    def identify(self, into: Hash) -> None:
        into.update(b"all but first")
        into.update(np.ascontiguousarray(self.offsets))

    @property
    def largest(self) -> int:
        return 1


def content_digest(array: np.ndarray) -> str:
    """What `ArrayWriter` of `cache.py` says of a file with these bytes."""
    data = np.ascontiguousarray(array).view(np.uint8)
    return digest_of_blocks([hashlib.sha256(data[at : at + BLOCK_BYTES]).hexdigest() for at in range(0, len(data), BLOCK_BYTES)])


def digest_of_blocks(blocks: Sequence[str]) -> str:
    """Of a whole array, from the SHA-256 of each of its blocks."""
    return hashlib.sha256("".join(blocks).encode()).hexdigest()
