"""AdamW by our kernel does what torch's AdamW does, and leaves the torch optimizer as its users expect it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from framework.kernels import library
from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine
from tests.zero import zoo

pytestmark = pytest.mark.skipif(library.missing("cpu") is not None, reason=f"no compiled kernels: {library.missing('cpu')}")
STEPS = zoo.micro_batches(5, 1)


@pytest.fixture
def kernels() -> Iterator:
    """`kernels("reference")` chooses what computes from there on."""
    before = library.mode()
    yield library.choose
    library.choose(before)


def make(name: str = "Plain", compute_dtype: str = "float32", **options) -> ZeroEngine:
    model = zoo.make(name, torch.float32)
    optimizer = zoo.adamw(model)
    for group in optimizer.param_groups:
        group.update(options)
    return ZeroEngine(model, ZeroConfig(stage=3), PrecisionConfig(compute_dtype=compute_dtype), optimizer=optimizer, grad_clip=0.5)


def train(engine: ZeroEngine, steps=STEPS) -> ZeroEngine:
    for (ids,) in steps:
        engine.backward(engine.module(ids), zoo.count_tokens(ids))
        engine.step()
    return engine


def assert_same(one: dict, other: dict) -> None:
    for name, tensor in one["model"].items():
        torch.testing.assert_close(tensor, other["model"][name], rtol=1e-6, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")
    assert one["optimizer"].keys() == other["optimizer"].keys()
    for name, state in one["optimizer"].items():
        assert state.keys() == other["optimizer"][name].keys() and float(state["step"]) == float(other["optimizer"][name]["step"])
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[key], other["optimizer"][name][key], rtol=1e-5, atol=1e-9)


def uses_the_kernel(engine: ZeroEngine) -> bool:
    return engine.sharded_optimizer.writes_shards


@pytest.mark.parametrize("name", ["Plain", "Unused", "SkippedBlock", "LowRank", "Scalars"])
def test_it_trains_as_torch_does(kernels, name: str) -> None:
    ours = train(make(name))
    kernels("reference")
    torchs = train(make(name))
    assert uses_the_kernel(ours) and not uses_the_kernel(torchs)
    assert_same(ours.state_dict(), torchs.state_dict())


def test_in_bf16_it_writes_the_rounded_masters_into_the_shards() -> None:
    engine = train(make(compute_dtype="bfloat16"))
    assert uses_the_kernel(engine)
    for buffer in engine.buffers:
        assert torch.equal(buffer.shard, buffer.master.to(torch.bfloat16))


@pytest.mark.parametrize("saved_by", ["auto", "reference"])
def test_its_state_and_torchs_are_the_same_thing(kernels, saved_by: str) -> None:
    kernels(saved_by)
    state = train(make(), STEPS[:3]).state_dict()
    kernels("reference")
    expected = make()
    expected.load_state_dict(state)
    kernels("auto")
    resumed = make()
    resumed.load_state_dict(state)
    assert_same(train(resumed, STEPS[3:]).state_dict(), train(expected, STEPS[3:]).state_dict())


def test_settings_of_a_group_hold_from_the_next_step() -> None:
    engine = train(make(), STEPS[:1])
    before = dict(engine.full_tensors())
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    train(engine, STEPS[1:])
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.full_tensors())


def test_schedulers_and_step_hooks_of_the_torch_optimizer_see_every_step(recwarn) -> None:
    engine = make()
    seen = []
    engine.optimizer.register_step_post_hook(lambda *_: seen.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1)
    for step in STEPS[:2]:
        train(engine, [step])
        scheduler.step()
    assert len(seen) == 2 and uses_the_kernel(engine)
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


@pytest.mark.parametrize("option", [{"amsgrad": True}, {"maximize": True}, {"lr": torch.tensor(1e-2)}])
def test_what_the_kernel_does_not_do_is_left_to_torch(option: dict) -> None:
    assert not uses_the_kernel(make(**option))


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    engine = train(make(), STEPS[:2])
    flat = engine.sharded_optimizer._flat
    before = engine.state_dict()
    flat.step(torch.tensor(float("nan")), [True] * 100, engine._offsets)
    after = engine.state_dict()
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])
    for name, state in before["optimizer"].items():
        assert torch.equal(state["exp_avg"], after["optimizer"][name]["exp_avg"])


def test_options_loaded_into_the_torch_optimizer_hold(kernels) -> None:
    engine = train(make(), STEPS[:2])
    saved = engine.optimizer.state_dict()
    for group in saved["param_groups"]:
        group["lr"] = 0.0
    engine.optimizer.load_state_dict(saved)  # torch replaces its groups and state
    before = dict(engine.full_tensors())
    train(engine, STEPS[2:])
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.full_tensors())
    engine.optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(RuntimeError, match="maximize was set in a group of the optimizer after the engine was made"):
        train(engine, STEPS[:1])
    engine.optimizer.param_groups[0]["maximize"] = False
    engine.reset()
    train(engine, STEPS[:1])  # it was refused before anything changed


def test_loading_into_a_running_engine_holds_the_moments_once() -> None:
    engine = train(make(), STEPS[:2])
    before = engine.sharded_optimizer.state_nbytes(on_host=False)
    engine.load_state_dict(engine.state_dict())
    assert engine.sharded_optimizer.state_nbytes(on_host=False) == before
    state = engine.optimizer.state
    assert {tensor["exp_avg"].untyped_storage().data_ptr() for tensor in state.values()} == {
        moments[0].untyped_storage().data_ptr() for moments in engine.sharded_optimizer._flat._moments.values()
    }
