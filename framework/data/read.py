"""The rows of a data file, each with the number a person finds it under.

A row that cannot be read is yielded as a `Problem` instead, and reading goes on where the format allows it, so that one pass over a file
finds all of its broken rows. A file that breaks off or is damaged ends with a `Problem`.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from framework.config.errors import Problem
from framework.data.files import Row, kind_of, packing_of, shown
from framework.data.read_tables import arrow, parquet
from framework.data.read_texts import csv_records, document, json_array, json_lines, other_encoding

PEEKED_CHARACTERS = 1 << 20
"""Of a `.txt` file, for a first look."""
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, OSError)  # what the decompressors raise; `bz2` and Arrow plain OSErrors


def read_rows(file: Path) -> Iterator[Row | Problem]:
    """Every row of `file` in order. Nothing is yielded for a file without rows."""
    return _guarded(file, _rows(file))


def first_rows(file: Path, count: int) -> list[Row | Problem]:
    """The first `count` rows, without reading the rest (of a `.txt` file: its beginning)."""
    return list(islice(_guarded(file, _rows(file, PEEKED_CHARACTERS)), count))


def open_bytes(file: Path) -> BinaryIO:
    """The file's content, unpacked where it is compressed."""
    packing = packing_of(file)
    if packing == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), "zstd"))
    opened = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(packing, open)
    return opened(file, "rb")


def _rows(file: Path, most_characters: int = -1) -> Iterator[Row | Problem]:
    """`most_characters` of a `.txt` file, which is one row."""
    kind = kind_of(file)
    if kind in (".arrow", ".feather"):
        yield from arrow(file)
        return
    if kind == ".parquet":
        yield from parquet(file)
        return
    with open_bytes(file) as source:
        if (problem := other_encoding(file, source)) is not None:
            yield problem
        elif kind == ".jsonl":
            yield from json_lines(file, source)
        elif kind == ".json":
            yield from json_array(file, source)
        elif kind == ".csv":
            yield from csv_records(file, source)
        else:
            yield from document(file, source, most_characters)


def _guarded(file: Path, rows: Iterator[Row | Problem]) -> Iterator[Row | Problem]:
    count = 0
    try:
        for row in rows:
            yield row
            count += 1
    except DAMAGED as error:
        if packing_of(file):
            got = f"a {file.suffix} file that breaks off or is damaged, after {count:,} rows ({error})"
            yield Problem(path=shown(file), got=got, expected="a whole file, as it was packed")
        else:
            yield Problem(path=shown(file), got=f"a file that cannot be read, after {count:,} rows ({error})", expected="a readable file")
