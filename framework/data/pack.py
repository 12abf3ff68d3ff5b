"""Packing: samples of different lengths side by side in packs of at most so many tokens, so that little of a batch is padding.

    lengths 5 3 2 2 1, packs of 6      [5 1] [3 2] [2]        best fit, longest first: each sample goes where least room is left

A pack is one sample of the packed data set; the documents in it stay apart, in attention, positions and labels. Packs are a pure
function of the lengths and their order, so every rank, epoch and number of workers sees the same ones.

Unusual: not one sample after the other but one length after the other. Best fit fills the fullest pack that takes a length as often
as it fits before it looks for the next one, so equal lengths are placed in one stroke, and a million samples take about a second.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from framework.data.dataset import TokenDataset


def pack(dataset: TokenDataset, max_tokens: int) -> TokenDataset:
    """`dataset` with its samples in packs of at most `max_tokens`, which must be at least its longest sample.

    Packs are in the order of their first samples, the samples of a pack in the order of the data set.
    """
    assert not dataset.is_packed
    pack_of = best_fit(dataset.lengths, max_tokens)
    order = np.argsort(pack_of, kind="stable")
    samples_before = np.searchsorted(pack_of[order], np.arange(pack_of.max() + 2))  # of each pack, and of the end
    documents = dataset.select(order)
    offsets = documents.offsets[samples_before]
    return TokenDataset(documents.ids, documents.trained, offsets, documents.offsets, trained_counts=documents.trained_counts)


def best_fit(lengths: np.ndarray, max_tokens: int) -> np.ndarray:
    """[samples] int64: the pack of each sample of `lengths` [samples], by best-fit decreasing; packs are numbered by their first sample.

    At most 11/9 of the fewest packs that could do, plus 4 (Johnson et al., SIAM J. Comput. 3, 1974); real data fill them nearly whole.
    """
    assert len(lengths) and 0 < lengths.min() and lengths.max() <= max_tokens
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    pack_of = np.empty(len(lengths), np.int64)  # in the order of `order`
    packs = _OpenPacks(max_tokens)
    starts = np.flatnonzero(np.diff(ordered, prepend=0))  # where another length begins
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(ordered)], strict=True):
        while start < stop:
            filled = packs.fill(int(ordered[start]), stop - start)
            pack_of[start : start + len(filled)] = filled
            start += len(filled)
    by_sample = np.empty_like(pack_of)
    by_sample[order] = pack_of
    return _numbered_by_first_sample(by_sample)


class _OpenPacks:
    """Packs with room left, by their room in tokens."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.count = max_tokens, 0
        self._rooms: list[int] = []  # ascending, each once
        self._packs: dict[int, list[int]] = {}

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
            chosen = list(range(self.count, self.count + wanted))
            self.count += wanted
        placed = min(samples, each * len(chosen))
        in_last = placed - each * (len(chosen) - 1)
        self._put(chosen[:-1], room - each * length)
        self._put(chosen[-1:], room - in_last * length)
        return np.repeat(chosen, each)[:placed]

    def _put(self, packs: list[int], room: int) -> None:
        if not packs or room == 0:
            return
        if room not in self._packs:
            insort(self._rooms, room)
            self._packs[room] = []
        self._packs[room].extend(packs)


def _numbered_by_first_sample(pack_of: np.ndarray) -> np.ndarray:
    _, first, inverse = np.unique(pack_of, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[inverse]
