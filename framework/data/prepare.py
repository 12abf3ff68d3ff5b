"""From the group `data` of a recipe to token data sets: tokens of each source, over-long rows, held-out rows, chunks, mix, packs, counts.

`prepare` is the whole way, top to bottom. The first problems of all rows are reported together, and data on which nothing would be
trained are refused. Rows are held out by a pure function of (seed, number of rows), before text is chunked, so that no document lies on
both sides.

Unusual: tokens come from the cache (`source_tokens.py`) and stay there. All that is done here is choosing among them, so it takes a moment,
and what is noted of each sample, some 20 bytes, is on the disk, too (`on_disk.py`): memory is about the same for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from framework.config.errors import Problem, UserError
from framework.config.schema import DataConfig
from framework.data.cache import cache_folder
from framework.data.dataset import TokenDataset, chunk
from framework.data.files import short_names
from framework.data.handoff import hand_over, take_over
from framework.data.ledger import Ledger, SourceCounts
from framework.data.mix import Mix, joined, mix_of
from framework.data.on_disk import blocks
from framework.data.order import permutation
from framework.data.pack import pack
from framework.data.source_tokens import SourceTokens, TooLong, nothing_left, source_tokens
from framework.data.sources import Wanted, training_sources, validation_sources


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What training needs of the data."""

    train: TokenDataset
    validation: TokenDataset | None
    ledger: Ledger
    stop_ids: tuple[int, ...]
    """Tokens that end a trained turn (for text: the document separator): generation has to stop at them."""
    mix: Mix | None = None
    """Which samples of `train` an epoch has, where sources have weights; None: each once."""
    source_names: tuple[str, ...] = ()
    """Short, unique names of the sources that validation samples come from."""
    validation_source_of: np.ndarray | None = None
    """[samples] of `validation`: the place in `source_names` of the source of each."""
    folders: tuple[Path, ...] = ()
    """Of the cache, one for each source."""

    def save(self, folder: Path) -> None:
        """Write for other processes of this machine."""
        hand_over(self, folder)

    @classmethod
    def load(cls, folder: Path) -> Prepared:
        """What `save` wrote, mapped from disk. Raises FileNotFoundError where it is not complete."""
        return take_over(folder)


@dataclass(frozen=True)
class _Fitted:
    """The rows of a source that are used, none longer than it may be."""

    rows: TokenDataset
    is_text: bool
    counts: SourceCounts


def prepare(config: DataConfig, tokenizer: Any, *, seed: int, show_progress: bool, thoroughly: bool = False) -> Prepared:
    """Tokens of `config.train` and `config.validation`. Raises UserError with the problems of their rows.

    Without `train`, what `validation` names is all there is (an evaluation), and it stands for both.
    `thoroughly`: what is in the cache is compared with its digests to the last byte.
    """
    named = validation_sources(config)
    wanted = [] if named and config.train is None else training_sources(config)
    opened = {one.setting: one.open() for one in (*wanted, *named)}  # all of them, before anything is tokenised
    cache, folders, stop_ids = cache_folder(config.cache_dir), [], set()

    def fitted(source: Wanted) -> _Fitted:
        tokens = source_tokens(source, opened[source.setting], config, tokenizer, cache, show=show_progress, thoroughly=thoroughly)
        folders.append(tokens.folder)
        stop_ids.update(tokens.stop_ids)
        return _Fitted(_of_legal_length(tokens, config), tokens.is_text, tokens.counts)

    parts, validation, counted = [], [], []
    for source in wanted:
        found = fitted(source)
        kept, aside = found.rows, None
        if config.validation is None and config.validation_fraction > 0:
            kept, aside = _hold_out(found, config.validation_fraction, seed)
            validation.append(_samples(aside, found, config))
        parts.append(_samples(kept, found, config))
        counted.append((found.counts, kept, 0 if aside is None else len(aside)))
    parts = [_packed(part, config) for part in parts]
    mix = _mix(parts, wanted, counted)
    ledger = Ledger([_counted(counts, kept, part, held_out=aside) for (counts, kept, aside), part in zip(counted, parts, strict=True)])
    validation = [_packed(part, config) for part in validation]
    for source in named:
        found = fitted(source)
        validation.append(_packed(_samples(found.rows, found, config), config))
        ledger.sources.append(_counted(found.counts, found.rows, validation[-1], held_out=0))
    return Prepared(
        train=joined(parts or validation),
        validation=joined(validation) if validation else None,
        ledger=ledger,
        stop_ids=tuple(sorted(stop_ids)),
        mix=mix,
        source_names=tuple(short_names([source.path for source in named or wanted])) if validation else (),
        validation_source_of=_source_of(validation) if validation else None,
        folders=tuple(folders),
    )


