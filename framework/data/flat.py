"""Long arrays that need not lie in memory, nor in one piece: what the tokens of a data set are, so that choosing samples copies none.

    stored    a b c d e f g                         an array in memory, or mapped from disk
    gathered  e f | b c d | c d e                   parts of another array: segments in any order, which may overlap
    chained   a b c d e f g | x y z                 arrays one after the other
    mask      . 1 1 1 | . 1 1 | . 1                 all but the first of each sample: nothing is stored at all

A slice is read from where it lies and is then a plain numpy array; many are read in one go (`take`), as a batch needs them. A segment takes
16 bytes, however long it is.

Unusual: each array can say what it is without being read (`identify`), so that data sets larger than memory are compared in a moment.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from framework.data.on_disk import Empty, blocks

BLOCK_BYTES = 1 << 22
"""Of an array, hashed by itself: a reader of a large file can check some blocks of it."""


class Hash(Protocol):
    def update(self, data: bytes | np.ndarray, /) -> None: ...


class FlatArray(ABC):
    """`array[start:stop]` is a numpy array; `len(array)` items."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Items of several ranges, one range after the other. starts, lengths [ranges] int64, within the array."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Items start ... stop - 1; 0 <= start <= stop <= len."""
        return self.take(np.array([start]), np.array([stop - start]))

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

    def take(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        parts = [self._plain[start:stop] for start, stop in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate([self._plain[:0], *parts])

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

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, empty: Empty = np.empty) -> None:
        """starts, lengths [segments]; no segment is empty. `empty` makes the arrays."""
        count = sum(int(np.count_nonzero(_begins(starts, lengths, block))) for block in blocks(len(starts)))
        self.starts, self.offsets = empty(count, np.int64), empty(count + 1, np.int64)
        at, items = 0, 0
        for block in blocks(len(starts)):
            begins, ends = _begins(starts, lengths, block), items + np.cumsum(lengths[block], dtype=np.int64)
            following = at + int(np.count_nonzero(begins))
            self.starts[at:following] = starts[block][begins]
            self.offsets[at:following] = (ends - lengths[block])[begins]
            at, items = following, int(ends[-1])
        self.offsets[count] = items


def _begins(starts: np.ndarray, lengths: np.ndarray, block: slice) -> np.ndarray:
    """[block] bool: does the segment not go on where the one before it ends?"""
    before = slice(max(block.start - 1, 0), block.stop - 1)
    begins = np.ones(block.stop - block.start, dtype=bool)
    begins[len(begins) - (before.stop - before.start) :] = starts[before] + lengths[before] != starts[max(block.start, 1) : block.stop]
    return begins


class Gathered(FlatArray):
    """Segments of `base`, one after the other."""

    def __init__(self, base: FlatArray, segments: Segments) -> None:
        self.base, self.segments = base, segments

    def __len__(self) -> int:
        return int(self.segments.offsets[-1])

    def take(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        segment, within, sizes = _split(self.segments.offsets, starts, lengths)
        return self.base.take(self.segments.starts[segment] + within, sizes)

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

    def take(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        part, within, sizes = _split(self.starts, starts, lengths)
        taken: np.ndarray | None = None
        for number in np.unique(part).tolist():
            mine = part == number
            found = self.parts[number].take(within[mine], sizes[mine])
            if mine.all():
                return found
            taken = np.empty(sizes.sum(), found.dtype) if taken is None else taken
            taken[ranges((np.cumsum(sizes) - sizes)[mine], sizes[mine])] = found
        return self.parts[0].take(starts[:0], lengths[:0]) if taken is None else taken

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

    def take(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        first, last = self.offsets.searchsorted(starts), self.offsets.searchsorted(starts + lengths)
        mask = np.ones(lengths.sum(), dtype=bool)
        mask[self.offsets[ranges(first, last - first)] + np.repeat(np.cumsum(lengths) - lengths - starts, last - first)] = False
        return mask

    def identify(self, into: Hash) -> None:
        into.update(b"all but first")
        into.update(np.ascontiguousarray(self.offsets))

    @property
    def largest(self) -> int:
        return 1


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... of each range, one range after the other. starts, lengths [ranges]"""
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())


def _split(offsets: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ranges cut where parts of an array begin: of each piece its part, its first item counted in the part, and its items.

    offsets [parts + 1]; starts, lengths [ranges]
    """
    first, last = offsets.searchsorted(starts, side="right") - 1, offsets.searchsorted(starts + lengths)
    part = ranges(first, last - first)
    begins = np.maximum(offsets[part], np.repeat(starts, last - first))
    ends = np.minimum(offsets[part + 1], np.repeat(starts + lengths, last - first))
    return part, begins - offsets[part], ends - begins


def take_alike(arrays: Sequence[FlatArray], starts: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """`take` of each; what lies in the same segments of several arrays is looked up once."""
    while all(isinstance(array, Gathered) and array.segments is arrays[0].segments for array in arrays):
        segment, within, lengths = _split(arrays[0].segments.offsets, starts, lengths)
        starts, arrays = arrays[0].segments.starts[segment] + within, [array.base for array in arrays]
    return [array.take(starts, lengths) for array in arrays]


def content_digest(array: np.ndarray) -> str:
    """What `ArrayWriter` of `cache.py` says of a file with these bytes."""
    data = np.ascontiguousarray(array).view(np.uint8)
    return digest_of_blocks([hashlib.sha256(data[at : at + BLOCK_BYTES]).hexdigest() for at in range(0, len(data), BLOCK_BYTES)])


def digest_of_blocks(blocks: Sequence[str]) -> str:
    """Of a whole array, from the SHA-256 of each of its blocks."""
    return hashlib.sha256("".join(blocks).encode()).hexdigest()
