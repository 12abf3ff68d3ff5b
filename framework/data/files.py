"""The rows of a data file, each with the number a person finds it under: JSON Lines, JSON arrays, Parquet and plain text.

A row is counted from 1; in JSON Lines it is the line. A row that cannot be read is yielded as a `Problem` instead, and reading goes on
where the format allows it, so that one pass over a file finds all of its broken rows.

Unusual: Parquet goes through `datasets`, JSON does not. That reader infers one type per column over the whole file: an answer column
that holds only dates comes back as datetime objects, and a broken row is reported with a number inside some block. Here every row is
parsed by itself, in bounded memory, and keeps the text that was written.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from framework.config.errors import Problem, UserError
from framework.config.paths import asset_dir

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
TABLES = (".parquet",)
"""Kinds of files whose columns have one type each."""
FIRST_READ_BYTES = 1 << 20  # of a JSON array; doubled while one item does not fit
EXCERPT_CHARACTERS = 60


@dataclass(frozen=True)
class Row:
    """One row as it was read: a dict of columns, or the text of a `.txt` file."""

    file: Path
    number: int
    value: dict[str, Any] | str

    @property
    def where(self) -> str:
        return place(self.file, self.number)


def find_files(path: str, setting: str) -> list[Path]:
    """The data files that `path` (a file, a folder or a glob; `setting` is the configuration key that holds it) stands for, sorted.

    A relative path is looked up in the working directory, then beside the shipped recipes. Raises UserError where nothing is found.
    """
    expanded = os.path.expanduser(path)
    places = [Path.cwd(), asset_dir("recipes")]
    for place in places:
        candidate = place / expanded
        if candidate.is_file():
            return [_readable(candidate, setting)]
        if candidate.is_dir():
            return _files_in(candidate, setting)
        matches = sorted(Path(match) for match in glob.glob(str(candidate), recursive=True)) if glob.has_magic(expanded) else []
        files = [match for match in matches if match.is_file()]
        if files:
            return [_readable(file, setting) for file in files]
    kind = "a pattern that matches no file" if glob.has_magic(expanded) else "a path that does not exist"
    looked = expanded if os.path.isabs(expanded) else " or ".join(str(place / expanded) for place in places)
    raise UserError(
        Problem(
            path=setting,
            got=f"{path!r}, {kind}",
            expected=f"a file, folder or glob; looked for {looked}",
            fix=f"{setting}=/path/to/file.jsonl",
        )
    )


def read_rows(file: Path) -> Iterator[Row | Problem]:
    """Every row of `file` in order. Nothing is yielded for a file without rows."""
    if file.suffix == ".jsonl":
        return _json_lines(file)
    if file.suffix == ".json":
        return _json(file)
    if file.suffix == ".parquet":
        return _parquet(file)
    return _text(file)


def first_rows(file: Path, count: int) -> list[Row | Problem]:
    """The first `count` rows, without reading the rest (text: its beginning; Parquet: without `datasets`, whose import takes seconds)."""
    if file.suffix == ".txt":
        return list(_text(file, FIRST_READ_BYTES))
    rows = _parquet_head(file, count) if file.suffix == ".parquet" else read_rows(file)
    return list(islice(rows, count))


def kind_of(file: Path) -> str:
    """Which of SUFFIXES tells how `file` is read."""
    return file.suffix


def shown(file: Path) -> str:
    """`file` as messages name it: relative where it lies below the working directory."""
    try:
        return str(file.relative_to(Path.cwd()))
    except ValueError:
        return str(file)


def place(file: Path, number: int) -> str:
    """How messages name a row: `train.jsonl:12` where the row is a line that an editor can jump to, else `train.parquet row 12`."""
    return f"{shown(file)}:{number}" if file.suffix == ".jsonl" else f"{shown(file)} row {number}"


def excerpt(value: Any) -> str:
    """A value of a row, short enough for one line of a message."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text.replace("\n", "\\n")
    return text if len(text) <= EXCERPT_CHARACTERS else text[:EXCERPT_CHARACTERS] + "..."


def _readable(file: Path, setting: str) -> Path:
    if file.suffix not in SUFFIXES:
        raise UserError(
            Problem(path=setting, got=f"{shown(file)}, a {file.suffix or 'suffix-less'} file", expected=f"one of {' '.join(SUFFIXES)}")
        )
    return file


