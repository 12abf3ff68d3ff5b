"""Bytes of model state on one rank: a meter that the engine's allocations go through, and the closed formula to hold it against.

Model state is parameters, gradients, master weights and optimizer state, with the temporary buffers that gathering and reducing need;
activations are not part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from framework.config.schema import MasterWeights, OffloadConfig, ZeroConfig
from framework.zero import wire
from framework.zero.grid import Place, place_of
from framework.zero.layout import Layout, Piece, UnitLayout, span
from framework.zero.nvme import STAGING_BYTES, stored_bytes
from framework.zero.policy import FULL, GROUP, WORLD, Placement, Policy, offloaded, workers


@dataclass
class MemoryMeter:
    """Current and peak bytes, in all and by kind (`params`, `grads`, `master`, `optimizer`, `gathered`, `gathering`, `reducing`,
    `residual`, `staging`, `secondary`; `exchange` in the steps of Muon and Adafactor; `activations` that were offloaded)."""

    current: int = 0
    peak: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    peak_by_kind: dict[str, int] = field(default_factory=dict)

    def set(self, kind: str, nbytes: int) -> None:
        """Record that `nbytes` of `kind` are there now."""
        self.add(kind, nbytes - self.by_kind.get(kind, 0))

    def add(self, kind: str, nbytes: int) -> None:
        """Record that `nbytes` of `kind` were allocated (negative: freed)."""
        self.by_kind[kind] = self.by_kind.get(kind, 0) + nbytes
        self.current = sum(self.by_kind.values())
        if self.current > self.peak:
            self.peak, self.peak_by_kind = self.current, dict(self.by_kind)


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of model state per rank by the formula: what stays, and the most that comes on top while a step runs. `host` lies in host
    memory, `disk` on the disk, all else on the device."""

    params: int
    grads: int
    master: int
    optimizer: int
    temporary: int
    residual: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """On the device."""
        return self.params + self.grads + self.master + self.optimizer + self.temporary + self.residual


def state_bytes(
    units: list[UnitLayout],
    policy: Policy,
    world_size: int,
    *,
    group_size: int | None = None,
    rank: int = 0,
    compute_itemsize: int,
    master_itemsize: int = 4,
    master_weights: MasterWeights = "full",
    optimizer_itemsize: int = 8,
    optimizer_of: Callable[[Sequence[Piece]], int] | None = None,
    step_bytes: int = 0,
    prefetch_bytes: int = 0,
    micro_batches: int = 1,
    messages: bool = False,
    offload: OffloadConfig | None = None,
    compression: ZeroConfig | None = None,
) -> StateBytes:
    """Peak model-state bytes of one rank, from the layouts alone.

    `policy`: of layouts that have none of their own. `group_size`: ranks of a shard group, None for all. `optimizer_itemsize`: bytes of
    optimizer state per trained element (AdamW with two fp32 moments: 8) and for the gaps between parameters, which our kernels update with
    them; `optimizer_of`: those of the pieces of a layout, where it is otherwise. `step_bytes`: what the optimizer's step needs for itself.
    `messages`: whether sums are made of point-to-point messages (gloo), which need room for what they receive. `micro_batches` of a step.
    `compression`: what it says of that counts.

    Temporary are, where the policy shards them: the root's parameters and gradients for the whole of a backward; of the blocks, one
    gathered and beside it those that the prefetch budget admits (at least one), and what is kept for their backward; two blocks'
    gradients in the ring. Shards of gradients come to be in the course of the first backward of a step. So the most is reached in one of
    its moments: when a block's reduction begins, or at the end that of the root, which is taken to compute before and after the blocks, as
    an embedding and a head do.
    """
    offload, compression = offload or OffloadConfig(), compression or ZeroConfig()
    layouts = [layout for unit in units for layout in unit.layouts]
    trained = [layout for layout in layouts if layout.requires_grad]
    offloads = dict(zip(trained, offloaded(offload, [layout.numel for layout in trained]), strict=True))
    places = {layout: place_of(layout, policy, world_size, group_size, rank) for layout in layouts}
    params = grads = master = optimizer = residual = host = disk = 0
    in_blocks = set()
    for layout, (own, extents, _) in places.items():
        params_at = offload.params if own.params_at_rest is not FULL else "none"
        masters_at = offload.optimizer if offloads.get(layout) else "none"
        held = layout.itemsize(compute_itemsize) * extents.numel(own.params_at_rest)
        if layout.requires_grad and params_at == masters_at == "none" and wire.gathers_in_blocks(compression, layout, places[layout]):
            in_blocks.add(layout)
            held = wire.packed_bytes(extents.shard_numel)
        if params_at == "nvme":
            disk += stored_bytes(held)
        else:
            params, host = (params, host + held) if params_at == "cpu" else (params + held, host)
        if not layout.requires_grad:
            continue
        grads += master_itemsize * extents.numel(own.grads)
        residual += wire.residual_bytes(compression, places[layout])
        has_master = layout in in_blocks or layout.itemsize(compute_itemsize) != master_itemsize or masters_at != params_at
        kept = "full" if layout.fp32 else master_weights
        masters = {"full": master_itemsize, "remainder": 2, "none": 0}[kept] * extents.shard_numel if has_master else 0
        pieces = layout.pieces(extents.shard.start, extents.shard.stop)
        moments = optimizer_itemsize * span(pieces) if optimizer_of is None else optimizer_of(pieces)
        if masters_at == "nvme":
            disk += stored_bytes(masters) + optimizer_itemsize // master_itemsize * stored_bytes(master_itemsize * extents.shard_numel)
        elif masters_at == "cpu":
            host += masters + moments
        else:
            master, optimizer = master + masters, optimizer + moments
    if staged := [layout for layout in trained if offloads[layout]]:
        from_disk = master_itemsize + optimizer_itemsize if offload.optimizer == "nvme" else 0
        rooms = max(places[layout].extents.shard_numel for layout in staged) * (master_itemsize + from_disk)
        copied = [layout for layout in staged if offload.params == "none" or places[layout].policy.params_at_rest is FULL]
        copies = max((places[layout].extents.shard_numel * layout.itemsize(compute_itemsize) for layout in copied), default=0)
        host += min(workers(offload), len(staged)) * (rooms + copies)
    if "nvme" in (offload.optimizer, offload.params):
        host += STAGING_BYTES
    moving = _Moving(compression, frozenset(in_blocks), master_itemsize, adds=micro_batches > 1, messages=messages)
    temporary = _temporary(units, places, compute_itemsize, moving, step_bytes, prefetch_bytes) - grads
    return StateBytes(
        params=params, grads=grads, master=master, optimizer=optimizer, temporary=temporary, residual=residual, host=host, disk=disk
    )