def _of_legal_length(tokens: SourceTokens, config: DataConfig) -> TokenDataset:
    """The rows that are used, none longer than `data.max_tokens`; the others are counted. UserError where there must not be others."""
    rows, counts, limit = tokens.rows, tokens.counts, config.max_tokens
    if tokens.is_text:
        single = _by_length(rows, lambda lengths: lengths < 2) if config.packing else np.zeros(len(rows), dtype=bool)
        return _without(rows, single, "text of a single token, by itself nothing to train on", counts)
    if rows.longest <= limit:
        return rows
    long = _by_length(rows, lambda lengths: lengths > limit)
    if config.on_too_long == "drop":
        return _without(rows, long, f"longer than data.max_tokens={limit}", counts)
    if config.on_too_long == "truncate":
        return _truncated(rows, np.flatnonzero(long), limit, counts)
    too_long = TooLong()
    for row in np.flatnonzero(long):
        too_long.add(lambda row=row: tokens.where(row), len(rows[int(row)]))
    raise UserError(*too_long.problems(limit, counts.setting))


def _by_length(rows: TokenDataset, is_meant: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """[rows] bool: those whose length is meant."""
    return np.concatenate([is_meant(rows.lengths_of(block)) for block in blocks(len(rows))])


def _without(rows: TokenDataset, dropped: np.ndarray, reason: str, counts: SourceCounts) -> TokenDataset:
    """dropped [rows] bool"""
    number = int(np.count_nonzero(dropped))
    if not number:
        return rows
    counts.dropped[reason] += number
    if number == len(rows):
        raise nothing_left(counts)
    return rows.keep(~dropped)


def _truncated(rows: TokenDataset, long: np.ndarray, limit: int, counts: SourceCounts) -> TokenDataset:
    """The rows `long` cut to `limit` tokens; those of which nothing is left to train on are dropped."""
    lengths, trained_counts = np.minimum(rows.lengths, limit), np.array(rows.trained_counts)
    trained_counts[long] = [np.count_nonzero(rows[int(row)].trained[:limit]) for row in long]
    cut = long[trained_counts[long] > 0]
    counts.truncated += len(cut)
    counts.cut_tokens += int((rows.lengths[cut] - limit).sum())
    counts.cut_trained_tokens += int((rows.trained_counts[cut] - trained_counts[cut]).sum())
    short = rows.cut(rows.offsets[:-1], lengths, trained_counts)
    return _without(short, trained_counts == 0, f"nothing to train on in the first data.max_tokens={limit} tokens", counts)


def _mix(parts: list[TokenDataset], wanted: list[Wanted], counted: list) -> Mix | None:
    """Of sources with weights; how often an epoch goes over each is noted in the counts."""
    weights = [source.weight for source in wanted if source.weight is not None]
    if not weights:
        return None
    mix = mix_of(parts, weights)
    for (counts, _, _), weight, passes in zip(counted, weights, mix.passes, strict=True):
        counts.weight, counts.passes = weight, passes
    return mix


def _hold_out(found: _Fitted, fraction: float, seed: int) -> tuple[TokenDataset, TokenDataset]:
    """(kept, held out): `fraction` of the rows, at least one, each side in the order of the file."""
    rows = found.rows
    count = max(1, round(fraction * len(rows)))
    if count >= len(rows):
        got = f"{fraction} of {len(rows)} {'row' if len(rows) == 1 else 'rows'} of {found.counts.setting}"
        expected = "at least one row to train on and one to hold out (a .txt file is one row)"
        raise UserError(Problem(path="data.validation_fraction", got=got, expected=expected, fix="data.validation=/path/to/file"))
    aside = np.zeros(len(rows), dtype=bool)
    aside[permutation(seed, "held out", 0, len(rows), empty=rows.empty)[:count]] = True
    return rows.keep(~aside), rows.keep(aside)


def _samples(rows: TokenDataset, found: _Fitted, config: DataConfig) -> TokenDataset:
    """What training sees of `rows`. Text becomes chunks: of one stream, or of each document by itself where documents are packed."""
    return chunk(rows, config.max_tokens, joined=not config.packing) if found.is_text else rows


def _packed(samples: TokenDataset, config: DataConfig) -> TokenDataset:
    """Each source by itself: a pack has one source."""
    return pack(samples, config.max_tokens) if config.packing else samples


def _source_of(parts: list[TokenDataset]) -> np.ndarray:
    """[samples] int64: for each sample of the joined `parts`, which one it is of."""
    return np.repeat(np.arange(len(parts)), [len(part) for part in parts])


def _counted(counts: SourceCounts, kept: TokenDataset, samples: TokenDataset, *, held_out: int) -> SourceCounts:
    """`counts` with what an epoch sees of the source."""
    counts.kept, counts.held_out = len(kept), held_out
    seen = (samples.documents, samples.total_tokens, samples.trained_tokens, len(samples))
    counts.samples, counts.tokens, counts.trained_tokens, packs = (round(counts.passes * number) for number in seen)
    counts.packs = packs if samples.is_packed else None
    counts.check()
    return counts
