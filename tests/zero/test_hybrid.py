"""Shard groups, secondary shards and policies of single modules: every row of the policy table trains as unsharded torch does.

Four ranks are two groups of two.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from framework.config.schema import ZeroModuleConfig
from framework.zero import OffloadConfig, PrecisionConfig, ZeroConfig, ZeroEngine
from tests.zero import zoo
from tests.zero.test_exactness import assert_equal

STEPS, MICROS, CLIP = 3, 8, 0.5
RULES = [
    ZeroModuleConfig(pattern="embed", stage=2),
    ZeroModuleConfig(pattern="blocks.2", reshard_after_forward=False),
    ZeroModuleConfig(pattern="head", stage=0),
]
SHAPES = {
    "hsdp1": ZeroConfig(stage=1, shard_size=2),
    "hsdp2": ZeroConfig(stage=2, shard_size=2),
    "hsdp3": ZeroConfig(stage=3, shard_size=2),
    "hsdp3-keep": ZeroConfig(stage=3, shard_size=2, reshard_after_forward=False),
    "world1": ZeroConfig(stage=1, shard_size=2, shard_optimizer="world"),
    "world2": ZeroConfig(stage=2, shard_size=2, shard_optimizer="world"),
    "world3": ZeroConfig(stage=3, shard_size=2, shard_optimizer="world"),
    "secondary": ZeroConfig(stage=3, secondary_shard_size=2),
    "one-group": ZeroConfig(stage=3, secondary_shard_size=4),
    "modules": ZeroConfig(stage=3, modules=RULES),
    "modules-world": ZeroConfig(stage=3, shard_size=2, shard_optimizer="world", modules=RULES),
    "modules-secondary": ZeroConfig(stage=3, secondary_shard_size=2, modules=RULES),
    "kept": ZeroConfig(stage=3, keep_gathered_bytes=20_000),
}


def train(names: list[str], zero: ZeroConfig, dtype: str, offload: OffloadConfig | None = None, lasts: str = "promised") -> list[dict]:
    """Each model on the same global batches, dealt out to the ranks. `lasts`: which micro-batches are said to be the last one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = []
    for name in names:
        model = zoo.make(name, torch.float64 if dtype == "float64" else torch.float32)
        precision = PrecisionConfig(compute_dtype=dtype)
        engine = ZeroEngine(model, zero, precision, offload, optimizer=zoo.adamw(model), grad_clip=CLIP)
        losses, norms = [], []
        for micros in zoo.micro_batches(STEPS, MICROS):
            mine = micros[rank::world_size]
            for index, ids in enumerate(mine):
                last = {"promised": index == len(mine) - 1, "all": True, "none": False, "first": index == 0}[lasts]
                engine.backward(engine.module(ids), zoo.count_tokens(ids), last=last)
            stats = engine.step()
            losses.append(float(stats.loss))
            norms.append(float(stats.grad_norm))
        whole = {name: tensor for name, tensor in engine.full_tensors() if tensor is not None}
        for kind in ("gathered", "secondary"):
            assert engine.memory.by_kind.get(kind, 0) == 0
        results.append({"loss": losses, "norm": norms, "model": whole})
    return results


def assert_trains_as_plain(ranks, names: list[str], dtype: str, tolerance: float, zero: ZeroConfig, *more) -> None:
    results = ranks(4, train, names, zero, dtype, *more)
    for index, name in enumerate(names):
        plain = zoo.train_plain(name, zoo.micro_batches(STEPS, MICROS), CLIP, getattr(torch, dtype))
        assert_equal([result[index] for result in results], plain, tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_trains_as_unsharded_torch(ranks, shape: str) -> None:
    names = ["Plain", "Repeated"] if shape == "one-group" else ["Plain", "LowRank", "Repeated", "Branching", "Checkpointed"]
    assert_trains_as_plain(ranks, names, "float64", 1e-10, SHAPES[shape])
    assert_trains_as_plain(ranks, ["Unused"], "float32", 2e-5, SHAPES[shape])


@pytest.mark.parametrize("lasts", ["all", "none", "first"])
@pytest.mark.parametrize("shape", ["hsdp1", "hsdp3", "world1", "world3", "secondary"])
def test_a_broken_promise_about_the_last_micro_batch_costs_traffic_only(ranks, shape: str, lasts: str) -> None:
    assert_trains_as_plain(ranks, ["Branching"], "float64", 1e-10, SHAPES[shape], None, lasts)


@pytest.mark.parametrize("shape", ["hsdp3", "world2", "world3", "secondary", "modules-world"])
def test_offloaded_state_trains_as_unsharded_torch(ranks, shape: str) -> None:
    offload = OffloadConfig(optimizer="cpu", params="cpu" if SHAPES[shape].stage == 3 else "none")
    assert_trains_as_plain(ranks, ["LowRank", "Branching"], "float64", 1e-10, SHAPES[shape], offload)
    assert_trains_as_plain(ranks, ["Plain"], "float32", 2e-5, SHAPES[shape], offload)
