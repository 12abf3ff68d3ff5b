"""A source in tokens, row by row, from the cache: before anything is cut, held out, mixed or packed.

    ids.bin, offsets.bin            the tokens of every usable row, and where each row starts
    trained.bin, trained_counts.bin which tokens are trained, and how many of a row (not for text, where all but its first one are)
    numbers.bin                     the number of each row in its file, for messages

Rows that are wrong are collected over the whole source and refused together; then there is no entry. What is written goes straight to
the disk, so memory does not grow with the data.

Unusual: an entry is about one source, and about nothing that is decided later, so that another seed, length, weight or packing uses the
same one. What a run needs beside it are a few numbers a row, which `dataset.py` computes in a moment.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from framework.config.errors import Problem, UserError
from framework.config.schema import DataConfig, TrainOn
from framework.data.cache import Entry, EntryWriter, obtain
from framework.data.dataset import TokenDataset
from framework.data.files import Row, place
from framework.data.fingerprint import Fingerprint
from framework.data.flat import AllButFirst
from framework.data.ledger import SourceCounts
from framework.data.on_disk import Scratch, blocks
from framework.data.sources import SHOWN_PROBLEMS, Faults, Source, Wanted
from framework.data.template import Encoded
from framework.data.tokenize import Item, encode_rows
from framework.data.turns import Completion, Passage, Pretokenised
from framework.progress import progress

FLUSHED_TOKENS = 1 << 16


@dataclass(frozen=True)
class SourceTokens:
    """The usable rows of a source; a document is one row, however long."""

    rows: TokenDataset
    is_text: bool
    stop_ids: set[int]
    counts: SourceCounts
    folder: Path
    """Of the cache."""
    numbers: np.ndarray
    """[rows]: the number of each in its file."""
    rows_in_files: list[tuple[Path, int]]

    def where(self, row: int) -> str:
        """How messages name it."""
        last = -1
        for file, rows in self.rows_in_files:
            last += rows
            if row <= last:
                return place(file, int(self.numbers[row]))
        raise IndexError(row)


@dataclass
class TooLong:
    """Rows over `data.max_tokens`: the first few, how many, and the longest."""

    shown: list[tuple[str, int]] = field(default_factory=list)
    count: int = 0
    longest: int = 0

    def add(self, where: Callable[[], str], tokens: int) -> None:
        self.count, self.longest = self.count + 1, max(self.longest, tokens)
        if len(self.shown) < SHOWN_PROBLEMS:
            self.shown.append((where(), tokens))

    def problems(self, max_tokens: int, setting: str) -> list[Problem]:
        if not self.count:
            return []
        count = "one row" if self.count == 1 else f"{self.count:,} rows"
        fix = f"data.max_tokens={self.longest} (keeps every row), data.on_too_long=drop (loses {count}) or data.on_too_long=truncate"
        limit = f"at most data.max_tokens={max_tokens:,}"
        problems = [Problem(path=where, got=f"a sample of {tokens:,} tokens", expected=limit) for where, tokens in self.shown]
        got = f"{count} longer than {max_tokens:,} tokens, the longest {self.longest:,}"
        return [*problems, Problem(path=setting, got=got, expected="none", fix=fix)]


def source_tokens(
    wanted: Wanted, source: Source, config: DataConfig, tokenizer: Any, cache: Path, *, show: bool, thoroughly: bool
) -> SourceTokens:
    """The tokens of `wanted`, opened as `source`, from the folder `cache` where they are there. UserError with the problems of its rows."""
    made_of = Fingerprint(source, tokenizer, config.train_on, cache / "digests", show_progress=show)

    def make(writer: EntryWriter) -> dict[str, Any]:
        facts = _tokenise(writer, source, wanted, config, tokenizer, show)
        made_of.check_unchanged()
        return facts

    def say(line: str) -> None:
        if show:
            print(f"{wanted.setting}: {line}", flush=True)

    entry, was_there = obtain(cache, made_of.key, make, say=say, thoroughly=thoroughly)
    say(f"{entry.facts['rows']:,} rows in tokens {'from the cache,' if was_there else 'are now in'} {entry.folder}")
    return _opened(entry, source, wanted, cache)


def _opened(entry: Entry, source: Source, wanted: Wanted, cache: Path) -> SourceTokens:
    facts, offsets, empty = entry.facts, entry.array("offsets"), Scratch(cache)
    if source.is_text:
        trained, trained_counts = AllButFirst(offsets), empty(facts["rows"], np.int32)
        for block in blocks(facts["rows"]):
            trained_counts[block] = np.diff(offsets[block.start : block.stop + 1]) - 1
    else:
        trained, trained_counts = entry.stored("trained"), entry.array("trained_counts")
    rows = TokenDataset(entry.stored("ids", facts["largest_id"]), trained, offsets, trained_counts=trained_counts, empty=empty)
    counts = SourceCounts(wanted.setting, wanted.path, files=len(source.files), read=facts["read"], dropped=Counter(facts["dropped"]))
    files = [(file, count) for (file, _), count in zip(source.files, facts["rows_of_files"], strict=True)]
    return SourceTokens(rows, source.is_text, set(facts["stop_ids"]), counts, entry.folder, entry.array("numbers"), files)


def _tokenise(writer: EntryWriter, source: Source, wanted: Wanted, config: DataConfig, tokenizer: Any, show: bool) -> dict[str, Any]:
    """Write the rows of `source` and return what else there is to know. Raises UserError."""
    counts = SourceCounts(wanted.setting, wanted.path, files=len(source.files))
    faults, too_long, stop_ids = Faults(), TooLong(), set()
    under_way: deque[Row] = deque()
    written = _RowWriter(writer, has_mask=not source.is_text)
    rows_of_files = dict.fromkeys((file for file, _ in source.files), 0)
    usable = _usable(source, faults, counts, under_way, config.train_on)
    encoded = encode_rows(usable, tokenizer, yields=source.yields, train_on=config.train_on, num_workers=config.num_workers)
    unit = "pieces of text" if source.is_text else "rows"
    for _, part in progress(encoded, f"tokenising {source.setting}", unit=unit, show=show):
        if isinstance(part, UserError):
            under_way.popleft()
            faults.add(*part.problems)
            continue
        written.append(part)
        if part.more:
            continue
        row = under_way.popleft()
        stop_ids.update(part.stops)
        if not source.is_text:
            if not part.trained.any():
                counts.dropped["no assistant turn to train on" if source.yields == "conversations" else "no token to train on"] += 1
                written.take_back()
                continue
            if len(part.ids) > config.max_tokens and config.on_too_long == "error":
                too_long.add(lambda row=row: row.where, len(part.ids))
        written.end_row(row.number)
        rows_of_files[row.file] += 1
    if faults.count:
        raise UserError(*faults.listed(source.setting), *too_long.problems(config.max_tokens, source.setting))
    if not written.rows:
        raise nothing_left(counts)
    written.flush()
    counts.kept = written.rows
    counts.check()
    return {
        "rows": written.rows,
        "read": counts.read,
        "dropped": dict(counts.dropped),
        "stop_ids": sorted(stop_ids),
        "largest_id": written.largest_id,
        "rows_of_files": list(rows_of_files.values()),
    }


def nothing_left(counts: SourceCounts) -> UserError:
    """P20: of an epoch that would train nothing."""
    reasons = "; ".join(f"{count} rows: {reason}" for reason, count in counts.dropped.items()) or "no rows"
    got = f"{counts.path}, of which nothing is left to train on ({reasons})"
    return UserError(Problem(path=counts.setting, got=got, expected="at least one usable row"))


class _RowWriter:
    """Rows to the arrays of an entry. A row may come in several parts."""

    def __init__(self, writer: EntryWriter, *, has_mask: bool) -> None:
        self._ids, self._offsets = writer.array("ids", np.int32), writer.array("offsets", np.int64)
        self._numbers = writer.array("numbers", np.int64)
        self._trained = writer.array("trained", np.bool_) if has_mask else None
        self._trained_counts = writer.array("trained_counts", np.int32) if has_mask else None
        self.rows, self.tokens, self.largest_id = 0, 0, 0
        self._waiting: list[Encoded] = []
        self._waiting_tokens = 0
        self._ends, self._row_numbers, self._counts = array("q", [0]), array("q"), array("i")

    def append(self, part: Encoded) -> None:
        assert self._trained is None or not part.trained[0], "the first token of a document has no predictor"
        self._waiting.append(part)
        self._waiting_tokens += len(part.ids)
        self.tokens += len(part.ids)
        if self._trained is None and self._waiting_tokens > FLUSHED_TOKENS:
            self.flush()

    def take_back(self) -> None:
        """What was appended last, a whole row with a mask."""
        part = self._waiting.pop()
        self._waiting_tokens -= len(part.ids)
        self.tokens -= len(part.ids)

    def end_row(self, number: int) -> None:
        self.rows += 1
        self._ends.append(self.tokens)
        self._row_numbers.append(number)
        if self._trained is not None:
            self._counts.append(int(np.count_nonzero(self._waiting[-1].trained)))
        if self._waiting_tokens > FLUSHED_TOKENS:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            ids = np.concatenate([part.ids for part in self._waiting])
            self.largest_id = max(self.largest_id, int(ids.max()))
            self._ids.append(ids)
            if self._trained is not None:
                self._trained.append(np.concatenate([part.trained for part in self._waiting]))
        self._offsets.append(np.array(self._ends, np.int64))
        self._numbers.append(np.array(self._row_numbers, np.int64))
        if self._trained_counts is not None:
            self._trained_counts.append(np.array(self._counts, np.int32))
        self._waiting, self._waiting_tokens = [], 0
        self._ends, self._row_numbers, self._counts = array("q"), array("q"), array("i")


def _usable(source: Source, faults: Faults, counts: SourceCounts, under_way: deque[Row], train_on: TrainOn) -> Iterator[tuple[str, Item]]:
    """The rows of `source` that say something, noted in `under_way`; the others are counted as dropped."""
    for row, item in source.items(faults):
        counts.read += not (isinstance(item, Passage) and item.goes_on)
        reason = _says_nothing(item, train_on)
        if reason:
            counts.dropped[reason] += 1
            continue
        if not (isinstance(item, Passage) and item.goes_on):
            under_way.append(row)
        yield row.where, item


def _says_nothing(item: Item, train_on: TrainOn) -> str | None:
    """Why a row is dropped before it is tokenised; None: it is not."""
    if isinstance(item, Passage):
        return "empty text" if item.is_whole and not item.text.strip() else None
    if isinstance(item, Pretokenised):
        return None if len(item.ids) else "no token"
    if isinstance(item, Completion):
        return "empty prompt" if not item.prompt else None if item.completion.strip() else "empty completion"
    answers = [turn for turn in item.turns if turn.role == "assistant"]
    if not answers:
        return "no assistant turn to train on"
    trained = [turn for turn in (answers[-1:] if train_on == "last" else answers) if turn.trained]
    return None if all(turn.content.strip() or turn.tool_calls for turn in trained) else "empty assistant turn"
