"""What a step of our engine has to send and to hold, from the layouts alone: to hold its meters against.

A ring moves (N-1)/N of a buffer for a gather or a reduction, and twice that for a sum on all ranks. Stages 1 and 2 gather once and reduce
once; stage 3 gathers for forward and again for backward, but for the last block, which stays, and the root, which is used until the end.
"""

from __future__ import annotations

import torch.distributed as dist

from framework.config.schema import OffloadConfig
from framework.zero import ZeroEngine
from framework.zero.memory import state_bytes

MASTER_ITEMSIZE, OPTIMIZER_ITEMSIZE = 4, 8


def sent_bytes(engine: ZeroEngine) -> int:
    """By one rank, in a step of one micro-batch."""
    ranks, itemsize = engine.world.size, engine.compute_dtype.itemsize
    stage = engine.zero.stage
    gathers = {"": 1, engine.units[-1].name: 1} if stage == 3 else {}
    nbytes = 2 * (ranks - 1) * 8 * (7 + sum(len(buffer.layout.slots) for buffer in engine.trained)) // ranks  # the sums of a step
    for buffer in engine.trained:
        if stage == 0:
            nbytes += 2 * (ranks - 1) * MASTER_ITEMSIZE * buffer.layout.padded(1) // ranks
        else:
            share = (ranks - 1) * buffer.layout.shard_numel(ranks)
            nbytes += share * (MASTER_ITEMSIZE + itemsize * gathers.get(buffer.layout.unit, 2 if stage == 3 else 1))
    return nbytes


def peak_bytes(engine: ZeroEngine, offload: OffloadConfig | None) -> int:
    """Of model state on the device of this rank."""
    formula = state_bytes(
        engine.layouts,
        engine.policy,
        engine.world.size,
        rank=engine.world.rank,
        compute_itemsize=engine.compute_dtype.itemsize,
        master_itemsize=MASTER_ITEMSIZE,
        optimizer_itemsize=OPTIMIZER_ITEMSIZE,
        prefetch_bytes=engine.zero.prefetch_bytes,
        messages=dist.get_backend() == "gloo",
        offload=offload,
    )
    return formula.total
