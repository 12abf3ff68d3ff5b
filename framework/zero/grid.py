"""Which part of a flat space a rank holds, with shard groups. Pure arithmetic: the engine and the plan both ask here.

`groups` groups of `members` consecutive ranks make the world. What is sharded over a group is cut into one chunk per member; what is
sharded over the world has every chunk cut once more, into one part per group:

    full     | chunk 0              | chunk 1              | ...        chunk m: what member m of every group holds
    chunk m  | part 0 | part 1 | ...                                    part g of it: what member m of group g holds

So a gather over the world is one between groups (parts to a chunk) and one inside the group (chunks to the whole), both contiguous and in
place, and only the first, smaller one leaves the group (MiCS, arXiv:2205.00119; the layout is that of hierarchical all-gather).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from framework.config.schema import ZeroConfig
from framework.zero.comm import received_shards
from framework.zero.layout import ALIGN, Layout, UnitLayout
from framework.zero.policy import FULL, WORLD, Placement, Policy, policy_of


@dataclass(frozen=True)
class Grid:
    """The place of one rank."""

    groups: int
    members: int
    """Ranks of a group."""
    rank: int

    @property
    def group(self) -> int:
        return self.rank // self.members

    @property
    def member(self) -> int:
        return self.rank % self.members


def grid_of(policy: Policy, world_size: int, group_size: int | None, rank: int) -> Grid:
    """For a buffer. Where nothing is sharded, each rank is a group of its own. `group_size`: None for all ranks."""
    members = 1 if policy.optimizer is FULL else group_size or world_size
    return Grid(world_size // members, members, rank)


@dataclass(frozen=True)
class Extents:
    """Intervals of one layout's flat space on one rank."""

    padded: int
    """Elements of the whole, padding included."""
    chunk: slice
    """What this rank's group has in its memory on this rank."""
    shard: slice
    """Masters and optimizer state, a part of the chunk or all of it."""
    owned: slice
    """The part of the shard, counted from its beginning, of which this rank is the only owner in the world."""

    @property
    def chunk_numel(self) -> int:
        return self.chunk.stop - self.chunk.start

    @property
    def shard_numel(self) -> int:
        return self.shard.stop - self.shard.start

    def numel(self, placement: Placement) -> int:
        """Elements that a rank holds of what is placed so."""
        return self.padded if placement is FULL else self.shard_numel if placement is WORLD else self.chunk_numel


def extents_of(layout: Layout, policy: Policy, grid: Grid) -> Extents:
    """Where a rank's parts lie."""
    parts = grid.groups if policy.optimizer is WORLD else 1
    shard_numel = layout.shard_numel(grid.members * parts)
    chunk_numel = shard_numel * parts
    chunk_start = grid.member * chunk_numel
    shard_start = chunk_start + (grid.group * shard_numel if parts > 1 else 0)
    owned = slice(0, shard_numel)
    if parts < grid.groups:  # every group has the same shard: equal shares, to whole alignments
        share = -(-shard_numel // (grid.groups * ALIGN)) * ALIGN
        owned = slice(min(grid.group * share, shard_numel), min((grid.group + 1) * share, shard_numel))
    chunk, shard = slice(chunk_start, chunk_start + chunk_numel), slice(shard_start, shard_start + shard_numel)
    return Extents(grid.members * chunk_numel, chunk, shard, owned)


class Place(NamedTuple):
    """Of one layout on one rank: where its state lives."""

    policy: Policy
    extents: Extents
    grid: Grid

    @property
    def in_parts(self) -> bool:
        return self.extents.shard != self.extents.chunk

    def received_numel(self, *, messages: bool, adds: bool) -> int:
        """Elements that a sum over the ranks needs room for at a time, beside its input and output. See `comm.received_shards`."""
        in_place = self.policy.grads is FULL or (self.in_parts and self.policy.grads is WORLD)
        inside = received_shards(self.grid.members, messages=messages, in_place=in_place, add=adds and not in_place)
        return max(inside * self.extents.chunk_numel, self.across_numel(messages=messages, adds=adds))

    def across_numel(self, *, messages: bool, adds: bool) -> int:
        """Those of the part between groups."""
        if not self.in_parts:
            return 0
        in_place = self.policy.grads is not WORLD
        parts = received_shards(self.grid.groups, messages=messages, in_place=in_place, add=adds and not in_place)
        return parts * self.extents.shard_numel


def place_of(layout: Layout, usual: Policy, world_size: int, group_size: int | None, rank: int) -> Place:
    """`usual`: the policy of layouts that have none of their own."""
    policy = layout.policy or usual
    grid = grid_of(policy, world_size, group_size, rank)
    return Place(policy, extents_of(layout, policy, grid), grid)


def keep_gathered(units: list[UnitLayout], zero: ZeroConfig, world_size: int, compute_itemsize: int) -> list[UnitLayout]:
    """`units`, of which as many as `zero.keep_gathered_bytes` allows are never released: blocks in forward order, then the root."""
    room, usual = zero.keep_gathered_bytes, policy_of(zero)
    members = zero.secondary_shard_size or zero.shard_size
    root, *blocks = units
    kept: dict[str, UnitLayout] = {}
    for unit in (*blocks, root):
        places = {layout: place_of(layout, usual, world_size, members, 0) for layout in unit.layouts}
        released = [layout for layout, place in places.items() if place.policy.params_at_rest is not FULL]
        nbytes = sum(layout.itemsize(compute_itemsize) * places[layout].extents.padded for layout in released)
        if released and nbytes <= room:
            room -= nbytes
            layouts = tuple(replace(each, policy=places[each].policy.kept()) if each in released else each for each in unit.layouts)
            kept[unit.name] = replace(unit, layouts=layouts)
    return [kept.get(unit.name, unit) for unit in units]
