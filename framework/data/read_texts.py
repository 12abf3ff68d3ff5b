"""The rows of files of text: JSON Lines, a JSON array, CSV, and a document, from a stream of bytes.

Bytes that are not UTF-8, broken JSON and rows that are too long are named with their row, and the rows after them are read where the
format allows it. Memory stays within a few times MOST_ROW_BYTES, whatever the file.

Unusual: JSON does not go through `datasets`. That reader infers one type per column over the whole file: an answer column that holds only
dates comes back as datetime objects, and a broken row is reported with a number inside some block. Here every row is parsed by itself
and keeps the text that was written.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from framework.config.errors import Problem, UserError
from framework.data.files import EXCERPT_CHARACTERS, Row, excerpt, kind_of, place, shown

MOST_ROW_BYTES = 1 << 26
"""A longer row is a mistake (an array in a .jsonl file, a quote that is never closed) or no training sample."""
FIRST_READ_CHARACTERS = 1 << 20  # of a JSON array; doubled while one item does not fit
DOCUMENT_CHARACTERS = 1 << 22  # of a document at a time
PEEKED_BYTES = 1 << 12
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
WHITE_SPACE = " \t\r\n"  # of JSON
ARRAY_OR_LINES = "a JSON array of objects, or one JSON object per line"


def other_encoding(file: Path, source: BinaryIO) -> Problem | None:
    """What is wrong with a file that begins as UTF-16 or UTF-32 do, with their byte order mark or with zeros beside the letters."""
    start = source.peek(PEEKED_BYTES)[:4]
    if not (start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start):
        return None
    name = "UTF-32" if b"\0\0" in start else "UTF-16"
    fix = f"iconv -f {name} -t UTF-8 {file.name} > utf8_{file.name}"
    return Problem(path=shown(file), got=f"a file that begins as {name} does ({start!r})", expected="UTF-8 text", fix=fix)


def json_lines(file: Path, source: BinaryIO, expected: str = "one JSON object per line") -> Iterator[Row | Problem]:
    for number, line, is_whole in _lines(source):
        if not is_whole:
            yield _too_long(place(file, number), line, file)
            continue
        try:
            text = line.decode()
            del line
            if text and not text.isspace():
                yield _object(json.loads(text), file, number)
        except UnicodeDecodeError as error:
            yield _not_utf8(place(file, number), error)
        except json.JSONDecodeError as error:
            got = f"broken JSON, {error.msg} at character {error.colno}: {excerpt(text.strip())}"
            yield Problem(path=place(file, number), got=got, expected=expected)
        except (ValueError, RecursionError) as error:
            yield _no_python(place(file, number), error)


def json_array(file: Path, source: BinaryIO) -> Iterator[Row | Problem]:
    """An array of objects, item by item. A `.json` file that holds one object per line is read as JSON Lines."""
    if source.peek(PEEKED_BYTES).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"{"):
        yield from json_lines(file, source, ARRAY_OR_LINES)
        return
    text_source = io.TextIOWrapper(source, encoding="utf-8-sig", errors="surrogateescape")  # bytes that are not UTF-8: see _item
    decoder = json.JSONDecoder()
    read_characters, number, position = FIRST_READ_CHARACTERS, 0, 1
    after_item = after_comma = False
    text = text_source.read(read_characters).lstrip()
    if text and not text.startswith("["):
        yield Problem(path=shown(file), got=f"a file that starts with {excerpt(text[:20])!a}", expected=ARRAY_OR_LINES)
        return
    while text:
        position = _skip(text, position, WHITE_SPACE)
        found = text[position : position + 1]
        if found == "]" and not after_comma:
            yield from _after_array(text[position + 1 :], text_source, file, number)
            return
        if found == "," and after_item:
            position, after_item, after_comma = position + 1, False, True
            continue
        if found and after_item:
            got = f"broken JSON, no comma after the item before: {excerpt(text[position : position + EXCERPT_CHARACTERS])}"
            yield Problem(path=place(file, number + 1), got=got, expected="a JSON array of objects")
            return
        failure, failed_at = "the array is not closed", len(text)
        try:
            value, end = decoder.raw_decode(text, position) if position < len(text) else (None, len(text))
        except json.JSONDecodeError as error:
            failure, failed_at = error.msg, error.pos
        except (ValueError, RecursionError) as error:
            yield _no_python(place(file, number + 1), error)
            return
        else:
            if end < len(text):  # a number may go on beyond what is read so far
                yield _item(value, text[position:end], file, number + 1)
                number, position, after_item, after_comma = number + 1, end, True, False
                continue
        where = place(file, number + 1)
        more = text_source.read(read_characters) if len(text) - position <= MOST_ROW_BYTES else None
        if more is None:
            yield _too_long(where, text[position : position + EXCERPT_CHARACTERS].encode(errors="replace"), file)
            return
        if not more:
            at = f"{failure}: {excerpt(text[failed_at : failed_at + EXCERPT_CHARACTERS]) or 'end of file'}"
            yield Problem(path=where, got=f"broken JSON, {at}", expected="a JSON array of objects")
            return
        text, position, read_characters = text[position:] + more, 0, 2 * read_characters


def _after_array(text: str, source: io.TextIOWrapper, file: Path, number: int) -> Iterator[Problem]:
    """What is wrong with the `text` behind the array and what `source` has after it: nothing belongs there."""
    while True:
        if rest := text.strip(WHITE_SPACE):
            got = f"content after the end of the array of {number:,} rows: {excerpt(rest)}"
            yield Problem(path=place(file, number + 1), got=got, expected="one JSON array with all rows, or one JSON object per line")
            return
        text = source.read(FIRST_READ_CHARACTERS)
        if not text:
            return


def csv_records(file: Path, source: BinaryIO) -> Iterator[Row | Problem]:
    """Records below a header with the names of the columns; a record may go over several lines, its number is that of the first."""
    lines = _CsvLines(source)
    csv.field_size_limit(MOST_ROW_BYTES)
    reader = csv.reader(lines, strict=True)
    header: list[str] | None = None
    while True:
        number = lines.number + 1
        lines.fault = None
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            got, expected = f"a record that is no CSV ({error})", "fields separated by commas, with quotes around line ends and commas"
            yield Problem(path=place(file, number), got=got, expected=expected)
            return  # where the next record starts is not known
        if lines.fault is not None:
            yield _not_utf8(place(file, number), lines.fault)
        elif not fields:
            continue
        elif header is None:
            header = _header(fields, file, number)
        elif len(fields) != len(header):
            got, expected = f"{len(fields)} fields", f"{len(header)}, as in the header: {', '.join(header)}"
            yield Problem(path=place(file, number), got=got, expected=expected)
        else:
            yield Row(file, number, dict(zip(header, fields, strict=True)))


def document(file: Path, source: BinaryIO, most_characters: int = -1) -> Iterator[Row | Problem]:
    """A `.txt` file is one document, here its first `most_characters`, in rows that go on in the next one. Line ends become "\\n"."""
    text_source = io.TextIOWrapper(source, encoding="utf-8-sig")
    try:
        text = text_source.read(DOCUMENT_CHARACTERS if most_characters < 0 else most_characters)
        while text:
            following = text_source.read(DOCUMENT_CHARACTERS) if most_characters < 0 else ""
            yield Row(file, 1, text, goes_on=bool(following))
            text = following
    except UnicodeDecodeError as error:
        yield _not_utf8(shown(file), error)


class _CsvLines:
    """The lines of a file as the csv module takes them. `number` lines were read; `fault`: one of the latest was not UTF-8."""

    def __init__(self, source: BinaryIO) -> None:
        self.lines, self.number = _lines(source), 0
        self.fault: UnicodeDecodeError | None = None

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        self.number, line, is_whole = next(self.lines)
        if not is_whole:
            raise csv.Error(f"a line of more than {_megabytes(MOST_ROW_BYTES)}")
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            self.fault = error
            return line.decode(errors="replace")


def _header(names: list[str], file: Path, number: int) -> list[str]:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        got = f"a header with {', '.join(map(repr, twice))} more than once"
        raise UserError(Problem(path=place(file, number), got=got, expected="a name of its own for each column"))
    return names


def _lines(source: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """(number, line, whether it is whole); of a line over MOST_ROW_BYTES only the beginning is yielded."""
    number = 0
    while line := source.readline(MOST_ROW_BYTES + 1):
        number += 1
        is_whole = len(line) <= MOST_ROW_BYTES
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        yield number, line if is_whole else line[:EXCERPT_CHARACTERS], is_whole
        while not is_whole and line and not line.endswith(b"\n"):
            line = source.readline(FIRST_READ_CHARACTERS)


def _item(value: Any, text: str, file: Path, number: int) -> Row | Problem:
    try:
        text.encode("utf-8", "surrogateescape").decode()
    except UnicodeDecodeError as error:
        return _not_utf8(place(file, number), error)
    return _object(value, file, number)


def _object(value: Any, file: Path, number: int) -> Row | Problem:
    if isinstance(value, dict):
        return Row(file, number, value)
    kind = "null" if value is None else f"a {type(value).__name__}"
    return Problem(path=place(file, number), got=f"{kind}: {excerpt(value)}", expected="a JSON object, {column: value, ...}")


def _too_long(where: str, beginning: bytes, file: Path) -> Problem:
    got = f"a row of more than {_megabytes(MOST_ROW_BYTES)}, which starts with {excerpt(beginning.decode(errors='replace'))!r}"
    is_array = kind_of(file) == ".jsonl" and beginning.startswith(b"[")
    fix = f"mv {file.name} {re.sub('(?i)jsonl', 'json', file.name)}   (it holds a JSON array)" if is_array else ""
    return Problem(path=where, got=got, expected="a shorter row: it would make one sample", fix=fix)


def _no_python(where: str, error: Exception) -> Problem:
    """JSON that is sound but too much for Python: nested a thousand levels deep, or a number of thousands of digits."""
    return Problem(path=where, got=f"JSON that cannot be read ({error})", expected="objects, lists and numbers of usual size")


def _not_utf8(where: str, error: UnicodeDecodeError) -> Problem:
    return Problem(
        path=where,
        got=f"bytes that are not UTF-8 ({error.object[error.start : error.start + 4]!r})",
        expected="UTF-8 text",
        fix="iconv -f ISO-8859-1 -t UTF-8 OLD > NEW   (the file's real encoding after -f)",
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position