@dataclass(frozen=True)
class _Moving:
    """How parameters and gradients travel."""

    compression: ZeroConfig
    in_blocks: frozenset[Layout]
    """Those whose shard is kept as the int8 blocks that are gathered."""
    master_itemsize: int
    adds: bool
    """Whether micro-batches are added up."""
    messages: bool


class _Block(NamedTuple):
    """Bytes of a block's parameters in a backward."""

    released: int
    """Gathered for it, and after it no more."""
    kept: int
    """Gathered since the forward."""
    arriving: int
    """Besides, while they are gathered."""
    secondary: int


def _temporary(
    units: list[UnitLayout], places: dict[Layout, Place], compute_itemsize: int, moving: _Moving, step_bytes: int, prefetch_bytes: int
) -> int:
    """The most that a step needs beside what stays, with all gradients."""
    adds, master_itemsize = moving.adds, moving.master_itemsize

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

    def in_ring(unit: UnitLayout, *fp32: bool) -> list[int]:
        """Bytes of gradients on their way, of each buffer that has room for them only then; `fp32`: of these kinds."""
        trained = [places[layout] for layout in unit.layouts if layout.requires_grad and layout.fp32 in fp32]
        return [master_itemsize * place.extents.padded for place in trained if place.policy.grads is not FULL]

    def ring_bytes(used: list[UnitLayout]) -> int:
        """The ring when `used` blocks have passed through it."""
        nbytes = 0
        for fp32 in (False, True):
            of_used = [in_ring(block, fp32) for block in (blocks if adds else used)]
            flats = min(max(map(len, of_used), default=0) + 1, sum(map(len, of_used)))
            nbytes += flats * max((size for block in blocks for size in in_ring(block, fp32)), default=0)
        return nbytes

    def made(reduced: list[UnitLayout]) -> int:
        """Gradients that stay between micro-batches, when those of `reduced` have been."""
        trained = [layout for unit in units for layout in unit.layouts if layout.requires_grad]
        there = (
            trained
            if adds
            else [each for each in trained if places[each].policy.grads is FULL or any(each in unit.layouts for unit in reduced)]
        )
        return master_itemsize * sum(places[layout].extents.numel(places[layout].policy.grads) for layout in there)

    def received(unit: UnitLayout) -> int:
        trained = [places[layout] for layout in unit.layouts if layout.requires_grad]
        how = {"messages": moving.messages, "adds": adds}
        return sum(wire.reduce_room(moving.compression, place, master_itemsize, **how) for place in trained)

    def gathering(unit: UnitLayout, *kept: Placement) -> int:
        """What a gather under way holds besides its result."""
        layouts = [layout for layout in unit.layouts if not kept or places[layout].policy.params_kept in kept]
        return sum(wire.gather_room(moving.compression, each, places[each], kept_in_blocks=each in moving.in_blocks) for each in layouts)

    root, blocks = units[0], units[1:]

    def largest(measure: Callable[[UnitLayout], int]) -> int:
        return max((measure(block) for block in blocks), default=0)

    def ahead_of(coming: Sequence[_Block]) -> list[_Block]:
        """Those gathered ahead of the blocks that come next, see `prefetch.py`; what is kept until backward is there already and counts."""
        chosen, nbytes = [], 0
        for block in coming if prefetch_bytes else ():
            if nbytes and block.released and nbytes + block.released > prefetch_bytes:
                break
            chosen.append(block)
            nbytes += block.released + block.kept
        return chosen

    root_grads = sum(in_ring(root, False, True))
    always = root_grads + gathered(root)
    most = made(units) + step_bytes  # in the optimizer's step, when only what stays between micro-batches is there
    most = max(most, always + made(units) + ring_bytes(blocks) + received(root) + min(1, len(blocks)) * largest(received))
    before = made(units) + ring_bytes(blocks) + root_grads if adds else made([])  # in the micro-batches before this one
    first = ahead_of([_Block(gathered(block), 0, gathering(block), 0) for block in blocks])
    most = max(most, before + gathered(root) + gathering(root) + sum(block.released + block.arriving for block in first))
    in_backward = [
        _Block(
            gathered(block, WORLD, GROUP),
            gathered(block, FULL),
            gathering(block, WORLD, GROUP),
            0 if block is blocks[-1] else secondary(block),
        )
        for block in blocks
    ]
    for done in range(len(blocks) + 1):  # blocks, the last one first, whose reduction has begun; that of the one before is under way
        left = len(blocks) - done
        reducing = always + made(blocks[left:]) + ring_bytes(blocks[left:]) + min(2, done) * largest(received)
        for there in (in_backward[:left], in_backward[: left + 1] if done else []):  # the last one is about to compute, or has
            held = [*there[-1:], *ahead_of(there[-2::-1])]
            arriving = sum(block.arriving for block in held) - (there[-1].arriving if len(there) > left else 0)
            kept = sum(block.kept + block.secondary for block in there)
            most = max(most, reducing + kept + arriving + sum(block.released for block in held))
    return most


