"""Shard groups, secondary shards and policies of single modules: every row of the policy table trains as unsharded torch does.

Four ranks are two groups of two.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from framework.zero import OffloadConfig, PrecisionConfig, ZeroConfig, ZeroEngine, ZeroModuleConfig
from framework.zero.memory import state_bytes
from framework.zero.policy import policy_of
from framework.zero.traffic import bytes_sent
from tests.zero import zoo
from tests.zero.test_exactness import assert_equal
from tests.zero.test_memory import Model, adamw_state
from tests.zero.test_offload import needs_kernels

STEPS, MICROS, CLIP = 2, 8, 0.5
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
    is_last = {"promised": zoo.promised, "all": lambda *_: True, "none": lambda *_: False, "first": lambda index, _: index == 0}[lasts]
    results = []
    for name in names:
        model = zoo.make(name, torch.float64 if dtype == "float64" else torch.float32)
        precision = PrecisionConfig(compute_dtype=dtype)
        engine = ZeroEngine(model, zero, precision, offload, optimizer=zoo.adamw(model), grad_clip=CLIP)
        trained = zoo.train(engine, zoo.micro_batches(STEPS, MICROS), is_last)
        whole = {name: tensor for name, tensor in engine.full_tensors() if tensor is not None}
        for kind in ("gathered", "secondary"):
            assert engine.memory.by_kind.get(kind, 0) == 0
        results.append({**trained, "model": whole})
    return results


def assert_trains_as_plain(ranks, names: list[str], dtype: str, tolerance: float, zero: ZeroConfig, *more) -> None:
    results = ranks(4, train, names, zero, dtype, *more, timeout=240)
    for index, name in enumerate(names):
        plain = zoo.train_plain(name, zoo.micro_batches(STEPS, MICROS), CLIP, getattr(torch, dtype))
        assert_equal([result[index] for result in results], plain, tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_trains_as_unsharded_torch(ranks, shape: str) -> None:
    names = {"one-group": ["Plain"], "secondary": ["LowRank", "Repeated", "Branching", "Checkpointed"]}
    assert_trains_as_plain(ranks, names.get(shape, ["LowRank", "Repeated", "Branching"]), "float64", 1e-10, SHAPES[shape])


@pytest.mark.parametrize("shape", ["hsdp2", "world3", "secondary", "modules-world"])
def test_fp32_follows_fp32(ranks, shape: str) -> None:
    """Where compiled kernels are built, they make these steps."""
    assert_trains_as_plain(ranks, ["Unused"], "float32", 2e-5, SHAPES[shape])


@pytest.mark.parametrize("lasts", ["all", "none", "first"])
@pytest.mark.parametrize("shape", ["hsdp1", "hsdp3", "world3"])
def test_a_broken_promise_about_the_last_micro_batch_costs_traffic_only(ranks, shape: str, lasts: str) -> None:
    assert_trains_as_plain(ranks, ["Branching"], "float64", 1e-10, SHAPES[shape], None, lasts)


@pytest.mark.parametrize("shape", ["hsdp3", "world2", "world3", "secondary", "modules-world"])
def test_offloaded_state_trains_as_unsharded_torch(ranks, shape: str) -> None:
    offload = OffloadConfig(optimizer="cpu", params="cpu" if SHAPES[shape].stage == 3 else "none")
    assert_trains_as_plain(ranks, ["LowRank"], "float64", 1e-10, SHAPES[shape], offload)
    assert_trains_as_plain(ranks, ["Branching"], "float32", 2e-5, SHAPES[shape], offload)


def measure(shapes: list[str], dtype: str, offload: OffloadConfig) -> list[dict[str, tuple]]:
    """Bytes of each shape: what the engine's meters and communicators counted, and what the plan's formulas say."""
    found = []
    for zero in map(SHAPES.__getitem__, shapes):
        torch.manual_seed(0)
        model = Model()
        zero = replace(zero, modules=[rule for rule in zero.modules if rule.pattern != "head"])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine = ZeroEngine(model, zero, PrecisionConfig(compute_dtype=dtype), offload, optimizer=optimizer)
        for _ in range(2):  # the second step is like all that follow
            before = engine.bytes_sent
            engine.backward(engine.module(torch.arange(12).view(3, 4)), 12, last=False)
            engine.backward(engine.module(torch.arange(12).view(3, 4)), 12)
            engine.step()
        shape = {"group_size": zero.secondary_shard_size or zero.shard_size, "compute_itemsize": engine.compute_dtype.itemsize}
        place = {"rank": dist.get_rank(), "prefetch_bytes": zero.prefetch_bytes, "messages": True, "offload": offload, "micro_batches": 2}
        place["optimizer_of"] = adamw_state
        state = state_bytes(engine.layouts, policy_of(zero), 4, **shape, **place)
        sent = bytes_sent(engine.layouts, policy_of(zero), 4, **shape, micro_batches=2)
        meter = engine.memory
        rest = {kind: meter.by_kind.get(kind, 0) for kind in ("params", "master", "optimizer")}
        rest["grads"] = meter.peak_by_kind["grads"]  # shards of them are gone after the step
        engine.flush()
        planned = {kind: getattr(state, kind) for kind in rest}
        host, peak, wire = (engine.host_memory.current, state.host), (meter.peak, state.total), (engine.bytes_sent - before, sent)
        found.append({"rest": (rest, planned), "host": host, "peak": peak, "sent": wire})
    return found


@pytest.mark.parametrize(
    ("dtype", "shapes", "offload"),
    [
        ("float32", list(SHAPES), OffloadConfig()),
        ("bfloat16", ["hsdp1", "world3", "secondary"], OffloadConfig()),
        pytest.param("bfloat16", ["hsdp3", "world3"], OffloadConfig(optimizer="cpu", params="cpu"), marks=needs_kernels),
    ],
)
def test_bytes_at_rest_at_the_peak_and_on_the_wire_are_those_of_the_plan(ranks, dtype: str, shapes: list[str], offload) -> None:
    for rank in ranks(4, measure, shapes, dtype, offload, timeout=240):
        for shape, found in zip(shapes, rank, strict=True):
            assert found["rest"][0] == found["rest"][1], shape
            assert found["host"][0] == found["host"][1], shape
            assert found["sent"][0] == found["sent"][1], shape
            assert found["peak"][0] == found["peak"][1], shape


LIVE = ("hsdp1", "hsdp3", "world2", "world3", "secondary", "modules-secondary", "kept")
BATCHES = zoo.micro_batches(len(LIVE) + 2, MICROS)


def take_a_step(engine: ZeroEngine, number: int) -> float:
    micros = BATCHES[number][dist.get_rank() :: dist.get_world_size()]
    for index, ids in enumerate(micros):
        engine.backward(engine.module(ids), zoo.count_tokens(ids), last=index == len(micros) - 1)
    return float(engine.step().loss)


def goes_through_everything(shapes: list[str]) -> None:
    """State is handed from each shape to the next one; on the way a step fails, and parameters are gathered."""
    losses, state = [], None
    for number, zero in enumerate([*map(SHAPES.__getitem__, shapes), ZeroConfig(stage=0)]):
        model = zoo.make("Plain", torch.float64, seed=1 + number)
        engine = ZeroEngine(model, zero, PrecisionConfig(compute_dtype="float64"), optimizer=zoo.adamw(model))
        if state is not None:
            engine.load_state_dict(state)
        if number == 0:
            losses.append(take_a_step(engine, 0))
        handle = model.blocks[1].down.register_forward_hook(_raising_in_backward)
        with pytest.raises(ArithmeticError):
            take_a_step(engine, number + 1)
        handle.remove()
        engine.reset()
        losses.append(take_a_step(engine, number + 1))
        whole = dict(engine.full_tensors())
        with engine.gathered():
            assert all(p.isfinite().all() for p in model.parameters())
            if dist.get_rank() == 0:
                assert all(torch.equal(p, whole[name]) for name, p in model.named_parameters())
        with torch.no_grad():
            engine.module(BATCHES[0][0])
        box = [engine.state_dict()]
        dist.broadcast_object_list(box, src=0)
        (state,) = box
        for name, tensor in state["model"].items():
            assert dist.get_rank() or torch.equal(tensor, whole[name])
    if dist.get_rank() == 0:
        plain = zoo.train_plain("Plain", BATCHES, None)
        assert losses == pytest.approx(plain["loss"], rel=1e-10)
        for name, tensor in state["model"].items():
            torch.testing.assert_close(tensor, plain["model"][name], rtol=1e-10, atol=1e-10)


def _raising_in_backward(module, args, out) -> None:
    def fail(grad):
        raise ArithmeticError("in backward")

    out.register_hook(fail)


def test_state_goes_from_any_shape_to_any_other_and_survives_a_failed_step(ranks) -> None:
    ranks(4, goes_through_everything, list(LIVE), timeout=240)


def trains_in_fp16(shapes: list[str | None], scale: float) -> list[tuple]:
    found = []
    for shape in shapes:
        model = zoo.make("Plain", torch.float32)
        precision = PrecisionConfig(compute_dtype="float16", initial_loss_scale=scale)
        engine = ZeroEngine(model, ZeroConfig(stage=2) if shape is None else SHAPES[shape], precision, optimizer=zoo.adamw(model))
        found.append(([take_a_step(engine, number) for number in range(3)], engine.skipped_steps, float(engine.scaler.scale)))
    return found


def test_p47_an_overflow_is_skipped_by_all_groups_together(ranks) -> None:
    usual, *others = ranks(4, trains_in_fp16, [None, "hsdp3", "world3", "secondary"], 2.0**24, timeout=240)[0]
    assert usual[1] > 0
    for losses, skipped, scale in others:
        assert losses == pytest.approx(usual[0], rel=1e-2)
        assert (skipped, scale) == usual[1:]


@pytest.mark.parametrize(
    ("zero", "told"),
    [
        (ZeroConfig(stage=3, shard_size=3), "zero.shard_size: got 3"),
        (ZeroConfig(stage=3, shard_optimizer="world"), "zero.shard_optimizer: got world"),
        (ZeroConfig(stage=3, modules=[ZeroModuleConfig(pattern="nowhere", stage=1)]), "'nowhere' is no module or parameter"),
    ],
)
def test_what_cannot_be_is_refused_by_the_engine_too(zero: ZeroConfig, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ZeroEngine(zoo.make("Plain"), zero)
