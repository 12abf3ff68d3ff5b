"""From the group `data` of a recipe to token data sets: read, tokenise, judge each row, hold out, cut text into chunks, pack, count.

`prepare` is the whole way, top to bottom. The first problems of all rows are reported together, and data on which nothing would be
trained are refused. Rows are held out by a pure function of (seed, number of rows), before text is chunked, so that no document lies on
both sides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from framework.config.errors import Problem, UserError
from framework.config.schema import DataConfig
from framework.data.dataset import TokenDataset, TokenDatasetBuilder, chunk
from framework.data.files import short_names
from framework.data.ledger import Ledger, SourceCounts
from framework.data.mix import joined, weighted
from framework.data.order import permutation
from framework.data.pack import pack
from framework.data.sources import SHOWN_PROBLEMS, Faults, Source, Wanted, training_sources, validation_sources
from framework.data.template import Encoded
from framework.data.tokenize import Item, encode_rows
from framework.data.turns import Completion
from framework.progress import progress

SOURCE_OF, VALIDATION_SOURCE_OF = "source_of.npy", "validation_source_of.npy"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What training needs of the data."""

    train: TokenDataset
    validation: TokenDataset | None
    ledger: Ledger
    stop_ids: tuple[int, ...]
    """Tokens that end a trained turn (for text: the document separator): generation has to stop at them."""
    source_of: np.ndarray | None = None
    """[samples] of `train`: the source of each, where sources have weights."""
    source_names: tuple[str, ...] = ()
    """Short, unique names of the sources that validation samples come from."""
    validation_source_of: np.ndarray | None = None
    """[samples] of `validation`: the place in `source_names` of the source of each."""

    def save(self, folder: Path) -> None:
        """Write for other processes. `folder/train/ready` comes last, so that a reader may wait for it."""
        folder.mkdir(parents=True, exist_ok=True)
        rest = {"validation": self.validation is not None, "stop_ids": self.stop_ids, "ledger": self.ledger.to_json()}
        rest |= {"weighted": self.source_of is not None, "source_names": self.source_names}
        (folder / "prepared.json").write_text(json.dumps(rest, indent=1))
        if self.validation is not None:
            self.validation.save(folder / "validation")
            np.save(folder / VALIDATION_SOURCE_OF, self.validation_source_of)
        if self.source_of is not None:
            np.save(folder / SOURCE_OF, self.source_of)
        self.train.save(folder / "train")

    @classmethod
    def load(cls, folder: Path) -> Prepared:
        """What `save` wrote, mapped from disk. Raises FileNotFoundError where it is not complete."""
        train = TokenDataset.load(folder / "train")
        rest = json.loads((folder / "prepared.json").read_text())
        validation = TokenDataset.load(folder / "validation") if rest["validation"] else None
        return cls(
            train=train,
            validation=validation,
            ledger=Ledger.from_json(rest["ledger"]),
            stop_ids=tuple(rest["stop_ids"]),
            source_of=np.load(folder / SOURCE_OF) if rest["weighted"] else None,
            source_names=tuple(rest["source_names"]),
            validation_source_of=np.load(folder / VALIDATION_SOURCE_OF) if rest["validation"] else None,
        )


@dataclass(frozen=True)
class _EncodedSource:
    """The usable rows of a source in tokens; a document is one row, however long."""

    rows: TokenDataset
    is_text: bool
    stop_ids: set[int]
    counts: SourceCounts


