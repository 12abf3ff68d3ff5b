"""Samples as three flat arrays, in memory or mapped from disk: token ids, which of them are trained, and where each sample starts.

    ids     [tokens] int32        11 12 13 14 | 21 22 23
    trained [tokens] bool          .  .  1  1 |  .  1  1       a target of the loss; never the first token of a sample
    offsets [samples + 1] int64    0            4          7

`TokenDatasetBuilder` grows them row by row, `chunk` cuts a stream of documents into samples, `TokenDataset.save` writes plain `.npy`
files. A saved folder is complete when it holds the file `ready`, which is written last.

Unusual: a sample may be a pack of several documents (`pack.py`), which must not see each other. `document_offsets` then says where each
starts, and the first token of every document has no predictor; None: nothing is packed, a sample is one document.

    ids              11 12 13 | 21 22 | 31 32 33        two packs of two documents and one
    offsets           0                  5        8
    document_offsets  0          3       5        8
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ARRAYS = ("ids", "trained", "offsets")
PACKED = "document_offsets"
READY = "ready"


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


class TokenDataset:
    """`dataset[i]` is a `Sample` (a view, nothing is copied)."""

    def __init__(self, ids: np.ndarray, trained: np.ndarray, offsets: np.ndarray, document_offsets: np.ndarray | None = None) -> None:
        documents = offsets if document_offsets is None else document_offsets
        assert len(ids) == len(trained) == offsets[-1] == documents[-1] and offsets[0] == documents[0] == 0
        assert not trained[documents[:-1]].any(), "the first token of a document has no predictor"
        self.ids, self.trained, self.offsets, self.document_offsets = ids, trained, offsets, document_offsets
        self.documents = len(documents) - 1
        self.is_packed = document_offsets is not None
        self.total_tokens = len(ids)
        self.trained_tokens = int(np.count_nonzero(trained))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start, stop = self.offsets[index], self.offsets[index + 1]
        return Sample(self.ids[start:stop], self.trained[start:stop], self._document_lengths(start, stop))

    def _document_lengths(self, start: int, stop: int) -> tuple[int, ...] | None:
        if not self.is_packed:
            return None
        first, last = np.searchsorted(self.document_offsets, [start, stop])
        return tuple(np.diff(self.document_offsets[first : last + 1]).tolist())

    @property
    def lengths(self) -> np.ndarray:
        """[samples] int64: tokens of each."""
        return np.diff(self.offsets)

    @property
    def longest(self) -> int:
        """Tokens of the longest document: what positions must reach."""
        return int(np.diff(self.document_offsets if self.is_packed else self.offsets).max())

    def select(self, indices: np.ndarray) -> TokenDataset:
        """A copy that holds only the samples `indices`, in that order; not of packs."""
        assert not self.is_packed
        builder = TokenDatasetBuilder()
        for index in indices:
            sample = self[int(index)]
            builder.add(sample.input_ids, sample.trained)
        return builder.build()

    def save(self, folder: Path) -> None:
        """Write into `folder` (made if needed). A reader that waits for `folder/ready` never sees half of it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / READY).unlink(missing_ok=True)
        (folder / f"{PACKED}.npy").unlink(missing_ok=True)
        for name in (*ARRAYS, PACKED) if self.is_packed else ARRAYS:
            with (folder / f"{name}.npy").open("wb") as file:
                np.save(file, getattr(self, name))
                file.flush()
                os.fsync(file.fileno())
        (folder / READY).touch()

    @classmethod
    def load(cls, folder: Path) -> TokenDataset:
        """Map a saved folder into memory. Raises FileNotFoundError where it is not complete."""
        if not (folder / READY).exists():
            raise FileNotFoundError(f"{folder} holds no finished data set (no file {READY!r})")
        names = (*ARRAYS, PACKED) if (folder / f"{PACKED}.npy").exists() else ARRAYS
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in names))


class TokenDatasetBuilder:
    """Collects samples compactly: five bytes a token while it grows."""

    def __init__(self) -> None:
        self._ids, self._trained, self._offsets = array("i"), array("b"), array("q", [0])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def add(self, ids: np.ndarray, trained: np.ndarray) -> None:
        """ids [tokens] int32, trained [tokens] bool"""
        self._ids.frombytes(np.ascontiguousarray(ids, dtype=np.int32).tobytes())
        self._trained.frombytes(np.ascontiguousarray(trained, dtype=bool).tobytes())
        self._offsets.append(len(self._ids))

    def build(self) -> TokenDataset:
        """The data set; it takes the arrays over without a copy, so nothing may be added after it."""
        return TokenDataset(
            np.frombuffer(self._ids, dtype=np.int32), np.frombuffer(self._trained, dtype=bool), np.frombuffer(self._offsets, dtype=np.int64)
        )


def chunk(documents: Iterable[np.ndarray], chunk_tokens: int, *, joined: bool = True) -> TokenDataset:
    """Cut documents ([tokens] int32 each) into samples of at most `chunk_tokens` >= 2: `joined` to one stream, or each by itself.

    A chunk starts with the last token of the one before, as context only: every token of the stream but the first is a target exactly
    once, and the stream is chunk 0 followed by the rest of each later chunk. The last chunk may be short.

        stream  a b c d e f        chunk_tokens 3:   a b c | c d e | e f
                                   trained           . 1 1 | . 1 1 | . 1
    """
    assert chunk_tokens >= 2
    builder = TokenDatasetBuilder()
    carried = np.empty(0, dtype=np.int32)
    for document in documents:
        carried = _add_whole_chunks(builder, np.concatenate([carried, document]), chunk_tokens)
        if not joined:
            _add_chunk(builder, carried)
            carried = carried[:0]
    _add_chunk(builder, carried)
    return builder.build()


def _add_whole_chunks(builder: TokenDatasetBuilder, ids: np.ndarray, chunk_tokens: int) -> np.ndarray:
    """Add all chunks of `ids` but the last one, which comes back with its first token of context."""
    at = 0
    while len(ids) - at > chunk_tokens:  # more than one chunk, so that the last one is never the carried token alone
        _add_chunk(builder, ids[at : at + chunk_tokens])
        at += chunk_tokens - 1
    return ids[at:]


def _add_chunk(builder: TokenDatasetBuilder, ids: np.ndarray) -> None:
    if len(ids) < 2:
        return  # nothing to predict
    trained = np.ones(len(ids), dtype=bool)
    trained[0] = False
    builder.add(ids, trained)
