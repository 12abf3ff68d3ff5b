"""Which files a setting like `data.train` names, and how messages name a file, a row and a value.

A row is counted from 1; in JSON Lines and CSV its number is that of its line. `read` reads the rows.
"""

from __future__ import annotations

import glob
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config.errors import Problem, UserError
from framework.config.paths import asset_dir

TEXTS = (".jsonl", ".json", ".csv", ".txt")
"""Kinds of files that are text, and may be compressed."""
TABLES = (".parquet", ".arrow", ".feather")
"""Kinds of files whose columns have one type each."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
KNOWN = f"one of {' '.join(TEXTS + TABLES)}, or {' '.join(COMPRESSED)} of the first {len(TEXTS)}, as in train.jsonl.gz"
WRITTEN_BY_DATASETS = ("dataset_info.json", "dataset_infos.json", "state.json")
"""Notes that `datasets` puts beside data files; no data where there are others."""
HUB_NAME = re.compile(r"[\w-]+/[\w-]+")
EXCERPT_CHARACTERS = 60


@dataclass(frozen=True)
class Row:
    """One row as it was read: a dict of columns, or the text of a `.txt` file."""

    file: Path
    number: int
    value: dict[str, Any] | str
    goes_on: bool = False
    """The next one is more of the same text."""

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
            return [readable(candidate, setting)]
        if candidate.is_dir():
            return _files_in(candidate, setting)
        matches = sorted(Path(match) for match in glob.glob(str(candidate), recursive=True)) if glob.has_magic(expanded) else []
        files = [match for match in matches if match.is_file()]
        if files:
            return [readable(file, setting) for file in files]
    kind = "a pattern that matches no file" if glob.has_magic(expanded) else "a path that does not exist"
    may_be_hub = f"   (or {setting}=hub://{path})" if HUB_NAME.fullmatch(path) else ""
    looked = expanded if os.path.isabs(expanded) else " or ".join(str(place / expanded) for place in places)
    raise UserError(
        Problem(
            path=setting,
            got=f"{path!r}, {kind}",
            expected=f"a file, folder or glob; looked for {looked}",
            fix=f"{setting}=/path/to/file.jsonl{may_be_hub}",
        )
    )


def kind_of(file: Path) -> str:
    """Which of TEXTS or TABLES tells how `file` is read (of train.jsonl.gz that is .jsonl), or a suffix that is none of them."""
    inner, suffix = Path(file.stem).suffix.lower(), file.suffix.lower()
    return inner if suffix in COMPRESSED and inner in TEXTS else suffix


def packing_of(file: Path) -> str:
    """Which of COMPRESSED `file` is, or nothing."""
    suffix = file.suffix.lower()
    return suffix if suffix in COMPRESSED else ""


def shown(file: Path) -> str:
    """`file` as messages name it: relative where it lies below the working directory."""
    try:
        return str(file.relative_to(Path.cwd()))
    except ValueError:
        return str(file)


def place(file: Path, number: int) -> str:
    """How messages name a row: `train.jsonl:12` where the row is a line that an editor can jump to, else `train.parquet row 12`."""
    return f"{shown(file)}:{number}" if kind_of(file) in (".jsonl", ".csv") else f"{shown(file)} row {number}"


def short_names(paths: list[str]) -> list[str]:
    """A name for each of several sources, the last part of its path without suffixes, or the whole of it where that is not enough."""
    names = [_stem(path) for path in paths]
    names = [name if names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)]
    return [name if names.count(name) == 1 else f"{name} ({names[:at].count(name) + 1})" for at, name in enumerate(names)]


def _stem(path: str) -> str:
    name = Path(path).name
    if not name or glob.has_magic(name):
        return path
    for suffix in (COMPRESSED, TEXTS + TABLES):
        name = name[: len(name) - len(next((known for known in suffix if name.lower().endswith(known)), ""))]
    return name


def excerpt(value: Any) -> str:
    """A value of a row, short enough for one line of a message."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = (
        text[: 2 * EXCERPT_CHARACTERS].encode(errors="backslashreplace").decode().replace("\n", "\\n")
    )  # half a character can't be printed
    return text if len(text) <= EXCERPT_CHARACTERS else text[:EXCERPT_CHARACTERS] + "..."


def readable(file: Path, setting: str) -> Path:
    """`file`; UserError where it is of a kind that nothing here reads."""
    if kind_of(file) not in TEXTS + TABLES:
        raise UserError(Problem(path=setting, got=f"{shown(file)}, a {file.suffix or 'suffix-less'} file", expected=KNOWN))
    return file


def _files_in(folder: Path, setting: str) -> list[Path]:
    below = sorted(entry for entry in folder.rglob("*") if entry.is_file() and not entry.name.startswith("."))
    splits = [entry.parent for entry in below if entry.name == "state.json"]
    if len(splits) > 1:
        got = f"{shown(folder)}, which holds {len(splits)} data sets: {', '.join(split.name for split in splits[:5])}"
        raise UserError(Problem(path=setting, got=got, expected="one of them", fix=f"{setting}={splits[-1]}"))
    files = [file for file in below if kind_of(file) in TEXTS + TABLES]
    if splits or any(file.name not in WRITTEN_BY_DATASETS for file in files):
        files = [file for file in files if file.name not in WRITTEN_BY_DATASETS]
    if not files:
        names = ", ".join(file.name for file in below[:5]) or "nothing"
        got = f"{shown(folder)}, a folder that holds {names}{' ...' if len(below) > 5 else ''}"
        raise UserError(Problem(path=setting, got=got, expected=f"a folder with data files: {KNOWN}"))
    return files
