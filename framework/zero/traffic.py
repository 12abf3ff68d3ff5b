"""Bytes that one rank sends in an optimizer step, by the formula: what `Comm.bytes_sent` counts, from the layouts alone.

From the second step on, of a model whose blocks run once per micro-batch in their order. Broadcasts and validation are not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from framework.config.schema import ZeroConfig
from framework.zero.layout import Layout, UnitLayout
from framework.zero.policy import FULL, SHARDED, policy_of
from framework.zero.wire import packed_bytes

BESIDES_USED = 7
"""Numbers that every step sums besides how many ranks used each parameter (`norm.GlobalSums`), in fp64."""


@dataclass(frozen=True, kw_only=True)
class StepTraffic:
    """Bytes sent."""

    gathers: int
    reductions: int
    sums: int

    @property
    def total(self) -> int:
        return self.gathers + self.reductions + self.sums


def step_traffic(
    units: list[UnitLayout], zero: ZeroConfig, world_size: int, micro_batches: int, *, compute_itemsize: int, master_itemsize: int = 4
) -> StepTraffic:
    """Of a step of `micro_batches` per rank.

    At stage 3 a block is gathered for its forward and again for its backward, but the last one stays in between, and the root from its
    first use in a micro-batch to the end.
    """
    policy, others = policy_of(zero), world_size - 1
    shards = world_size if policy.optimizer is SHARDED else 1

    def gathered(layout: Layout) -> int:
        numel = layout.shard_numel(shards)
        coded = zero.gather_compression == "int8" and policy.params_at_rest is SHARDED and layout.integer is None
        return others * (packed_bytes(numel) if coded else numel * layout.itemsize(compute_itemsize))

    def reduced(layout: Layout) -> int:
        numel = layout.shard_numel(shards)
        if shards == 1:
            return _all_reduced(numel * master_itemsize, world_size)
        widths = {"none": numel * master_itemsize, "bf16": 2 * numel, "int8": packed_bytes(numel)}
        return others * widths[zero.reduce_compression]

    trained = [layout for unit in units for layout in unit.layouts if layout.requires_grad]
    gathers = 0
    if policy.params_at_rest is SHARDED:
        for unit in units:
            stays = policy.params_kept is FULL or unit in (units[0], units[-1])
            gathers += micro_batches * (1 if stays else 2) * sum(map(gathered, unit.layouts))
    elif shards > 1:
        gathers = sum(map(gathered, trained))
    reductions = sum(map(reduced, trained)) * (micro_batches if policy.grads is SHARDED else 1)
    sums = _all_reduced(8 * (BESIDES_USED + sum(len(layout.slots) for layout in trained)), world_size)
    return StepTraffic(gathers=gathers, reductions=reductions, sums=sums)


def _all_reduced(nbytes: int, world_size: int) -> int:
    return 2 * (world_size - 1) * nbytes // world_size