def disk_traffic(
    units: list[UnitLayout],
    policy: Policy,
    world_size: int,
    *,
    group_size: int | None = None,
    compute_itemsize: int,
    master_itemsize: int = 4,
    optimizer_itemsize: int = 8,
    prefetch_bytes: int = 0,
    micro_batches: int = 1,
    offload: OffloadConfig,
) -> tuple[int, int]:
    """Bytes that one rank reads from the disk and writes to it in a step with `micro_batches` and all parameters in use.

    Optimizer state is read and written once. Shards of parameters are read whenever they are gathered from there: for forward and, where
    they were released in between and no group keeps them, for backward, which the last block, if prefetching knows it, and the root are
    not.
    """
    layouts = [layout for unit in units for layout in unit.layouts]
    trained = [layout for layout in layouts if layout.requires_grad]
    offloads = dict(zip(trained, offloaded(offload, [layout.numel for layout in trained]), strict=True))
    places = {layout: place_of(layout, policy, world_size, group_size, 0) for layout in layouts}

    def params_at(layout: Layout) -> str:
        return offload.params if places[layout].policy.params_at_rest is not FULL else "none"

    def shard_bytes(layout: Layout) -> int:
        return stored_bytes(layout.itemsize(compute_itemsize) * places[layout].extents.shard_numel)

    read = written = 0
    for layout in trained:
        masters_at = offload.optimizer if offloads[layout] else "none"
        if masters_at == "nvme":
            of_value = stored_bytes(master_itemsize * places[layout].extents.shard_numel)
            state = (1 + optimizer_itemsize // master_itemsize) * of_value
            read, written = read + state, written + state
        if params_at(layout) == "nvme" and (masters_at != "nvme" or layout.itemsize(compute_itemsize) != master_itemsize):
            written += shard_bytes(layout)
    for index, unit in enumerate(units):
        unit_is_kept = index == 0 or (prefetch_bytes > 0 and index == len(units) - 1)
        for layout in unit.layouts:
            if params_at(layout) == "nvme":
                own, in_parts = places[layout].policy, places[layout].in_parts
                is_kept = unit_is_kept or own.params_kept is FULL or (in_parts and own.params_kept is GROUP)
                read += micro_batches * (1 if is_kept else 2) * shard_bytes(layout)
    return read, written
