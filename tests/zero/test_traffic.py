"""Bytes sent in a step: the formula against what the engine's communication counts, to the byte."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine
from framework.zero.traffic import StepTraffic, step_traffic
from tests.zero import zoo


def sent_in_a_step(name: str, zero: ZeroConfig, compute_dtype: str, micros: int) -> tuple[int, StepTraffic]:
    model = zoo.make(name, torch.float32)
    engine = ZeroEngine(model, zero, PrecisionConfig(compute_dtype=compute_dtype), optimizer=zoo.adamw(model))
    for batch in zoo.micro_batches(3, micros):
        before = engine.world.bytes_sent
        for index, ids in enumerate(batch):
            engine.backward(engine.module(ids), zoo.count_tokens(ids), last=index == micros - 1)
        engine.step()
    formula = step_traffic(engine.layouts, zero, dist.get_world_size(), micros, compute_itemsize=engine.compute_dtype.itemsize)
    return engine.world.bytes_sent - before, formula


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
            assert sent == formula.total


def test_bytes_sent_on_four_ranks_and_on_one(ranks) -> None:
    for world_size in (1, 4):
        sent, formula = ranks(world_size, sent_in_a_step, "Plain", COMPRESSED[-1], "float32", 1)[0]
        assert sent == formula.total and (sent == 0) == (world_size == 1)


def test_int8_sends_a_little_over_a_half_of_bf16_parameters_and_a_fourth_of_fp32_gradients(ranks) -> None:
    plain, compressed = (ranks(2, sent_in_a_step, "Plain", zero, "bfloat16", 1)[0][1] for zero in (PLAIN[3], COMPRESSED[-1]))
    assert compressed.gathers / plain.gathers == pytest.approx((1 + 4 / 64) / 2)
    assert compressed.reductions / plain.reductions == pytest.approx((1 + 4 / 64) / 4)
