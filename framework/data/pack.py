"""Packing: samples of different lengths side by side in packs of at most so many tokens, so that little of a batch is padding.

    lengths 5 3 2 2 1, packs of 6      [5 1] [3 2] [2]        best fit, longest first: each sample goes where least room is left

A pack is one sample of the packed data set; the documents in it stay apart, in attention, positions and labels. Packs are a pure
function of the lengths and their order, so every rank, epoch and number of workers sees the same ones.

Unusual: not one sample after the other but one length after the other. Best fit fills the fullest pack that takes a length as often
as it fits before it looks for the next one, so equal lengths are placed in one stroke, and a million samples take about a second. All
that it needs to know of the samples is how many there are of each length.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort

import numpy as np

from framework.data.dataset import TokenDataset
from framework.data.on_disk import BLOCK_ITEMS, Empty, blocks, places_in_order


def pack(dataset: TokenDataset, max_tokens: int) -> TokenDataset:
    """`dataset` with its samples in packs of at most `max_tokens`, which must be at least its longest sample.

    Packs are in the order of their first samples, the samples of a pack in the order of the data set.
    """
    assert not dataset.is_packed
    samples, empty = len(dataset), dataset.empty
    lengths = empty(samples, np.int32)
    for block in blocks(samples):
        lengths[block] = dataset.lengths_of(block)
    pack_of, packs = best_fit(lengths, max_tokens, empty)
    samples_before = np.zeros(packs + 1, np.int64)  # of each pack, and of the end
    for block in blocks(samples):
        samples_before[1:] += np.bincount(pack_of[block], minlength=packs)
    np.cumsum(samples_before, out=samples_before)
    starts, sizes, counts = empty(samples, np.int64), empty(samples, np.int32), empty(samples, np.int32)
    following = samples_before[:-1].copy()
    for block in blocks(samples):
        places = places_in_order(pack_of[block], following)
        starts[places], sizes[places], counts[places] = dataset.offsets[block], lengths[block], dataset.trained_counts[block]
    documents = dataset.cut(starts, sizes, counts)
    offsets = documents.offsets[samples_before]
    return TokenDataset(documents.ids, documents.trained, offsets, documents.offsets, trained_counts=counts, empty=empty)


def best_fit(lengths: np.ndarray, max_tokens: int, empty: Empty = np.empty) -> tuple[np.ndarray, int]:
    """[samples] int32: the pack of each sample of `lengths` [samples], by best-fit decreasing, and how many packs there are; packs are
    numbered by their first sample.

    At most 11/9 of the fewest packs that could do, plus 4 (Johnson et al., SIAM J. Comput. 3, 1974); real data fill them nearly whole.
    """
    samples, of_length = len(lengths), np.zeros(max_tokens + 1, np.int64)
    for block in blocks(samples):
        of_length += np.bincount(lengths[block], minlength=max_tokens + 1)
    assert samples and not of_length[0]
    filled, packs, at = empty(samples, np.int32), _OpenPacks(max_tokens), 0  # packs of the samples by falling length
    for length in np.flatnonzero(of_length)[::-1].tolist():
        end = at + int(of_length[length])
        while at < end:
            chosen = packs.fill(length, min(end - at, BLOCK_ITEMS))
            filled[at : at + len(chosen)] = chosen
            at += len(chosen)
    following = np.cumsum(of_length[::-1])[::-1] - of_length
    pack_of, number, numbered = empty(samples, np.int32), empty(packs.count, np.int32), 0
    number[:] = -1
    for block in blocks(samples):
        found = filled[places_in_order(lengths[block], following)]
        new, first = np.unique(found[number[found] < 0], return_index=True)
        number[new[np.argsort(first)]] = np.arange(numbered, numbered + len(new))
        numbered += len(new)
        pack_of[block] = number[found]
    return pack_of, packs.count


class _OpenPacks:
    """Packs with room left, by their room in tokens."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.count = max_tokens, 0
        self._rooms: list[int] = []  # ascending, each once
        self._packs: dict[int, array[int]] = {}

    def fill(self, length: int, samples: int) -> np.ndarray:
        """Packs for the next of `samples` samples of `length`, at least one: those with the smallest room that takes them, or new ones."""
        at = bisect_left(self._rooms, length)
        room = self._rooms[at] if at < len(self._rooms) else self.max_tokens
        each = room // length
        wanted = -(-samples // each)
        if at < len(self._rooms):
            chosen = self._packs[room][:wanted]
            del self._packs[room][:wanted]
            if not self._packs[room]:
                del self._packs[room], self._rooms[at]
        else:
            chosen = array("i", range(self.count, self.count + wanted))
            self.count += wanted
        placed = min(samples, each * len(chosen))
        in_last = placed - each * (len(chosen) - 1)
        self._put(chosen[:-1], room - each * length)
        self._put(chosen[-1:], room - in_last * length)
        return np.repeat(chosen, each)[:placed]

    def _put(self, packs: array[int], room: int) -> None:
        if not packs or room == 0:
            return
        if room not in self._packs:
            insort(self._rooms, room)
            self._packs[room] = array("i")
        self._packs[room].extend(packs)
