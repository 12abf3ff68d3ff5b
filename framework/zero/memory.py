"""Bytes of model state on one rank: a meter that the engine's allocations go through, and the closed formula to hold it against.

Model state is parameters, gradients, master weights and optimizer state, with the temporary buffers that gathering and reducing need;
activations are not part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from framework.config.schema import OffloadConfig, ZeroConfig
from framework.zero.layout import Layout, UnitLayout
from framework.zero.policy import FULL, SHARDED, WORKERS, Policy, offloaded
from framework.zero.wire import packed_bytes


@dataclass
class MemoryMeter:
    """Current and peak bytes, in all and by kind (`params`, `grads`, `master`, `optimizer`, `gathered`, `gathering`, `reducing`,
    `residual`, `staging`)."""

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
    residual: int = 0
    """Error feedback of compressed reductions."""
    host: int = 0

    @property
    def total(self) -> int:
        """On the device."""
        return self.params + self.grads + self.master + self.optimizer + self.temporary + self.residual


def state_bytes(
    units: list[UnitLayout],
    policy: Policy,
    world_size: int,
    *,
    rank: int = 0,
    compute_itemsize: int,
    master_itemsize: int = 4,
    optimizer_itemsize: int = 8,
    prefetch_bytes: int = 0,
    messages: bool = False,
    offload: OffloadConfig | None = None,
    compression: ZeroConfig | None = None,
) -> StateBytes:
    """Peak model-state bytes of one rank, from the layouts alone.

    `optimizer_itemsize`: bytes of optimizer state per trained element (AdamW with two fp32 moments: 8). `messages`: whether sums are
    made of point-to-point messages (gloo), which need room for what they receive. `compression`: what it says of that counts.

    Temporary are, where the policy shards them: the root's parameters and gradients for the whole of a backward; of the blocks, one
    gathered and beside it those that the prefetch budget admits (at least one); two blocks' gradients in the ring. The most is reached
    in the middle of backward, at its end when the root's gradients are reduced, or when the root is gathered.
    """
    shards, offload = world_size if policy.optimizer is SHARDED else 1, offload or OffloadConfig()
    compression = compression or ZeroConfig()
    gathers_int8 = compression.gather_compression == "int8" and policy.params_at_rest is SHARDED and shards > 1
    reduces = compression.reduce_compression if shards > 1 else "none"
    trained = [layout for unit in units for layout in unit.layouts if layout.requires_grad]
    offloads = dict(zip(trained, offloaded(offload, [layout.numel for layout in trained]), strict=True))
    params_on_host = offload.params != "none" and policy.params_at_rest is SHARDED
    params = grads = master = optimizer = residual = host = 0

    def in_blocks(layout: Layout) -> bool:
        """Whether the shard is kept as the int8 blocks that are gathered."""
        return gathers_int8 and layout.requires_grad and not (offloads[layout] or params_on_host)

    for layout in (layout for unit in units for layout in unit.layouts):
        shard, full = layout.shard_numel(shards), layout.padded(shards)
        held = layout.itemsize(compute_itemsize) * (full if policy.params_at_rest is FULL else shard)
        if in_blocks(layout):
            held = packed_bytes(shard)
        params, host = (params, host + held) if params_on_host else (params + held, host)
        if not layout.requires_grad:
            continue
        grads += master_itemsize * (full if policy.grads is FULL else shard)
        residual += 4 * full if compression.error_feedback and reduces == "int8" else 0
        has_master = in_blocks(layout) or compute_itemsize != master_itemsize or offloads[layout] is not params_on_host
        masters = master_itemsize * shard if has_master else 0
        moments = optimizer_itemsize * sum(piece.numel for piece in layout.shard_pieces(rank if shards > 1 else 0, shards))
        if offloads[layout]:
            host += masters + moments
        else:
            master, optimizer = master + masters, optimizer + moments
    staged = [layout.shard_numel(shards) for layout in trained if offloads[layout]]
    if staged:
        host += min(WORKERS, len(staged)) * max(staged) * (master_itemsize + (0 if params_on_host else compute_itemsize))

    def gathered(unit: UnitLayout) -> int:
        return sum(layout.itemsize(compute_itemsize) * layout.padded(shards) for layout in unit.layouts)

    def reducing(unit: UnitLayout) -> int:
        return master_itemsize * sum(layout.padded(shards) for layout in unit.layouts if layout.requires_grad)

    def gathering(unit: UnitLayout) -> int:
        """What a gather under way holds besides its result: the blocks of all ranks, and its own where they are made for it."""
        if not gathers_int8:
            return 0
        floats = [layout for layout in unit.layouts if layout.integer is None]
        made = sum(packed_bytes(layout.shard_numel(shards)) for layout in floats if not in_blocks(layout))
        return made + sum(packed_bytes(layout.padded(shards)) for layout in floats)

    def received(unit: UnitLayout) -> int:
        """What a reduction under way holds besides its input."""
        trained_here = [layout for layout in unit.layouts if layout.requires_grad]
        if reduces != "none":  # what is sent, as much that is received, and the sum
            packed = packed_bytes if reduces == "int8" else lambda numel: 2 * numel
            return sum(2 * packed(layout.padded(shards)) + master_itemsize * layout.shard_numel(shards) for layout in trained_here)
        return master_itemsize * sum((shards - 1) * layout.shard_numel(shards) for layout in trained_here) if messages else 0

    root, blocks = units[0], units[1:]

    def largest(measure: Callable[[UnitLayout], int]) -> int:
        return max((measure(block) for block in blocks), default=0)

    def in_use(unit: UnitLayout) -> int:
        return gathered(unit) + gathering(unit)

    ring = min(2, len(blocks))
    always = reducing(root) + ring * largest(reducing) if policy.grads is SHARDED else 0
    ahead = 0
    if policy.params_at_rest is SHARDED:
        always += gathered(root)
        if blocks and prefetch_bytes:
            ahead = max(1, prefetch_bytes // largest(gathered))
    in_backward = 0
    for under_way in range(1, ring + 1):  # blocks whose gradients are being summed; those before the last one are released
        held = min(1 + ahead, len(blocks) - under_way + 1) * largest(in_use) if policy.params_at_rest is SHARDED else 0
        in_backward = max(in_backward, always + held + under_way * largest(received))
    at_begin = always + gathering(root) + (min(ahead, len(blocks)) * largest(in_use) if ahead else 0)
    at_end = always + received(root) + min(1, len(blocks)) * largest(received)
    temporary = max(at_begin, in_backward, at_end)
    return StateBytes(params=params, grads=grads, master=master, optimizer=optimizer, temporary=temporary, residual=residual, host=host)
