"""The order of samples: a pure function of (seed, purpose, epoch, samples), the same on every rank, machine and version.

Shuffling sorts by raw 64-bit words of a PCG64 stream. numpy promises that those never change (NEP 19), which it does not promise for
its `permutation`; an order that changed with an upgrade would break resuming inside an epoch.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from framework.data.on_disk import BLOCK_ITEMS, Empty, blocks, places_in_order

BUCKET_BITS = 8
BUCKETS = 1 << BUCKET_BITS
PURPOSES = {"epoch": 0, "held out": 1}


def permutation(
    seed: int, purpose: Literal["epoch", "held out"], epoch: int, samples: int, *, stream: int = 0, empty: Empty = np.empty
) -> np.ndarray:
    """[samples] int64, each of 0 ... samples - 1 once. `stream` tells apart several of one purpose, such as those of sources.

    Many samples are sorted in buckets by the first bits of their words, in arrays that `empty` makes.
    """
    entropy = [seed % 2**64, PURPOSES[purpose], epoch, *([stream] if stream else [])]
    if samples <= BLOCK_ITEMS:
        return np.argsort(_words(entropy).random_raw(samples), kind="stable")
    sizes, words = np.zeros(BUCKETS, np.int64), _words(entropy)
    for block in blocks(samples):
        sizes += np.bincount(_bucket(words.random_raw(block.stop - block.start)), minlength=BUCKETS)
    ends, words = np.cumsum(sizes), _words(entropy)
    keys, order, following = empty(samples, np.uint64), empty(samples, np.int64), ends - sizes
    for block in blocks(samples):
        drawn = words.random_raw(block.stop - block.start)
        places = places_in_order(_bucket(drawn), following)
        keys[places], order[places] = drawn, np.arange(block.start, block.stop)
    for start, stop in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        order[start:stop] = order[start:stop][np.argsort(keys[start:stop], kind="stable")]
    return order


def _words(entropy: list[int]) -> np.random.PCG64:
    return np.random.PCG64(np.random.SeedSequence(entropy))


def _bucket(words: np.ndarray) -> np.ndarray:
    return (words >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
