"""Bytes that a rank sends in one optimizer step, from the layouts alone; the engine's communicators count the same ones.

The formula is that of a step like the one before it: `prefetch.py` has seen the order of units, and frozen parameters that stay gathered
have been. What is said of parameters that need no gradient holds where the graph is that of a plain stack of blocks.
"""

from __future__ import annotations

from framework.config.schema import ZeroConfig
from framework.zero import wire
from framework.zero.grid import Place, place_of
from framework.zero.layout import Layout, UnitLayout
from framework.zero.policy import FULL, GROUP, WORLD, Policy

SUMS = 7
"""Numbers that the norm's all-reduce carries beside one for each trained parameter (`norm.py`)."""


def bytes_sent(
    units: list[UnitLayout],
    policy: Policy,
    world_size: int,
    *,
    group_size: int | None = None,
    compute_itemsize: int,
    master_itemsize: int = 4,
    micro_batches: int = 1,
    inputs_need_grad: bool = True,
    compression: ZeroConfig | None = None,
) -> int:
    """Of any rank. `policy`: of layouts that have none of their own. `inputs_need_grad`: whether the first block's input does, so that
    backward reaches it whatever is frozen. `compression`: what it says of that counts."""
    compression = compression or ZeroConfig()
    places = {layout: place_of(layout, policy, world_size, group_size, 0) for unit in units for layout in unit.layouts}
    root, blocks = units[0], units[1:]
    sent, slots, has_backward = 0, 0, inputs_need_grad
    for unit in units:
        trains = any(layout.requires_grad for layout in unit.layouts)
        has_backward = has_backward or (trains and unit is not root)
        twice = unit is not root and unit is not blocks[-1] and has_backward
        for layout in unit.layouts:
            sent += _gathers(layout, places[layout], compute_itemsize, micro_batches, twice, compression)
            if layout.requires_grad:
                sent += _reductions(places[layout], master_itemsize, micro_batches, compression)
                slots += len(layout.slots)
    return sent + _all_reduce(SUMS + slots, 8, world_size)


def _gathers(layout: Layout, place: Place, compute_itemsize: int, micro_batches: int, twice: bool, compression: ZeroConfig) -> int:
    """Of the parameters; `twice`: a unit that is released after its forward, if its policy says so, and gathered again for its backward."""
    policy, extents, grid = place.policy, place.extents, place.grid
    itemsize = layout.itemsize(compute_itemsize)
    in_blocks = wire.gathers_in_blocks(compression, layout, place)
    inside = (grid.members - 1) * (wire.packed_bytes(extents.chunk_numel) if in_blocks else extents.chunk_numel * itemsize)
    across = (grid.groups - 1) * extents.shard_numel * itemsize if place.in_parts else 0
    if policy.params_at_rest is FULL:
        return inside + across if layout.requires_grad else 0
    again = twice and policy.params_kept is not FULL
    gathers = micro_batches * (2 if again else 1)
    if policy.params_at_rest is GROUP:
        return gathers * inside + (across if layout.requires_grad else 0)
    from_secondary = policy.params_kept is GROUP
    return gathers * inside + (micro_batches if from_secondary else gathers) * across


def _reductions(place: Place, itemsize: int, micro_batches: int, compression: ZeroConfig) -> int:
    policy, extents, grid = place.policy, place.extents, place.grid
    how = compression.reduce_compression if grid.members > 1 else "none"
    widths = {"none": itemsize * extents.chunk_numel, "bf16": 2 * extents.chunk_numel, "int8": wire.packed_bytes(extents.chunk_numel)}
    inside = (grid.members - 1) * widths[how]
    if not place.in_parts:
        across = _all_reduce(extents.chunk_numel, itemsize, grid.groups)
    elif policy.grads is WORLD and how == "int8":
        across = (grid.groups - 1) * wire.packed_bytes(extents.shard_numel, bits=4)
    else:
        across = (grid.groups - 1) * extents.shard_numel * itemsize
    within = 1 if policy.grads is FULL else micro_batches
    return within * inside + (micro_batches if policy.grads is WORLD else 1) * across


def _all_reduce(numel: int, itemsize: int, ranks: int) -> int:
    return 2 * (ranks - 1) * numel * itemsize // ranks
