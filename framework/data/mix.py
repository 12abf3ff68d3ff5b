"""Several sources as one: one after the other, or in proportion to weights, counted in tokens.

    tokens    A 9,000   B 1,000          weights 1 and 1: an epoch of 10,000 tokens, half of A once and B five times

An epoch of the mix has as many tokens as all sources together; a source is repeated, or only a part of it is taken, until its share of
them is right. What is taken is a pure function of the seed. `order.interleaved` then spreads every source evenly over an epoch.

Unusual: where sources are so small that whole samples cannot make up their shares, an epoch is made longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from framework.config.errors import Problem, UserError
from framework.data.dataset import TokenDataset
from framework.data.flat import Chained
from framework.data.order import permutation

MOST_DEVIATION = 0.005
"""Of a source's share of the tokens of an epoch, relative to its weight."""
LENGTHS = (1, 2, 4, 8, 16, 32, 64)
"""Of an epoch, in tokens of all sources together."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What an epoch of the mix takes of one source."""

    samples: TokenDataset
    passes: float
    """Tokens taken / tokens of the source."""


def weighted(sources: Sequence[TokenDataset], weights: Sequence[float], seed: int) -> list[Taken]:
    """Of each source, samples with tokens in proportion to its weight. Raises UserError where no epoch of bearable length has them."""
    shares = np.array(weights) / sum(weights)
    total = sum(source.total_tokens for source in sources)
    for length in LENGTHS:
        chosen = [
            _chosen(source, share * total * length, seed, number)
            for number, (source, share) in enumerate(zip(sources, shares, strict=True))
        ]
        tokens = np.array([source.lengths[indices].sum() for source, indices in zip(sources, chosen, strict=True)])
        if np.all(np.abs(tokens / tokens.sum() / shares - 1) <= MOST_DEVIATION):
            return [
                Taken(samples=source.select(indices), passes=float(count / source.total_tokens))
                for source, indices, count in zip(sources, chosen, tokens, strict=True)
            ]
    got = f"weights {', '.join(f'{weight:g}' for weight in weights)} for sources of {total:,} tokens together"
    raise UserError(
        Problem(path="data.train", got=got, expected="more data, or weights that are less far apart: a sample is too large a part")
    )


def joined(parts: Sequence[TokenDataset]) -> TokenDataset:
    """All samples of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    return TokenDataset(
        Chained([part.ids for part in parts]),
        Chained([part.trained for part in parts]),
        _following([part.offsets for part in parts]),
        _following([part.document_offsets for part in parts]) if parts[0].is_packed else None,
        trained_counts=np.concatenate([part.trained_counts for part in parts]),
    )


def _following(offsets: Sequence[np.ndarray]) -> np.ndarray:
    """Offsets of several arrays ([items + 1] each, the last one the length of the array) in the array that they make together."""
    starts = np.cumsum([0, *(each[-1] for each in offsets[:-1])])
    return np.concatenate([[0], *(each[1:] + start for each, start in zip(offsets, starts, strict=True))])


def _chosen(source: TokenDataset, tokens: float, seed: int, number: int) -> np.ndarray:
    """Indices of samples with about so many tokens together: all of them a number of times, and some once more."""
    times, rest = divmod(tokens, source.total_tokens)
    order = permutation(seed, "mix", 0, len(source), stream=number)
    ends = np.concatenate([[0], np.cumsum(source.lengths[order])])
    once_more = order[: int(np.argmin(np.abs(ends - rest)))]
    return np.concatenate([np.tile(np.arange(len(source)), int(times)), np.sort(once_more)])
