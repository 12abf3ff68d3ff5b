"""Bytes of model state on one rank: a meter that the engine's allocations go through, and the closed formula to hold it against.

Model state is parameters, gradients, master weights and optimizer state, with the temporary buffers that gathering and reducing need;
activations are not part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from framework.config.schema import OffloadConfig
from framework.zero.comm import received_shards
from framework.zero.layout import UnitLayout
from framework.zero.policy import FULL, SHARDED, WORKERS, Policy, offloaded


@dataclass
class MemoryMeter:
    """Current and peak bytes, in all and by kind (`params`, `grads`, `master`, `optimizer`, `gathered`, `reducing`, `staging`)."""

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
    rank: int = 0,
    compute_itemsize: int,
    master_itemsize: int = 4,
    optimizer_itemsize: int = 8,
    prefetch_bytes: int = 0,
    micro_batches: int = 1,
    messages: bool = False,
    offload: OffloadConfig | None = None,
) -> StateBytes:
    """Peak model-state bytes of one rank, from the layouts alone.

    `optimizer_itemsize`: bytes of optimizer state per trained element (AdamW with two fp32 moments: 8). `messages`: whether sums are
    made of point-to-point messages (gloo), which need room for what they receive. `micro_batches` of a step.

    Temporary are, where the policy shards them: the root's parameters and gradients for the whole of a backward; of the blocks, one
    gathered and beside it those that the prefetch budget admits (at least one), or all that are kept after forward; two blocks' gradients
    in the ring. Shards of gradients come to be in the course of the first backward of a step. So the most is reached in one of its moments:
    when a block's reduction begins, or at the end that of the root, which is taken to compute before and after the blocks, as an embedding
    and a head do.
    """
    shards, offload = world_size if policy.optimizer is SHARDED else 1, offload or OffloadConfig()
    trained = [layout for unit in units for layout in unit.layouts if layout.requires_grad]
    offloads = dict(zip(trained, offloaded(offload, [layout.numel for layout in trained]), strict=True))
    params_on_host = offload.params != "none" and policy.params_at_rest is SHARDED
    params = grads = master = optimizer = host = 0
    for layout in (layout for unit in units for layout in unit.layouts):
        shard, full = layout.shard_numel(shards), layout.padded(shards)
        held = layout.itemsize(compute_itemsize) * (full if policy.params_at_rest is FULL else shard)
        params, host = (params, host + held) if params_on_host else (params + held, host)
        if not layout.requires_grad:
            continue
        grads += master_itemsize * (full if policy.grads is FULL else shard)
        has_master = compute_itemsize != master_itemsize or offloads[layout] is not params_on_host
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

    def sharded_grads(unit: UnitLayout) -> int:
        return master_itemsize * sum(layout.shard_numel(shards) for layout in unit.layouts if layout.requires_grad)

    in_place, adds = policy.grads is FULL, policy.grads is SHARDED and micro_batches > 1
    most_received = received_shards(shards, messages=messages, in_place=in_place, add=adds)

    def received(unit: UnitLayout) -> int:
        return most_received * sharded_grads(unit)

    root, blocks = units[0], units[1:]

    def largest(measure: Callable[[UnitLayout], int]) -> int:
        return max((measure(block) for block in blocks), default=0)

    always, ahead = reducing(root) if policy.grads is SHARDED else 0, 0
    if policy.params_at_rest is SHARDED:
        always += gathered(root)
        if policy.params_kept is FULL:
            ahead = len(blocks)
        elif blocks and prefetch_bytes:
            ahead = max(1, prefetch_bytes // largest(gathered))

    def made(units: list[UnitLayout]) -> int:
        """Bytes of the shards of gradients when `units` have reduced."""
        return sum(map(sharded_grads, units)) if policy.grads is SHARDED and not adds else grads

    ring = largest(reducing) if policy.grads is SHARDED else 0
    temporary = always + made(units) + min(2, len(blocks)) * ring + received(root) + min(1, len(blocks)) * largest(received)
    for done in range(1, len(blocks) + 1):  # blocks, the last one first, whose reduction has begun; that of the one before is under way
        held = min(1 + ahead, len(blocks) - done + 1) * largest(gathered) if policy.params_at_rest is SHARDED else 0
        rings = min(2, len(blocks) if adds else done) * ring
        temporary = max(temporary, always + made(blocks[-done:]) + held + rings + min(2, done) * largest(received))
    temporary -= grads
    return StateBytes(params=params, grads=grads, master=master, optimizer=optimizer, temporary=temporary, host=host)
