"""Several sources as one: one after the other, or in proportion to weights, counted in tokens.

    tokens    A 9,000   B 1,000          weights 1 and 1: an epoch of 10,000 tokens, half of A and B five times; the next one has the
                                         other half of A

A mix is an endless stream of samples. Every source goes through all of its own, in a new order each time, and a sample's place among the
others is where its middle token would be if each source gave tokens at the rate of its weight. So at any time each source has had its
share of the tokens, give or take half a sample. An epoch is a part of the stream with a fixed number of samples, about as many tokens as
all sources together.

Unusual: no epoch needs those before it. Passes over a source are equally long, so that one only has to look at the passes around an epoch
to know where it begins: what is in it is a pure function of (seed, epoch, data).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from framework.config.errors import Problem, UserError
from framework.data.dataset import TokenDataset
from framework.data.flat import Chained
from framework.data.on_disk import Empty
from framework.data.order import permutation

FIRST_MARGIN = 1 / 64
"""Of an epoch: how far from its estimated place its beginning and its end are looked for at first."""


@dataclass(frozen=True)
class Mix:
    """Sources of a joined data set in proportion to their shares."""

    starts: tuple[int, ...]
    """First sample of each source among all of them, and the end of the last one: [sources + 1]."""
    shares: tuple[float, ...]
    """Of the tokens of any part of the stream; they sum to 1."""
    passes: tuple[float, ...]
    """How often an epoch goes over each source, on average."""
    samples_per_epoch: int
    """What a batch counts: samples, or packs of them."""
    documents_per_epoch: int
    """The same, or how many samples the packs hold, on average."""
    trained_tokens_per_epoch: int
    """On average."""

    def order(self, lengths: np.ndarray, seed: int, epoch: int, *, shuffle: bool) -> np.ndarray:
        """[samples_per_epoch] int64: the samples of an epoch, in order. lengths [samples]: tokens of each one of the joined data set.

        Without `shuffle` every source goes through its samples as they are.
        """
        first, last = epoch * self.samples_per_epoch, (epoch + 1) * self.samples_per_epoch  # places in the stream
        sources = [
            _Stream(seed, number, start, lengths[start:stop], share, shuffle)
            for number, (start, stop, share) in enumerate(zip(self.starts, self.starts[1:], self.shares, strict=False))
        ]
        samples_per_token = sum(source.samples_per_token for source in sources)
        margin = FIRST_MARGIN * self.samples_per_epoch / samples_per_token
        while True:
            begin, end = max(0.0, first / samples_per_token - margin), last / samples_per_token + margin
            before, samples, places = zip(*(source.between(begin, end) for source in sources), strict=True)
            skipped = first - sum(before)
            if skipped >= 0 and sum(before) + sum(map(len, samples)) >= last:
                merged = np.argsort(np.concatenate(places), kind="stable")
                return np.concatenate(samples)[merged[skipped : skipped + self.samples_per_epoch]]
            margin *= 2


class _Stream:
    """The samples of one source, again and again."""

    def __init__(self, seed: int, number: int, start: int, lengths: np.ndarray, share: float, shuffle: bool) -> None:
        """start: its first sample in the joined data set; lengths [samples] of its own."""
        self.seed, self.number, self.start, self.lengths, self.share, self.shuffle = seed, number, start, lengths, share, shuffle
        self.tokens = int(lengths.sum(dtype=np.int64))
        self.samples_per_token = share * len(lengths) / self.tokens
        """Of the mix."""

    def between(self, begin: float, end: float) -> tuple[int, np.ndarray, np.ndarray]:
        """How many samples have a place before the token `begin` of the mix; those that have one up to `end`, and their places."""
        passes = range(int(begin * self.share / self.tokens), int(end * self.share / self.tokens) + 1)
        before, samples, places = 0, [], []
        for number in passes:
            order = permutation(self.seed, "epoch", number, len(self.lengths), stream=self.number) if self.shuffle else None
            lengths = self.lengths if order is None else self.lengths[order]
            at = (number * self.tokens + np.cumsum(lengths, dtype=np.int64) - lengths / 2) / self.share
            first, last = at.searchsorted((begin, end))
            if number == passes[0]:
                before = number * len(lengths) + int(first)
            samples.append(self.start + (np.arange(first, last) if order is None else order[first:last]))
            places.append(at[first:last])
        return before, np.concatenate(samples), np.concatenate(places)


def mix_of(sources: Sequence[TokenDataset], weights: Sequence[float]) -> Mix:
    """How `joined(sources)` is mixed. Raises UserError where an epoch would not have a single sample of one of them."""
    shares, tokens = np.array(weights) / sum(weights), np.array([source.total_tokens for source in sources])
    passes = shares * tokens.sum() / tokens
    samples = passes * [len(source) for source in sources]
    if samples.min() < 1:
        rare = int(samples.argmin())
        listed = ", ".join(f"{weight:g}" for weight in weights)
        got = f"{weights[rare]:g} of the weights {listed}: less than one sample in an epoch of {tokens.sum():,} tokens"
        expected = f"{weights[rare] / samples[rare]:.2g} or more, for a sample in each epoch"
        raise UserError(Problem(path=f"data.train[{rare}].weight", got=got, expected=expected))
    return Mix(
        starts=(0, *np.cumsum([len(source) for source in sources]).tolist()),
        shares=tuple(shares.tolist()),
        passes=tuple(passes.tolist()),
        samples_per_epoch=round(samples.sum()),
        documents_per_epoch=round(sum(times * source.documents for times, source in zip(passes, sources, strict=True))),
        trained_tokens_per_epoch=round(sum(times * source.trained_tokens for times, source in zip(passes, sources, strict=True))),
    )


def joined(parts: Sequence[TokenDataset]) -> TokenDataset:
    """All samples of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    empty, documents = parts[0].empty, sum(part.documents for part in parts)
    return TokenDataset(
        Chained([part.ids for part in parts]),
        Chained([part.trained for part in parts]),
        _following([part.offsets for part in parts], empty),
        _following([part.document_offsets for part in parts], empty) if parts[0].is_packed else None,
        trained_counts=np.concatenate([part.trained_counts for part in parts], out=empty(documents, np.int32)),
        empty=empty,
    )


def _following(offsets: Sequence[np.ndarray], empty: Empty) -> np.ndarray:
    """Offsets of several arrays ([items + 1] each, the last one the length of the array) in the array that they make together."""
    together = empty(sum(len(each) - 1 for each in offsets) + 1, np.int64)
    together[0] = at = start = 0
    for each in offsets:
        np.add(each[1:], start, out=together[at + 1 : at + len(each)])
        at, start = at + len(each) - 1, start + int(each[-1])
    return together