def prepare(config: DataConfig, tokenizer: Any, *, seed: int, show_progress: bool) -> Prepared:
    """Read and tokenise `config.train` and `config.validation`. Raises UserError with the problems of their rows."""
    parts, validation, counted, stop_ids = [], [], [], set()
    wanted, named = training_sources(config), validation_sources(config)
    for source in wanted:
        encoded = _encode(source, config, tokenizer, show_progress)
        kept, aside = encoded.rows, None
        if config.validation is None and config.validation_fraction > 0:
            kept, aside = _hold_out(encoded, config.validation_fraction, seed)
            validation.append(_samples(aside, encoded, config))
        parts.append(_samples(kept, encoded, config))
        counted.append((encoded.counts, kept, 0 if aside is None else len(aside)))
        stop_ids |= encoded.stop_ids
    parts = [_packed(part, config) for part in _mixed(parts, wanted, counted, seed)]
    ledger = Ledger([_counted(counts, kept, part, held_out=aside) for (counts, kept, aside), part in zip(counted, parts, strict=True)])
    validation = [_packed(part, config) for part in validation]
    for source in named:
        encoded = _encode(source, config, tokenizer, show_progress)
        validation.append(_packed(_samples(encoded.rows, encoded, config), config))
        ledger.sources.append(_counted(encoded.counts, encoded.rows, validation[-1], held_out=0))
    return Prepared(
        train=joined(parts),
        validation=joined(validation) if validation else None,
        ledger=ledger,
        stop_ids=tuple(sorted(stop_ids)),
        source_of=None if wanted[0].weight is None else _source_of(parts),
        source_names=tuple(short_names([source.path for source in named or wanted])) if validation else (),
        validation_source_of=_source_of(validation) if validation else None,
    )


def _source_of(parts: list[TokenDataset]) -> np.ndarray:
    """[samples] int64: for each sample of the joined `parts`, which one it is of."""
    return np.repeat(np.arange(len(parts)), [len(part) for part in parts])


def _mixed(parts: list[TokenDataset], wanted: list[Wanted], counted: list, seed: int) -> list[TokenDataset]:
    """What an epoch has of each source; with weights, how often is noted in the counts."""
    weights = [source.weight for source in wanted if source.weight is not None]
    if not weights:
        return parts
    taken = weighted(parts, weights, seed)
    for (counts, _, _), weight, part in zip(counted, weights, taken, strict=True):
        counts.weight, counts.passes = weight, part.passes
    return [part.samples for part in taken]


def _encode(wanted: Wanted, config: DataConfig, tokenizer: Any, show_progress: bool) -> _EncodedSource:
    source = wanted.open()
    counts = SourceCounts(wanted.setting, wanted.path, files=len(source.files))
    faults, too_long = Faults(), []
    builder = TokenDatasetBuilder()
    stop_ids: set[int] = set()
    usable = _usable(source, faults, counts)
    rows = encode_rows(usable, tokenizer, yields=source.yields, train_on=config.train_on, num_workers=config.num_workers)
    for where, row in progress(rows, f"tokenising {source.setting}", unit="rows", show=show_progress):
        if isinstance(row, UserError):
            faults.add(*row.problems)
            continue
        stop_ids.update(row.stops)
        if not source.is_text:
            if len(row.ids) > config.max_tokens and config.on_too_long == "error":
                too_long.append((where, len(row.ids)))
                continue
            row = _fitted(row, config, counts)
        elif config.packing and len(row.ids) < 2:
            row = "text of a single token, by itself nothing to train on"
        if isinstance(row, str):
            counts.dropped[row] += 1
            continue
        builder.add(row.ids, row.trained)
    problems = faults.listed(source.setting) + _too_long(too_long, config.max_tokens, source.setting)
    if problems:
        raise UserError(*problems)
    if not len(builder):
        reasons = "; ".join(f"{count} rows: {reason}" for reason, count in counts.dropped.items()) or "no rows"
        got = f"{wanted.path}, of which nothing is left to train on ({reasons})"
        raise UserError(Problem(path=source.setting, got=got, expected="at least one usable row"))
    return _EncodedSource(builder.build(), source.is_text, stop_ids, counts)


def _usable(source: Source, faults: Faults, counts: SourceCounts) -> Iterator[tuple[str, Item]]:
    """The rows of `source` that say something; the others are counted as dropped."""
    for where, item in source.items(faults):
        counts.read += 1
        reason = _says_nothing(item)
        if reason:
            counts.dropped[reason] += 1
        else:
            yield where, item


