"""fp16: the loss is scaled, an overflow on one rank skips the step on all, and the scale follows."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from framework.zero import NonFiniteError, PrecisionConfig, ZeroConfig, ZeroEngine
from framework.zero.scaler import LossScaler
from tests.zero import zoo
from tests.zero.test_exactness import CLIP, MICROS, STEPS, train_sharded

HUGE = 3e5
"""Times the loss: beyond fp16 after any scale used here."""


def make(stage: int, **precision) -> ZeroEngine:
    model = zoo.make("Plain", torch.float32)
    config = PrecisionConfig(compute_dtype="float16", **precision)
    return ZeroEngine(model, ZeroConfig(stage=stage), config, optimizer=zoo.adamw(model), grad_clip=CLIP)


def step(engine: ZeroEngine, *, times: float = 1.0):
    (ids,) = zoo.micro_batches(1, 1)[0]
    engine.backward(engine.module(ids).float() * times, zoo.count_tokens(ids))
    return engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_stays_within_its_resolution_of_fp32_and_is_the_same_for_every_stage(ranks, stage: int) -> None:
    plain = zoo.train_plain("Plain", zoo.micro_batches(STEPS, MICROS), CLIP, torch.float32)
    sharded, stage0 = (ranks(2, train_sharded, "Plain", ZeroConfig(stage=each), "float16")[0] for each in (stage, 0))
    assert sharded["loss"] == pytest.approx(plain["loss"], rel=2e-3)
    assert sharded["norm"] == pytest.approx(plain["norm"], rel=2e-2)
    assert sharded["model"]["head.weight"].dtype is torch.float32
    assert sharded["loss"] == pytest.approx(stage0["loss"], rel=1e-6)


def overflow_on_rank_1(stage: int) -> dict:
    engine = make(stage, initial_loss_scale=8.0, loss_scale_window=2)
    step(engine)
    before = engine.state_dict()
    stats = step(engine, times=HUGE if dist.get_rank() == 1 else 1.0)
    after = engine.state_dict()
    scales = [float(step(engine).loss_scale) for _ in range(4)]
    return {"before": before, "after": after, "skipped": bool(stats.skipped), "scales": scales, "skipped_steps": engine.skipped_steps}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_p47_an_overflow_on_one_rank_skips_the_step_on_all_and_the_scale_halves_and_grows(ranks, stage: int) -> None:
    both = ranks(2, overflow_on_rank_1, stage)
    for rank in both:
        assert rank["skipped"] and rank["skipped_steps"] == 1
        assert rank["scales"] == [4.0, 4.0, 8.0, 8.0]
    before, after = both[0]["before"], both[0]["after"]
    for name, tensor in before["model"].items():
        assert torch.equal(tensor, after["model"][name])
        assert before["optimizer"][name].keys() == after["optimizer"][name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in before["optimizer"][name].items():
            assert torch.equal(value, after["optimizer"][name][key]), (name, key)


def test_the_scale_follows_verdicts_as_that_of_torch_does() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    ours = LossScaler(PrecisionConfig(compute_dtype="float16", loss_scale_window=3), torch.device("cpu"))
    draw = random.Random(0)
    for _ in range(200):
        finite = draw.random() < 0.8
        theirs.scale(weight * (1.0 if finite else torch.inf)).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(torch.tensor(finite))
        assert float(ours.scale) == theirs.get_scale()


def test_with_hysteresis_a_single_overflow_does_not_change_the_scale() -> None:
    scaler = LossScaler(PrecisionConfig(compute_dtype="float16", loss_scale_hysteresis=2), torch.device("cpu"))
    scales = []
    for finite in (False, True, False, False):
        scaler.update(torch.tensor(finite))
        scales.append(float(scaler.scale))
    assert scales == [64.0, 64.0, 32.0, 32.0]


def test_an_overflow_under_a_fixed_scale_is_an_error_that_names_the_parameter() -> None:
    engine = make(3, loss_scale=4.0)
    assert float(step(engine).loss_scale) == 4.0
    before = dict(engine.full_tensors())
    with pytest.raises(NonFiniteError, match=r"step 2: the gradient is not finite in .*weight"):
        step(engine, times=HUGE)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.full_tensors())


def test_an_overflow_at_the_least_scale_is_an_error() -> None:
    engine = make(1, initial_loss_scale=2.0, min_loss_scale=1.0)
    assert bool(step(engine, times=HUGE).skipped)
    with pytest.raises(NonFiniteError, match="step 2"):
        step(engine, times=HUGE)


def test_the_state_of_the_scale_is_saved_with_the_rest() -> None:
    one, other = make(2, loss_scale_window=3), make(0, loss_scale_window=3)
    for _ in range(2):
        step(one)
    other.load_state_dict(one.state_dict())
    assert float(step(one).loss_scale) == float(step(other).loss_scale) == 64.0
    assert float(step(one).loss_scale) == float(step(other).loss_scale) == 128.0


def test_a_step_without_a_trained_token_is_no_overflow() -> None:
    engine = make(2)
    (ids,) = zoo.micro_batches(1, 1)[0]
    engine.backward(engine.module(ids).float() * 0, 0)
    before = engine.scaler.state_dict()
    with pytest.raises(ValueError, match="no micro-batch of any rank had a trained token; nothing was updated"):
        engine.step()
    assert engine.scaler.state_dict() == before
