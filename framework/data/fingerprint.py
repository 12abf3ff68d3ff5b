"""What a source in tokens is made of, as one name: the tokenizer, the bytes of the files, and how rows are read (P29).

Not part of it: paths, times, the machine, the number of workers, and whatever is done with the tokens later (`data.max_tokens`, packing,
the seed, held-out rows, weights), so that none of these has anything tokenised again.

Unusual: of large files the digests are remembered, for as long as size, inode and both times of a file stay what they were. A file that
was written to a moment ago is not: a second write within the clock's grain would not show.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from framework.config.errors import Problem, UserError
from framework.config.schema import TrainOn
from framework.data.files import kind_of, packing_of, shown
from framework.data.sources import Source
from framework.disk import write_whole
from framework.progress import progress

FORMAT_VERSION = 2
"""Raised when the same rows are to become other tokens, or tokens are stored in another way."""
REMEMBERED_BYTES = 1 << 26
"""Smaller files are read each time: a tenth of a second."""
SETTLED_SECONDS = 3.0
READ_BYTES = 1 << 22


class Fingerprint:
    """`key` names the tokens of `source`; `check_unchanged` once they are made of it."""

    def __init__(self, source: Source, tokenizer: Any, train_on: TrainOn, remembered: Path, *, show_progress: bool) -> None:
        """`remembered`: a folder for digests of files."""
        self._stats = {file: _stat(file) for file, _ in source.files}
        self._setting = source.setting
        digests = _digests(list(self._stats), remembered, source.setting, show_progress)
        made_of = {
            "version": FORMAT_VERSION,
            "tokenizer": tokenizer_digest(tokenizer),
            "train_on": train_on if source.yields == "conversations" else None,
            "max_rows": source.max_rows,
            "files": [
                {"kind": kind_of(file), "packed": packing_of(file), "form": asdict(form), "sha256": digests[file]}
                for file, form in source.files
            ],
        }
        self.key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]

    def check_unchanged(self) -> None:
        """Raises UserError where a file is not what it was."""
        for file, before in self._stats.items():
            is_there = file.exists()
            if not is_there or _stat(file) != before:
                got = f"{shown(file)}, which was {'changed' if is_there else 'deleted'} while it was read"
                raise UserError(Problem(path=self._setting, got=got, expected="a file that nobody writes to"))


def tokenizer_digest(tokenizer: Any) -> str:
    """Of all that decides about ids and trained tokens."""
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    for of_a_call in ("truncation", "padding"):  # set anew by each call, and left behind by the last one
        core.pop(of_a_call, None)
    added = {str(index): [token.content, token.special] for index, token in tokenizer.added_tokens_decoder.items()}
    rest = {
        "added": added,
        "special_ids": sorted(tokenizer.all_special_ids),
        "ends": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "template": tokenizer.chat_template,
        "core": core,
    }
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _digests(files: list[Path], folder: Path, setting: str, show_progress: bool) -> dict[Path, str]:
    def found() -> Any:
        for file in files:
            known = _remembered(file, folder)
            if known is not None:
                digests[file] = known
                continue
            began, before, digest = time.time(), _stat(file), hashlib.sha256()
            with file.open("rb", buffering=0) as source:
                while data := source.read(READ_BYTES):
                    digest.update(data)
                    yield
            digests[file] = digest.hexdigest()
            _remember(file, folder, before, digests[file], began)

    digests: dict[Path, str] = {}
    for _ in progress(found(), f"looking for changes in {setting}", unit=f"blocks of {READ_BYTES >> 20} MiB", show=show_progress):
        pass
    return digests


def _stat(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def _note_of(file: Path, folder: Path) -> Path:
    return folder / f"{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]}.json"


def _remembered(file: Path, folder: Path) -> str | None:
    try:
        note = json.loads(_note_of(file, folder).read_text())
        return note["sha256"] if note["stat"] == _stat(file) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(file: Path, folder: Path, stat: list[int], digest: str, began: float) -> None:
    size, *times = stat[:3]
    if size < REMEMBERED_BYTES or stat != _stat(file) or max(times) / 1e9 > began - SETTLED_SECONDS:
        return
    with suppress(OSError):  # it is a convenience: where the folder cannot be written, the entry itself says so
        os.makedirs(folder, exist_ok=True)
        write_whole(_note_of(file, folder), json.dumps({"stat": stat, "sha256": digest}), durably=False)
