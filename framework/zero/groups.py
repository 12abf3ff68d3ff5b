"""Which ranks talk to which: the process groups of an engine, inside shard groups and between them, for gathers and for reductions.

Gathers and reductions have groups of their own, because what is queued on one NCCL communicator runs in that order, and the gather that
backward waits for must not stand behind a reduction. On gloo messages are told apart by tags, and the directions share a group.

[Note: making groups] Each rank makes only the groups that it is in, without a word to the others (`use_local_synchronization`): 2 or 3
whatever the number of ranks, in milliseconds. They are kept for the next engine over the same ranks, as a process group ends
with its parent only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from framework import torch_private
from framework.zero.comm import Comm, Handle, Traffic
from framework.zero.grid import Grid

Direction = Literal["gather", "reduce"]

_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]] = WeakKeyDictionary()
"""By parent: the groups of (direction, global ranks). See [Note: making groups]."""


@dataclass(frozen=True)
class Route:
    """The ways of one direction: `inside` a shard group, and `across` to the ranks with the same chunk in other groups."""

    inside: Comm
    across: Comm
    stream: torch.cuda.Stream | None
    """Where the second of two communications waits for the first."""

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: int) -> Handle:
        """Fill `out` [groups * members * S] with every rank's `shard` [S]: parts to this member's chunk, then chunks to the whole."""
        if self.across.size == 1:
            return self.inside.all_gather(out, shard, tag)
        chunk_numel = out.numel() // self.inside.size
        chunk = out[self.inside.rank * chunk_numel : (self.inside.rank + 1) * chunk_numel]
        first = self.across.all_gather(chunk, shard, tag)
        return first.then(lambda: self.inside.all_gather(out, chunk, tag), self.stream)


class Groups:
    """The communicators of one engine over `group`, made when a buffer first needs them; `group=None` stands for this rank alone.

    Every rank must ask in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.traffic = Traffic()
        self.world = Comm(group, self.traffic)
        """For everything that is neither a gather nor a reduction, and for gathers over all ranks."""
        self._device, self._alone = device, Comm(None, self.traffic)
        self._comms: dict[tuple[str, tuple[int, ...]], Comm] = {}
        self._routes: dict[tuple[Direction, int, bool], Route] = {}

    def route(self, direction: Direction, grid: Grid, *, across: bool) -> Route:
        """Of a buffer that lies on `grid`; `across`: whether it ever goes between groups."""
        key = direction, grid.members, across
        if key not in self._routes:
            inside = [grid.group * grid.members + member for member in range(grid.members)]
            across = [group * grid.members + grid.member for group in range(grid.groups if across else 1)]
            stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" and len(inside) > 1 and len(across) > 1 else None
            shared = direction == "gather" or grid.members == 1  # nothing of this buffer is ever gathered then
            self._routes[key] = Route(self._comm(direction, inside, shared), self._comm(direction, across, shared), stream)
        return self._routes[key]

    def _comm(self, direction: Direction, ranks: list[int], shared: bool) -> Comm:
        """`shared`: where these are all ranks, whether their own group will do."""
        if len(ranks) == 1:
            return self._alone
        part = self.world.size < dist.get_world_size()  # NCCL splits a communicator with all ranks of it, and others are not here
        if len(ranks) == self.world.size and (shared or part or self.world.messages):
            return self.world
        key = "both" if self.world.messages else direction, tuple(ranks)
        if key not in self._comms:
            self._comms[key] = Comm(self._group(*key), self.traffic)
        return self._comms[key]

    def _group(self, direction: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        parent = self.world.group
        everyone = dist.get_process_group_ranks(parent)
        made, key = _MADE.setdefault(parent, {}), (direction, tuple(everyone[rank] for rank in ranks))
        if key not in made:
            timeout = torch_private.timeout_of(parent, self._device)
            made[key] = dist.new_group(list(key[1]), timeout=timeout, use_local_synchronization=True)
        return made[key]
