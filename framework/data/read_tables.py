"""The rows of Parquet and Arrow files (also Feather, and what `save_to_disk` of `datasets` writes), in bounded memory.

Unusual: they go through pyarrow alone. `datasets` takes seconds to import, and takes the name of a file for a glob.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from framework.config.errors import Problem, UserError
from framework.data.files import Row, place, shown

ROWS_AT_ONCE = 256
"""As Python objects; a batch of a file may have millions."""


def parquet(file: Path) -> Iterator[Row | Problem]:
    yield from _numbered(file, _open_parquet(file).iter_batches(batch_size=ROWS_AT_ONCE))


def arrow(file: Path) -> Iterator[Row | Problem]:
    """An Arrow IPC file, with or without a footer (the stream format)."""
    import pyarrow

    with pyarrow.memory_map(str(file)) if file.stat().st_size else pyarrow.BufferReader(b"") as source:
        start = source.read(6)
        source.seek(0)
        if start[:4] == b"FEA1":
            expected = "Feather 2 or Arrow IPC"
            raise UserError(Problem(path=shown(file), got="a Feather file of version 1", expected=expected))
        try:
            if start == b"ARROW1":
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                batches = pyarrow.ipc.open_stream(source)
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(Problem(path=shown(file), got=f"no Arrow file ({error})", expected="an Arrow IPC file")) from error
        yield from _numbered(file, batches)


def _numbered(file: Path, batches: Any) -> Iterator[Row | Problem]:
    import pyarrow

    number = 0
    try:
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                for value in batch.slice(start, ROWS_AT_ONCE).to_pylist():
                    number += 1
                    yield Row(file, number, value)
    except (pyarrow.ArrowException, OSError) as error:
        yield _damaged(file, number, error)


def _open_parquet(file: Path) -> Any:
    """The opened `pyarrow.parquet.ParquetFile`; UserError for a file that is none."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise UserError(Problem(path=shown(file), got=f"no Parquet file ({error})", expected="a Parquet file")) from error


def _damaged(file: Path, rows: int, error: Exception) -> Problem:
    return Problem(path=place(file, rows + 1), got=f"a file that is damaged here ({error})", expected="a whole file")
