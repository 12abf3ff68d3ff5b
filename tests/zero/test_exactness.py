"""Sharded training is unsharded training: losses, norms and parameters against plain torch in one process."""

from __future__ import annotations

import pytest
import torch

from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine
from tests.zero import zoo

STEPS, MICROS, CLIP = 3, 4, 0.5


def train_sharded(
    name: str, zero: ZeroConfig, compute_dtype: str = "float64", clip: float | None = CLIP, promise_last: bool = True
) -> dict:
    """The same global batches, dealt out to the ranks of the default group."""
    model = zoo.make(name, torch.float64 if compute_dtype == "float64" else torch.float32)
    engine = ZeroEngine(model, zero, PrecisionConfig(compute_dtype=compute_dtype), optimizer=zoo.adamw(model), grad_clip=clip)
    trained = zoo.train(engine, zoo.micro_batches(STEPS, MICROS), zoo.promised if promise_last else lambda *_: True)
    whole = {name: tensor for name, tensor in engine.full_tensors() if tensor is not None}
    assert engine.memory.by_kind.get("gathered", 0) == 0
    return {**trained, "model": whole}


def assert_equal(sharded: list[dict], plain: dict, tolerance: float) -> None:
    for result in sharded:
        assert result["loss"] == pytest.approx(plain["loss"], rel=tolerance)
        assert result["norm"] == pytest.approx(plain["norm"], rel=tolerance)
    for name, tensor in sharded[0]["model"].items():
        torch.testing.assert_close(
            tensor, plain["model"][name].to(tensor.dtype), rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


STAGES = [
    ZeroConfig(stage=0),
    ZeroConfig(stage=1),
    ZeroConfig(stage=2),
    ZeroConfig(stage=3),
    ZeroConfig(stage=3, reshard_after_forward=False),
]


@pytest.mark.parametrize("zero", STAGES, ids=lambda z: f"stage{z.stage}{'' if z.reshard_after_forward else 'keep'}")
@pytest.mark.parametrize("name", zoo.MODELS)
def test_p44_p45_p46_every_model_trains_as_unsharded(ranks, name: str, zero: ZeroConfig) -> None:
    plain = zoo.train_plain(name, zoo.micro_batches(STEPS, MICROS), CLIP)
    assert_equal(ranks(2, train_sharded, name, zero), plain, 1e-10)


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("zero", STAGES, ids=lambda z: f"stage{z.stage}{'' if z.reshard_after_forward else 'keep'}")
def test_p21_any_world_size_gives_the_same_step(ranks, zero: ZeroConfig, world_size: int) -> None:
    for name in ("Tied", "LowRank", "Branching"):
        plain = zoo.train_plain(name, zoo.micro_batches(STEPS, MICROS), CLIP)
        assert_equal(ranks(world_size, train_sharded, name, zero), plain, 1e-10)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_p21_a_broken_promise_about_the_last_micro_batch_costs_traffic_only(ranks, stage: int) -> None:
    plain = zoo.train_plain("Tied", zoo.micro_batches(STEPS, MICROS), None)
    assert_equal(ranks(2, train_sharded, "Tied", ZeroConfig(stage=stage), "float64", None, False), plain, 1e-10)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_follows_fp32(ranks, stage: int) -> None:
    """Where compiled kernels are built, they make these steps; those of fp64 above are torch's own."""
    for name in ("Plain", "LowRank", "Unused", "SkippedBlock", "Scalars"):
        plain = zoo.train_plain(name, zoo.micro_batches(STEPS, MICROS), CLIP, torch.float32)
        assert_equal(ranks(2, train_sharded, name, ZeroConfig(stage=stage), "float32"), plain, 2e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_stays_within_its_resolution_of_fp32_and_is_the_same_for_every_stage(ranks, stage: int) -> None:
    plain = zoo.train_plain("Plain", zoo.micro_batches(STEPS, MICROS), CLIP, torch.float32)
    sharded = ranks(2, train_sharded, "Plain", ZeroConfig(stage=stage), "bfloat16")[0]
    assert sharded["loss"] == pytest.approx(plain["loss"], rel=1e-2)
    assert sharded["model"]["head.weight"].dtype is torch.float32
    stage0 = ranks(2, train_sharded, "Plain", ZeroConfig(stage=0), "bfloat16")[0]
    assert sharded["loss"] == pytest.approx(stage0["loss"], rel=1e-6)


@pytest.mark.parametrize("prefetch_bytes", [0, 1, 10**9])
def test_prefetching_changes_no_number(ranks, prefetch_bytes: int) -> None:
    plain = zoo.train_plain("Checkpointed", zoo.micro_batches(STEPS, MICROS), CLIP)
    assert_equal(ranks(2, train_sharded, "Checkpointed", ZeroConfig(stage=3, prefetch_bytes=prefetch_bytes)), plain, 1e-10)
