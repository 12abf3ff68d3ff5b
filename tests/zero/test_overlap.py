"""Transfers run while blocks compute, and no step makes the host wait for the GPU.

What is checked is the order of events, which no load of the machine changes: a transfer that was begun before a block computes, and whose
result is asked for after it, had all that time.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from framework.kernels import library
from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine
from framework.zero.comm import Comm, Handle
from framework.zero.wire import TAGS
from tests.zero import zoo

BLOCKS = range(zoo.BLOCKS)


def events_of_a_step(zero: ZeroConfig) -> list[tuple]:
    """("begin" | "take", "gather" | "reduce", block), and ("begin" | "end", "forward" | "backward", block), of the third step."""
    events: list[tuple] = []
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, zero, optimizer=zoo.adamw(model))
    taken: dict[Handle, tuple] = {}

    def watched(kind: str, method):
        def call(comm: Comm, out: torch.Tensor, shard: torch.Tensor, tag: int, **options) -> Handle:
            block = tag // TAGS - 1  # each buffer has tags of its own, and the root, which has one buffer here, comes first
            handle = method(comm, out, shard, tag, **options)
            events.append(("begin", kind, block))
            taken[handle] = ("take", kind, block)
            return handle

        return call

    def wait(handle: Handle, original=Handle.wait) -> None:
        if handle in taken:
            events.append(taken.pop(handle))
        original(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "all_gather", watched("gather", Comm.all_gather))
        patch.setattr(Comm, "reduce_scatter", watched("reduce", Comm.reduce_scatter))
        patch.setattr(Handle, "wait", wait)
        for number, block in enumerate(model.blocks):
            watch_computing(events, number, block)
        for (ids,) in zoo.micro_batches(3, 1):
            events.clear()
            engine.backward(engine.module(ids), zoo.count_tokens(ids))
            engine.step()
    return events


def watch_computing(events: list[tuple], number: int, block: zoo.Block) -> None:
    """`down` computes its gradients first in the backward of a block, `norm` last."""
    block.norm.register_forward_pre_hook(lambda module, args: events.append(("begin", "forward", number)))
    block.down.register_forward_hook(lambda module, args, out: events.append(("end", "forward", number)))
    block.down.bias.register_hook(lambda grad: events.append(("begin", "backward", number)))
    block.norm.bias.register_hook(lambda grad: events.append(("end", "backward", number)))


def assert_order(events: list[tuple], *wanted: tuple) -> None:
    """`wanted` happen one after the other. Where one happens twice it is the next."""
    at = 0
    for event in wanted:
        assert event in events[at:], f"{event} does not come after the one before it in {wanted}: {events}"
        at = events.index(event, at) + 1


def test_gathers_and_reductions_are_under_way_while_other_blocks_compute(ranks) -> None:
    last = BLOCKS[-1]
    for events in ranks(2, events_of_a_step, ZeroConfig(stage=3, prefetch_bytes=1)):
        for block in BLOCKS[:-1]:
            forward = (("begin", "forward", block), ("end", "forward", block))
            assert_order(events, ("begin", "gather", block + 1), *forward, ("take", "gather", block + 1))
        back = events[events.index(("end", "forward", last)) :]
        for block in BLOCKS[1:-1]:
            backward = (("begin", "backward", block), ("end", "backward", block))
            assert_order(back, ("begin", "gather", block - 1), *backward, ("take", "gather", block - 1))
        for block in BLOCKS[1:]:
            backward = (("begin", "backward", block - 1), ("end", "backward", block - 1))
            assert_order(back, ("begin", "reduce", block), *backward, ("take", "reduce", block))


def test_stages_1_and_2_gather_all_blocks_before_the_first_computes_and_wait_for_each_alone(ranks) -> None:
    for stage in (1, 2):
        for events in ranks(2, events_of_a_step, ZeroConfig(stage=stage)):
            for block in BLOCKS[1:]:
                between = (("begin", "forward", 0), ("end", "forward", block - 1))
                assert_order(events, ("begin", "gather", block), *between, ("take", "gather", block), ("begin", "forward", block))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_step_makes_the_host_wait_for_the_gpu(stage: int, compute_dtype: str) -> None:
    """But for the verdict on the step before, an event that has long happened."""
    if reason := library.missing("cuda"):
        pytest.skip(f"no compiled kernels: {reason}")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = zoo.make("Checkpointed", torch.float32)
        precision = PrecisionConfig(compute_dtype=compute_dtype)
        engine = ZeroEngine(model, ZeroConfig(stage=stage), precision, optimizer=zoo.adamw(model), grad_clip=0.5)
        batches = [ids.to("cuda") for row in zoo.micro_batches(5, 2) for ids in row]
        for number in range(0, len(batches), 2):
            torch.cuda.set_sync_debug_mode("error" if number >= 4 else "default")  # the first steps allocate
            for ids in batches[number : number + 2]:
                engine.backward(engine.module(ids), zoo.count_tokens(ids), last=ids is batches[number + 1])
            engine.step()
        torch.cuda.set_sync_debug_mode("default")
        engine.check_last_step()
        assert engine.steps_done == 5
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
