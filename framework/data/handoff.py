"""One process of a machine prepares the data, the others map what it has: objects with large arrays, through a folder.

An array that is mapped from a file is handed over as the place of that file, any other large one becomes a file of the folder, and the
objects around them are pickled. So all ranks of a machine share one copy, of which the system keeps in memory what is in use.

Unusual: a reader learns that all is there from the file that is written last, and asks again until it is.
"""

from __future__ import annotations

import mmap
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from framework.config.errors import Problem, UserError

OBJECTS = "objects.pickle"
SMALL_BYTES = 1 << 12
"""Smaller arrays stay within the pickle."""


def hand_over(value: Any, folder: Path) -> None:
    """Write `value` into `folder`, made if needed, for `take_over`."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{OBJECTS}.partial"
    with partial.open("wb") as file:
        _Writer(file, folder).dump(value)
    os.replace(partial, folder / OBJECTS)


def take_over(folder: Path) -> Any:
    """What `hand_over` has written; FileNotFoundError where it has not, yet. A folder of one's own: a pickle may run anything."""
    with (folder / OBJECTS).open("rb") as file:
        try:
            return _Reader(file).load()
        except FileNotFoundError as error:  # not "not yet", for which a caller would wait
            got = f"{error.filename}, which was removed while the run started"
            raise UserError(Problem(path="data.cache_dir", got=got, expected="a folder that is left alone meanwhile")) from error


class _Writer(pickle.Pickler):
    def __init__(self, file: Any, folder: Path) -> None:
        super().__init__(file, protocol=5)
        self.folder, self.known = folder, {}

    def persistent_id(self, value: Any) -> tuple | None:
        if not isinstance(value, np.ndarray) or value.nbytes < SMALL_BYTES:
            return None
        if id(value) not in self.known:
            self.known[id(value)] = (self._place(value), value)  # with the array, which keeps its id from being used again
        return self.known[id(value)][0]

    def _place(self, array: np.ndarray) -> tuple:
        if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap):  # the whole of a file, and no part of such an array
            return str(array.filename), array.dtype.str, array.shape
        file = self.folder / f"{len(self.known)}.bin"
        np.ascontiguousarray(array).tofile(file)
        return str(file), array.dtype.str, array.shape


class _Reader(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.known: dict[tuple, np.ndarray] = {}

    def persistent_load(self, place: tuple) -> np.ndarray:
        if place not in self.known:
            path, dtype, shape = place
            self.known[place] = np.memmap(path, dtype=dtype, mode="r", shape=shape)
        return self.known[place]
