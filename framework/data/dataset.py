"""Samples as three flat arrays: token ids, which of them are trained, and where each sample starts.

    ids     [tokens] int32        11 12 13 14 | 21 22 23
    trained [tokens] bool          .  .  1  1 |  .  1  1       a target of the loss; never the first token of a sample
    offsets [samples + 1] int64    0            4          7

`ids` and `trained` are those of `flat.py`: they may be mapped from disk, and `select` and `chunk` copy no token. What is in memory for a
sample are its offset, the place where its tokens lie and the number of trained ones: some 20 bytes, in files, too (`on_disk.py`), where
there are many. `TokenDatasetBuilder` is for data that are small.

Unusual: a sample may be a pack of several documents (`pack.py`), which must not see each other. `document_offsets` then says where each
starts, and the first token of every document has no predictor; None: nothing is packed, a sample is one document.

    ids              11 12 13 | 21 22 | 31 32 33        two packs of two documents and one
    offsets           0                  5        8
    document_offsets  0          3       5        8
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from framework.data.flat import AllButFirst, FlatArray, Gathered, Hash, Segments, Stored, ranges, take_alike
from framework.data.on_disk import Empty, blocks


@dataclass(frozen=True, eq=False)
class Sample:
    input_ids: np.ndarray
    """[tokens] int32"""
    trained: np.ndarray
    """[tokens] bool"""
    document_lengths: tuple[int, ...] | None = None
    """Tokens of each document of a pack; None: not packed."""

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, eq=False)
class Rows:
    """Several samples, one after the other."""

    ids: np.ndarray
    """[tokens] int32"""
    trained: np.ndarray
    """[tokens] bool"""
    lengths: np.ndarray
    """[rows]: tokens of each."""
    document_lengths: list[list[int]] | None = None
    """Of packs, for each the tokens of its documents."""


class TokenDataset:
    """`dataset[i]` is a `Sample`, `dataset.rows([i, j, ...])` several, at a fraction of the cost of one by one."""

    def __init__(
        self,
        ids: FlatArray,
        trained: FlatArray,
        offsets: np.ndarray,
        document_offsets: np.ndarray | None = None,
        *,
        trained_counts: np.ndarray,
        empty: Empty = np.empty,
    ) -> None:
        """trained_counts [documents]: trained tokens of each. `empty` makes the arrays of whatever is chosen from these."""
        documents = offsets if document_offsets is None else document_offsets
        assert len(ids) == len(trained) == offsets[-1] == documents[-1] and offsets[0] == documents[0] == 0
        assert len(trained_counts) == len(documents) - 1
        self.ids, self.trained, self.offsets, self.document_offsets = ids, trained, offsets, document_offsets
        self.trained_counts, self.empty = trained_counts, empty
        self.documents = len(documents) - 1
        self.is_packed = document_offsets is not None
        self.total_tokens = len(ids)
        self.trained_tokens = int(trained_counts.sum(dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        row = self.rows(np.array([index]))
        return Sample(row.ids, row.trained, tuple(row.document_lengths[0]) if self.is_packed else None)

    def rows(self, indices: np.ndarray) -> Rows:
        """indices [rows] int64"""
        starts, stops = self.offsets[indices], self.offsets[indices + 1]
        lengths = stops - starts
        packed = self._document_lengths(starts, stops) if self.is_packed else None
        return Rows(*take_alike([self.ids, self.trained], starts, lengths), lengths, packed)

    def _document_lengths(self, starts: np.ndarray, stops: np.ndarray) -> list[list[int]]:
        first, last = self.document_offsets.searchsorted(starts), self.document_offsets.searchsorted(stops)
        documents = ranges(first, last - first)
        lengths = (self.document_offsets[documents + 1] - self.document_offsets[documents]).tolist()
        ends = np.cumsum(last - first).tolist()
        return [lengths[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    @property
    def lengths(self) -> np.ndarray:
        """[samples] int64: tokens of each, in memory; of some, `lengths_of`."""
        return np.diff(self.offsets)

    def lengths_of(self, samples: np.ndarray | slice) -> np.ndarray:
        """Tokens of each of `samples` (a slice: with a start and a stop)."""
        if isinstance(samples, slice):
            return np.diff(self.offsets[samples.start : samples.stop + 1])
        return self.offsets[samples + 1] - self.offsets[samples]

    @property
    def longest(self) -> int:
        """Tokens of the longest document: what positions must reach."""
        offsets = self.document_offsets if self.is_packed else self.offsets
        return max(int(np.diff(offsets[block.start : block.stop + 1]).max()) for block in blocks(len(offsets) - 1))

    def select(self, indices: np.ndarray) -> TokenDataset:
        """The samples `indices` alone, in that order; not of packs."""
        return self.cut(self.offsets[indices], self.lengths_of(indices), self.trained_counts[indices])

    def keep(self, kept: np.ndarray) -> TokenDataset:
        """Those of the samples that are `kept` [samples] bool; not of packs."""
        count = int(np.count_nonzero(kept))
        starts, lengths, counts = self.empty(count, np.int64), self.empty(count, np.int32), self.empty(count, np.int32)
        at = 0
        for block in blocks(len(self)):
            chosen = kept[block]
            part = slice(at, at := at + int(np.count_nonzero(chosen)))
            starts[part], lengths[part] = self.offsets[block][chosen], self.lengths_of(block)[chosen]
            counts[part] = self.trained_counts[block][chosen]
        return self.cut(starts, lengths, counts)

    def cut(self, starts: np.ndarray, lengths: np.ndarray, trained_counts: np.ndarray) -> TokenDataset:
        """Samples that are other parts of the same tokens. starts, lengths, trained_counts [samples]; none begins at a trained token."""
        assert not self.is_packed
        segments, offsets = Segments(starts, lengths, self.empty), offsets_of(lengths, self.empty)
        ids, trained = Gathered(self.ids, segments), Gathered(self.trained, segments)
        return TokenDataset(ids, trained, offsets, trained_counts=trained_counts, empty=self.empty)

    def identify(self, into: Hash) -> None:
        """Feed `into` with what tells these samples from others; reads no token that is mapped from disk."""
        self.ids.identify(into)
        self.trained.identify(into)
        for offsets in (self.offsets, self.document_offsets):
            into.update(b"" if offsets is None else np.ascontiguousarray(offsets))


def offsets_of(lengths: np.ndarray, empty: Empty = np.empty) -> np.ndarray:
    """[items + 1] int64: where items of these lengths begin, one after the other."""
    offsets = empty(len(lengths) + 1, np.int64)
    offsets[0] = total = 0
    for block in blocks(len(lengths)):
        ends = offsets[block.start + 1 : block.stop + 1]
        np.cumsum(lengths[block], out=ends)
        ends += total
        total = int(ends[-1])
    return offsets


class TokenDatasetBuilder:
    """Collects samples compactly: five bytes a token while it grows."""

    def __init__(self) -> None:
        self._ids, self._trained, self._offsets, self._counts = array("i"), array("b"), array("q", [0]), array("i")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def add(self, ids: np.ndarray, trained: np.ndarray) -> None:
        """ids [tokens] int32, trained [tokens] bool"""
        assert len(ids) and not trained[0], "the first token of a document has no predictor"
        self._ids.frombytes(np.ascontiguousarray(ids, dtype=np.int32).tobytes())
        self._trained.frombytes(np.ascontiguousarray(trained, dtype=bool).tobytes())
        self._offsets.append(len(self._ids))
        self._counts.append(int(np.count_nonzero(trained)))

    def build(self) -> TokenDataset:
        """The data set; it takes the arrays over without a copy, so nothing may be added after it."""
        arrays = (self._ids, np.int32), (self._trained, bool), (self._offsets, np.int64), (self._counts, np.int32)
        ids, trained, offsets, counts = (np.frombuffer(values, dtype=dtype) for values, dtype in arrays)
        return TokenDataset(Stored(ids), Stored(trained), offsets, trained_counts=counts)


def chunk(documents: TokenDataset, chunk_tokens: int, *, joined: bool = True) -> TokenDataset:
    """Cut documents into samples of at most `chunk_tokens` >= 2: `joined` to one stream, or each by itself.

    A chunk starts with the last token of the one before, as context only: every token of the stream but the first is a target exactly
    once, and the stream is chunk 0 followed by the rest of each later chunk. The last chunk may be short.

        stream  a b c d e f        chunk_tokens 3:   a b c | c d e | e f
                                   trained           . 1 1 | . 1 1 | . 1
    """
    assert chunk_tokens >= 2 and not documents.is_packed
    bounds = np.array([0, documents.total_tokens]) if joined else documents.offsets
    step = chunk_tokens - 1
    counts = -(-(np.diff(bounds) - 1) // step)  # of chunks; a single token has nothing to predict and makes none
    ends, empty = np.cumsum(counts), documents.empty
    first = ends - counts
    chunks = int(ends[-1])
    starts, lengths, trained_counts = empty(chunks, np.int64), empty(chunks, np.int32), empty(chunks, np.int32)
    for block in blocks(chunks):
        numbers = np.arange(block.start, block.stop)
        document = ends.searchsorted(numbers, side="right")
        starts[block] = bounds[document] + step * (numbers - first[document])
        lengths[block] = np.minimum(bounds[document + 1] - starts[block], chunk_tokens)
        trained_counts[block] = lengths[block] - 1
    offsets = offsets_of(lengths, empty)
    ids = Gathered(documents.ids, Segments(starts, lengths, empty))
    return TokenDataset(ids, AllButFirst(offsets), offsets, trained_counts=trained_counts, empty=empty)