def _files_in(folder: Path, setting: str) -> list[Path]:
    below = sorted(entry for entry in folder.rglob("*") if entry.is_file() and not entry.name.startswith("."))
    files = [file for file in below if file.suffix in SUFFIXES]
    if not files:
        names = ", ".join(file.name for file in below[:5]) or "nothing"
        raise UserError(
            Problem(
                path=setting,
                got=f"{shown(folder)}, a folder that holds {names}{' ...' if len(below) > 5 else ''}",
                expected=f"a folder with {' '.join(SUFFIXES)} files",
            )
        )
    return files


def _json_lines(file: Path, expected: str = "one JSON object per line") -> Iterator[Row | Problem]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = place(file, number)
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield _object(json.loads(text), file, number)
            except UnicodeDecodeError as error:
                yield _not_utf8(where, error)
            except json.JSONDecodeError as error:
                yield Problem(path=where, got=f"broken JSON, {error.msg} at character {error.colno}: {excerpt(text)}", expected=expected)


def _json(file: Path) -> Iterator[Row | Problem]:
    """An array of objects, item by item. A `.json` file that holds one object per line is read as JSON Lines."""
    decoder = json.JSONDecoder()
    with file.open(encoding="utf-8-sig") as source:
        read_characters, number = FIRST_READ_BYTES, 0
        try:
            text = source.read(read_characters).lstrip()
            if text.startswith("{"):
                yield from _json_lines(file, expected="a JSON array of objects, or one JSON object per line")
                return
            if text and not text.startswith("["):
                yield Problem(path=shown(file), got=f"a file that starts with {excerpt(text[:20])!r}", expected="a JSON array of objects")
                return
            position = 1
            while text:
                position = _skip(text, position, " \t\r\n,")
                if text[position : position + 1] == "]":
                    return
                try:
                    if position >= len(text):
                        raise json.JSONDecodeError("the array is not closed", text, position)
                    value, end = decoder.raw_decode(text, position)
                    complete = end < len(text)  # a number may go on beyond what is read so far
                except json.JSONDecodeError as error:
                    failure, complete = error, False
                else:
                    failure = json.JSONDecodeError("the array is not closed", text, end)
                if complete:
                    number, position = number + 1, end
                    yield _object(value, file, number)
                    continue
                more = source.read(read_characters)
                if not more:
                    at = f"{failure.msg}: {excerpt(text[failure.pos : failure.pos + EXCERPT_CHARACTERS]) or 'end of file'}"
                    yield Problem(path=place(file, number + 1), got=f"broken JSON, {at}", expected="a JSON array of objects")
                    return
                text, position, read_characters = text[position:] + more, 0, 2 * read_characters
        except UnicodeDecodeError as error:
            yield _not_utf8(place(file, number + 1), error)


def _parquet(file: Path) -> Iterator[Row | Problem]:
    import datasets

    _check_parquet(file)
    rows = datasets.load_dataset("parquet", data_files=str(file), split="train", streaming=True)
    for number, row in enumerate(rows, 1):
        yield Row(file, number, row)


def _parquet_head(file: Path, count: int) -> Iterator[Row | Problem]:
    opened = _check_parquet(file)
    number = 0
    for batch in opened.iter_batches(batch_size=count):
        for row in batch.to_pylist():
            number += 1
            yield Row(file, number, row)


def _check_parquet(file: Path) -> Any:
    """The opened `pyarrow.parquet.ParquetFile`; UserError for a file that is none."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise UserError(Problem(path=shown(file), got=f"no Parquet file ({error})", expected="a Parquet file")) from error


def _text(file: Path, most: int = -1) -> Iterator[Row | Problem]:
    """A `.txt` file is one document, here its first `most` characters. Line ends become "\\n"."""
    try:
        with file.open(encoding="utf-8-sig") as source:
            text = source.read(most)
    except UnicodeDecodeError as error:
        yield _not_utf8(shown(file), error)
        return
    if text:
        yield Row(file, 1, text)


def _object(value: Any, file: Path, number: int) -> Row | Problem:
    if isinstance(value, dict):
        return Row(file, number, value)
    kind = "null" if value is None else f"a {type(value).__name__}"
    return Problem(path=place(file, number), got=f"{kind}: {excerpt(value)}", expected="a JSON object, {column: value, ...}")


def _not_utf8(where: str, error: UnicodeDecodeError) -> Problem:
    return Problem(
        path=where,
        got=f"bytes that are not UTF-8 ({error.object[error.start : error.start + 4]!r})",
        expected="UTF-8 text",
        fix="iconv -f ISO-8859-1 -t UTF-8 OLD > NEW   (the file's real encoding after -f)",
    )


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position
