"""Whole matrices out of shards and back: in a round, each rank gets some matrices whole, changes them, and gives every rank its pieces.

    round = Round(matrices, comm.size, comm.rank)         who gets which follows from shapes alone, the same on every rank
    exchange = Exchange(round, comm, bf16, device)
    exchange.piece(i).copy_(...)                          this rank's piece of matrix i
    for i, matrix in exchange.wholes():                   one uneven all-to-all; then those that this rank got
        exchange.put(i, changed)
    exchange.give_back()                                  another one; `piece(i)` holds what became of it

Unusual: one buffer is sent and the other one received on the way there, and the other way round on the way back: the parts lie at the same
places.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.zero.comm import Comm
from framework.zero.layout import Slot

MATRICES_PER_RANK = 4
"""In a round: enough for all ranks to have about as much to do, few enough to need little memory."""


@dataclass(frozen=True)
class Matrix:
    """A matrix in a flat space of which every rank has `shard_numel` elements."""

    slot: Slot
    shard_numel: int

    def part(self, rank: int) -> tuple[int, int]:
        """Which of its elements `rank` has: [start, stop), in the flattened matrix."""
        start, stop = (bound * self.shard_numel - self.slot.offset for bound in (rank, rank + 1))
        start = min(max(start, 0), self.slot.numel)
        return start, max(min(stop, self.slot.numel), start)

    def part_numel(self, rank: int) -> int:
        start, stop = self.part(rank)
        return stop - start

    @property
    def cost(self) -> int:
        """Multiplications of one Newton-Schulz iteration."""
        small, large = sorted(self.slot.shape)
        return small * small * (2 * large + small)


def rounds(count: int, ranks: int) -> Iterator[slice]:
    """Of `count` matrices, which are in a round together."""
    together = MATRICES_PER_RANK * ranks
    for start in range(0, count, together):
        yield slice(start, min(start + together, count))


class Round:
    """Which rank gets which of `matrices`, and where their parts lie in what `rank` sends and receives."""

    def __init__(self, matrices: Sequence[Matrix], ranks: int, rank: int) -> None:
        self.matrices = matrices
        self.got_by = _share_out(matrices, ranks)
        """Numbers of matrices, by rank."""
        self.piece_at: dict[int, slice] = {}
        """Where this rank's piece of a matrix lies, ordered by the rank that gets it."""
        self.part_at: dict[int, list[slice]] = {i: [] for i in self.got_by[rank]}
        """Where the parts of a matrix that this rank gets lie, ordered by the rank that has them."""
        self.pieces_by_rank, self.parts_by_rank = [], []
        """Elements that are sent to and received from each rank on the way there."""
        at = 0
        for got in self.got_by:
            begin = at
            for i in got:
                self.piece_at[i] = slice(at, at + matrices[i].part_numel(rank))
                at = self.piece_at[i].stop
            self.pieces_by_rank.append(at - begin)
        at = 0
        for other in range(ranks):
            begin = at
            for i, parts in self.part_at.items():
                parts.append(slice(at, at + matrices[i].part_numel(other)))
                at = parts[-1].stop
            self.parts_by_rank.append(at - begin)

    @property
    def numel(self) -> int:
        """Elements of both buffers."""
        return sum(self.pieces_by_rank) + sum(self.parts_by_rank)

    def sent_numel(self, rank: int) -> int:
        """Elements that this rank sends to others, there and back."""
        return self.numel - self.pieces_by_rank[rank] - self.parts_by_rank[rank]


def _share_out(matrices: Sequence[Matrix], ranks: int) -> list[list[int]]:
    """The costliest first, each to the rank that has least to do."""
    loads, got = [(0, rank) for rank in range(ranks)], [[] for _ in range(ranks)]
    for i in sorted(range(len(matrices)), key=lambda i: (-matrices[i].cost, i)):
        load, rank = heapq.heappop(loads)
        got[rank].append(i)
        heapq.heappush(loads, (load + matrices[i].cost, rank))
    return [sorted(numbers) for numbers in got]


class Exchange:
    """A round under way, see the module's docstring."""

    def __init__(self, plan: Round, comm: Comm, dtype: torch.dtype, device: torch.device) -> None:
        self._plan, self._comm = plan, comm
        self._pieces = torch.empty(sum(plan.pieces_by_rank), dtype=dtype, device=device)
        self._parts = torch.empty(sum(plan.parts_by_rank), dtype=dtype, device=device)

    def piece(self, i: int) -> Tensor:
        """This rank's piece of matrix `i` [n], which may be empty."""
        return self._pieces[self._plan.piece_at[i]]

    def wholes(self) -> Iterator[tuple[int, Tensor]]:
        """(number, matrix) of those that this rank gets."""
        self._comm.all_to_all(self._parts, self._pieces, self._plan.parts_by_rank, self._plan.pieces_by_rank).wait()
        for i, parts in self._plan.part_at.items():
            yield i, torch.cat([self._parts[at] for at in parts]).view(self._plan.matrices[i].slot.shape)

    def put(self, i: int, matrix: Tensor) -> None:
        """What matrix `i`, which this rank has got, has become."""
        flat = matrix.reshape(-1)
        for rank, at in enumerate(self._plan.part_at[i]):
            self._parts[at] = flat[slice(*self._plan.matrices[i].part(rank))]

    def give_back(self) -> None:
        self._comm.all_to_all(self._pieces, self._parts, self._plan.pieces_by_rank, self._plan.parts_by_rank).wait()
