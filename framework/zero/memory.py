"""Bytes of model state on one rank: a meter that the engine's allocations go through, and the closed formula to hold it against.

Model state is parameters, gradients, master weights and optimizer state, with the temporary buffers that gathering and reducing need;
activations are not part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from framework.config.schema import OffloadConfig
from framework.zero.grid import Place, place_of
from framework.zero.layout import Layout, UnitLayout
from framework.zero.policy import FULL, GROUP, WORKERS, WORLD, Placement, Policy, offloaded


@dataclass
class MemoryMeter:
    """Current and peak bytes, in all and by kind (`params`, `grads`, `master`, `optimizer`, `gathered`, `reducing`, `staging`,
    `secondary`)."""

    current: int = 0
    peak: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    peak_by_kind: dict[str, int] = field(default_factory=dict)

    def set(self, kind: str, nbytes: int) -> None:
        """Record that `nbytes` of `kind` are there now."""
        self.add(kind, nbytes - self.by_kind.get(kind, 0))

    def add(self, kind: str, nbytes: int) -> None:
        """Record that `nbytes` of `kind` were allocated (negative: freed)."""
        self.current += nbytes
        self.by_kind[kind] = self.by_kind.get(kind, 0) + nbytes
        if self.current > self.peak:
            self.peak, self.peak_by_kind = self.current, dict(self.by_kind)


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of model state per rank by the formula: what stays, and the most that comes on top while a step runs. `host` lies in host
    memory, all else on the device."""

    params: int
    grads: int
    master: int
    optimizer: int
    temporary: int
    host: int = 0

    @property
    def total(self) -> int:
        """On the device."""
        return self.params + self.grads + self.master + self.optimizer + self.temporary


def state_bytes(
    units: list[UnitLayout],
    policy: Policy,
    world_size: int,
    *,
    group_size: int | None = None,
    rank: int = 0,
    compute_itemsize: int,
    master_itemsize: int = 4,
    optimizer_itemsize: int = 8,
    prefetch_bytes: int = 0,
    messages: bool = False,
    offload: OffloadConfig | None = None,
) -> StateBytes:
    """Peak model-state bytes of one rank, from the layouts alone.

    `policy`: of layouts that have none of their own. `group_size`: ranks of a shard group, None for all. `optimizer_itemsize`: bytes of
    optimizer state per trained element (AdamW with two fp32 moments: 8). `messages`: whether sums are made of point-to-point messages
    (gloo), which need room for what they receive.

    Temporary are, where the policy shards them: the root's parameters and gradients for the whole of a backward; of the blocks, one
    gathered and beside it those that the prefetch budget admits (at least one), and what is kept for their backward; two blocks'
    gradients in the ring. The most is reached in the middle of backward, or at its end when the root's gradients are reduced.
    """
    offload = offload or OffloadConfig()
    layouts = [layout for unit in units for layout in unit.layouts]
    trained = [layout for layout in layouts if layout.requires_grad]
    offloads = dict(zip(trained, offloaded(offload, [layout.numel for layout in trained]), strict=True))
    places = {layout: place_of(layout, policy, world_size, group_size, rank) for layout in layouts}
    params = grads = master = optimizer = host = 0
    for layout, (own, extents, _) in places.items():
        params_on_host = offload.params != "none" and own.params_at_rest is not FULL
        held = layout.itemsize(compute_itemsize) * extents.numel(own.params_at_rest)
        params, host = (params, host + held) if params_on_host else (params + held, host)
        if not layout.requires_grad:
            continue
        grads += master_itemsize * extents.numel(own.grads)
        has_master = compute_itemsize != master_itemsize or offloads[layout] is not params_on_host
        masters = master_itemsize * extents.shard_numel if has_master else 0
        moments = optimizer_itemsize * sum(piece.numel for piece in layout.pieces(extents.shard.start, extents.shard.stop))
        if offloads[layout]:
            host += masters + moments
        else:
            master, optimizer = master + masters, optimizer + moments
    if staged := [layout for layout in trained if offloads[layout]]:
        copied = [layout for layout in staged if offload.params == "none" or places[layout].policy.params_at_rest is FULL]
        largest_grad = max(places[layout].extents.shard_numel for layout in staged) * master_itemsize
        largest_copy = max((places[layout].extents.shard_numel for layout in copied), default=0) * compute_itemsize
        host += min(WORKERS, len(staged)) * (largest_grad + largest_copy)
    temporary = _temporary(units, places, compute_itemsize, master_itemsize, prefetch_bytes, messages)
    return StateBytes(params=params, grads=grads, master=master, optimizer=optimizer, temporary=temporary, host=host)


def _temporary(
    units: list[UnitLayout], places: dict[Layout, Place], compute_itemsize: int, master_itemsize: int, prefetch_bytes: int, messages: bool
) -> int:
    """The most that a step needs beside what stays."""

    def gathered(unit: UnitLayout, *kept: Placement) -> int:
        """Bytes of parameters that are released between uses; `kept`: only those that are kept so until backward."""
        return sum(
            layout.itemsize(compute_itemsize) * places[layout].extents.padded
            for layout in unit.layouts
            if places[layout].policy.params_at_rest is not FULL and (not kept or places[layout].policy.params_kept in kept)
        )

    def secondary(unit: UnitLayout) -> int:
        return sum(
            layout.itemsize(compute_itemsize) * places[layout].extents.chunk_numel
            for layout in unit.layouts
            if places[layout].in_parts and places[layout].policy[1:3] == (WORLD, GROUP)
        )

    def in_ring(unit: UnitLayout) -> list[int]:
        """Bytes of gradients on their way, of each buffer that has room for them only then."""
        trained = [places[layout] for layout in unit.layouts if layout.requires_grad]
        return [master_itemsize * place.extents.padded for place in trained if place.policy.grads is not FULL]

    def received(unit: UnitLayout) -> int:
        return sum(master_itemsize * places[layout].received_numel for layout in unit.layouts if layout.requires_grad) if messages else 0

    root, blocks = units[0], units[1:]

    def largest(measure: Callable[[UnitLayout], int]) -> int:
        return max((measure(block) for block in blocks), default=0)

    ring = min(2, len(blocks))
    of_blocks = [in_ring(block) for block in blocks]
    flats = min(max(map(len, of_blocks), default=0) + 1, sum(map(len, of_blocks)))
    always = gathered(root) + sum(in_ring(root)) + flats * max((nbytes for block in of_blocks for nbytes in block), default=0)
    passing = largest(lambda block: gathered(block, WORLD, GROUP))
    released = sum(gathered(block, WORLD, GROUP) > 0 for block in blocks)
    ahead = max(1, prefetch_bytes // passing) if passing and prefetch_bytes else 0
    in_backward = 0
    for under_way in range(1, ring + 1):  # blocks whose gradients are being summed; those before the last one are released
        left = blocks[: len(blocks) - under_way + 1]
        held = min(1 + ahead, released, len(left)) * passing + sum(gathered(block, FULL) for block in left)
        held += sum(secondary(block) for block in blocks[: len(blocks) - max(1, under_way - 1)])
        in_backward = max(in_backward, always + held + under_way * largest(received))
    at_end = always + received(root) + min(1, len(blocks)) * largest(received)
    return max(in_backward, at_end)
