"""Bytes sent in a step: the formula against what the engine's communication counts, to the byte."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine
from framework.zero.policy import policy_of
from framework.zero.traffic import bytes_sent
from tests.zero import zoo


def sent_in_a_step(name: str, zero: ZeroConfig, compute_dtype: str, micros: int) -> tuple[int, int]:
    model = zoo.make(name, torch.float32)
    engine = ZeroEngine(model, zero, PrecisionConfig(compute_dtype=compute_dtype), optimizer=zoo.adamw(model))
    for batch in zoo.micro_batches(3, micros):
        before = engine.bytes_sent
        for index, ids in enumerate(batch):
            engine.backward(engine.module(ids), zoo.count_tokens(ids), last=index == micros - 1)
        engine.step()
    world_size, itemsize = dist.get_world_size(), engine.compute_dtype.itemsize
    how = {"compute_itemsize": itemsize, "micro_batches": micros, "group_size": zero.secondary_shard_size or zero.shard_size}
    formula = bytes_sent(engine.layouts, policy_of(zero), world_size, compression=zero, **how)
    return engine.bytes_sent - before, formula


MODES = ("none", "int8")
PLAIN = [*(ZeroConfig(stage=stage) for stage in range(4)), ZeroConfig(stage=3, reshard_after_forward=False)]
COMPRESSED = [
    ZeroConfig(stage=1, reduce_compression="bf16"),
    ZeroConfig(stage=2, reduce_compression="int8"),
    ZeroConfig(stage=3, gather_compression="int8", reduce_compression="int8"),
]


@pytest.mark.parametrize("zero", PLAIN + COMPRESSED, ids=str)
def test_bytes_sent_are_those_of_the_formula(ranks, zero: ZeroConfig) -> None:
    for name in ("Plain", "Integers"):
        for sent, formula in ranks(2, sent_in_a_step, name, zero, "bfloat16", 2):
            assert sent == formula


def test_bytes_sent_on_four_ranks_and_on_one(ranks) -> None:
    for world_size in (1, 4):
        sent, formula = ranks(world_size, sent_in_a_step, "Plain", COMPRESSED[-1], "float32", 1)[0]
        assert sent == formula and (sent == 0) == (world_size == 1)


IN_GROUPS = [
    ZeroConfig(stage=2, shard_size=2, reduce_compression="int8"),
    ZeroConfig(stage=3, shard_size=2, gather_compression="int8", reduce_compression="bf16"),
    ZeroConfig(stage=2, shard_size=2, shard_optimizer="world", reduce_compression="int8"),
    ZeroConfig(stage=3, secondary_shard_size=2, reduce_compression="int8", error_feedback=True),
    ZeroConfig(stage=3, secondary_shard_size=2, reduce_compression="bf16"),
]


@pytest.mark.parametrize("zero", IN_GROUPS, ids=str)
def test_compression_inside_and_between_groups_is_counted_too(ranks, zero: ZeroConfig) -> None:
    for sent, formula in ranks(4, sent_in_a_step, "Plain", zero, "bfloat16", 2):
        assert sent == formula


def test_int8_sends_a_little_over_a_half_of_bf16_parameters_and_a_fourth_of_fp32_gradients(ranks) -> None:
    zeros = [ZeroConfig(stage=3, gather_compression=gather, reduce_compression=reduce) for gather in MODES for reduce in MODES]
    plain, reductions, gathers, both = (ranks(2, sent_in_a_step, "Plain", zero, "bfloat16", 1)[0][0] for zero in zeros)
    assert plain - gathers + plain - reductions == plain - both
    sums = 8 * (7 + 8)
    saved_of_gathers, saved_of_reductions = 1 - (1 + 4 / 64) / 2, 1 - (1 + 4 / 64) / 4
    assert (plain - gathers) / saved_of_gathers + (plain - reductions) / saved_of_reductions == pytest.approx(plain - sums, rel=0.01)