def _says_nothing(item: Item) -> str | None:
    """Why a row is dropped before it is tokenised; None: it is not."""
    if isinstance(item, str):
        return None if item.strip() else "empty text"
    if isinstance(item, Completion):
        return "empty prompt" if not item.prompt else None if item.completion.strip() else "empty completion"
    answers = [turn for turn in item.turns if turn.role == "assistant"]
    if not answers:
        return "no assistant turn to train on"
    return None if all(turn.content.strip() or turn.tool_calls for turn in answers) else "empty assistant turn"


def _fitted(row: Encoded, config: DataConfig, counts: SourceCounts) -> Encoded | str:
    """The row, cut to `data.max_tokens` where that is wished, or the reason why it is dropped."""
    if not row.trained.any():
        return "no assistant turn to train on"
    if len(row.ids) <= config.max_tokens:
        return row
    if config.on_too_long == "drop":
        return f"longer than data.max_tokens={config.max_tokens}"
    short = Encoded(row.ids[: config.max_tokens], row.trained[: config.max_tokens], row.stops)
    if not short.trained.any():
        return f"nothing to train on in the first data.max_tokens={config.max_tokens} tokens"
    counts.truncated += 1
    counts.cut_tokens += len(row.ids) - len(short.ids)
    counts.cut_trained_tokens += int(row.trained[config.max_tokens :].sum())
    return short


def _too_long(rows: list[tuple[str, int]], max_tokens: int, setting: str) -> list[Problem]:
    if not rows:
        return []
    longest = max(tokens for _, tokens in rows)
    count = "one row" if len(rows) == 1 else f"{len(rows):,} rows"
    fix = f"data.max_tokens={longest} (keeps every row), data.on_too_long=drop (loses {count}) or data.on_too_long=truncate"
    limit = f"at most data.max_tokens={max_tokens:,}"
    problems = [Problem(path=where, got=f"a sample of {tokens:,} tokens", expected=limit) for where, tokens in rows[:SHOWN_PROBLEMS]]
    got = f"{count} longer than {max_tokens:,} tokens, the longest {longest:,}"
    return [*problems, Problem(path=setting, got=got, expected="none", fix=fix)]


def _hold_out(encoded: _EncodedSource, fraction: float, seed: int) -> tuple[TokenDataset, TokenDataset]:
    """(kept, held out): `fraction` of the rows, at least one, each side in the order of the file."""
    rows = encoded.rows
    count = max(1, round(fraction * len(rows)))
    if count >= len(rows):
        got = f"{fraction} of {len(rows)} {'row' if len(rows) == 1 else 'rows'} of {encoded.counts.setting}"
        expected = "at least one row to train on and one to hold out (a .txt file is one row)"
        raise UserError(Problem(path="data.validation_fraction", got=got, expected=expected, fix="data.validation=/path/to/file"))
    order = permutation(seed, "held out", 0, len(rows))
    return rows.select(np.sort(order[count:])), rows.select(np.sort(order[:count]))


def _samples(rows: TokenDataset, encoded: _EncodedSource, config: DataConfig) -> TokenDataset:
    """What training sees of `rows`. Text becomes chunks: of one stream, or of each document by itself where documents are packed."""
    if encoded.is_text:
        return chunk((rows[i].input_ids for i in range(len(rows))), config.max_tokens, joined=not config.packing)
    return rows


def _packed(samples: TokenDataset, config: DataConfig) -> TokenDataset:
    """After sources were mixed, each by itself: samples cannot be chosen from packs, and a pack has one source."""
    return pack(samples, config.max_tokens) if config.packing else samples


def _counted(counts: SourceCounts, kept: TokenDataset, samples: TokenDataset, *, held_out: int) -> SourceCounts:
    """`counts` with what training sees of the source."""
    counts.kept, counts.held_out = len(kept), held_out
    counts.samples, counts.tokens, counts.trained_tokens = samples.documents, samples.total_tokens, samples.trained_tokens
    counts.packs = len(samples) if samples.is_packed else None
    counts.check()
    return counts
