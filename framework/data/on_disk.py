"""Arrays with an item for each sample that lie on the disk, and what sorts them a block at a time: memory does not grow with the samples.

    empty = Scratch(folder)
    offsets = empty(10_000_001, np.int64)            as np.empty, which may stand in its place
    for block in blocks(10_000_000): ...             slices of so many items as are worked on at once

Unusual: an array is a file without a name, mapped. The system keeps in memory what is in use and takes the rest back when it needs room;
nothing is left behind, whatever ends the process. The room is taken at once, so that a full disk is told here and not by a crash later.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from framework.config.errors import Problem, UserError

Empty = Callable[[int, DTypeLike], np.ndarray]
"""`np.empty` or a `Scratch`."""
BLOCK_ITEMS = 1 << 18
SMALL_BYTES = 1 << 20
"""Smaller arrays stay in memory."""


@dataclass(frozen=True)
class Scratch:
    """Makes arrays in files below `folder`."""

    folder: Path

    def __call__(self, items: int, dtype: DTypeLike) -> np.ndarray:
        """[items], not initialised. Raises UserError where the disk has no room."""
        nbytes = int(items) * np.dtype(dtype).itemsize
        if nbytes < SMALL_BYTES:
            return np.empty(items, dtype)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                else:
                    file.truncate(nbytes)
                return np.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype)
        except OSError as error:
            got, expected = f"{self.folder} ({error.strerror})", f"a folder with room for {nbytes / 1e9:.3f} GB while the run lasts"
            raise UserError(
                Problem(path="data.cache_dir", got=got, expected=expected, fix="data.cache_dir=/path/on/a/larger/disk")
            ) from error


def blocks(items: int) -> Iterator[slice]:
    """Slices that cover 0 ... items - 1."""
    for start in range(0, items, BLOCK_ITEMS):
        yield slice(start, min(start + BLOCK_ITEMS, items))


def places_in_order(keys: np.ndarray, following: np.ndarray) -> np.ndarray:
    """[items] int64: where the items of the next block belong in a stable sort by their `keys` [items].

    following [largest key + 1]: the place of the next item of each key, which moves on.
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(keys)])
    sizes, present = np.diff(begins, append=len(keys)), ordered[begins]
    places = np.empty(len(keys), np.int64)
    places[order] = np.arange(len(keys)) + np.repeat(following[present] - begins, sizes)
    following[present] += sizes
    return places
