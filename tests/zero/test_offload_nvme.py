"""Model state on a disk: the numbers are those of training without it, the bytes those of the plan."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from framework.config.errors import UserError
from framework.zero import NonFiniteError, OffloadConfig, PrecisionConfig, ZeroConfig, ZeroEngine
from framework.zero.lion import Lion
from framework.zero.memory import disk_traffic, state_bytes
from framework.zero.nvme import Pending
from framework.zero.policy import policy_of
from tests.zero import zoo
from tests.zero.test_exactness import CLIP, MICROS
from tests.zero.test_memory import Model
from tests.zero.test_offload import needs_kernels

STEPS = 3
OVERFLOWING = PrecisionConfig(compute_dtype="float16", initial_loss_scale=2.0**18)


def nvme(folder, optimizer: str = "nvme", params: str = "none", fraction: float = 1.0) -> OffloadConfig:
    return OffloadConfig(optimizer=optimizer, params=params, fraction=fraction, nvme_path=str(folder))


def optimizer_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return zoo.adamw(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Lion(parameters, lr=1e-3) if name == "lion" else torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(model_name: str, stage: int, offload: OffloadConfig, precision: PrecisionConfig, optimizer: str) -> dict:
    """Accumulated and clipped steps, an evaluation in between, and everything handed to another engine before the last one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def make() -> ZeroEngine:
        model = zoo.make(model_name, torch.float32)
        made = optimizer_of(optimizer, model)
        return ZeroEngine(model, ZeroConfig(stage=stage), precision, offload, optimizer=made, grad_clip=CLIP)

    engine, stats = make(), []
    for step, micros in enumerate(zoo.micro_batches(STEPS, MICROS)):
        if step == STEPS - 1:
            saved = engine.world.gather_objects(engine.state_dict())[0]
            engine = make()
            engine.load_state_dict(saved)
        mine = micros[rank::world_size]
        for index, ids in enumerate(mine):
            engine.backward(engine.module(ids), zoo.count_tokens(ids), last=index == len(mine) - 1)
        now = engine.step()
        with torch.inference_mode():
            stats.append([float(now.loss), float(now.grad_norm), float(engine.module(micros[0]))])
    return {"stats": repr(stats), "state": engine.state_dict()}


def same(one: object, other: object) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


PLACES = [
    ("Plain", 0, "nvme", "none", 1.0, "float32"),
    ("Plain", 1, "nvme", "none", 1.0, "bfloat16"),
    ("Plain", 2, "nvme", "none", 0.5, "float32"),
    ("Plain", 3, "nvme", "nvme", 1.0, "float32"),
    ("Unused", 3, "nvme", "nvme", 1.0, "bfloat16"),
    ("Plain", 3, "nvme", "cpu", 0.5, "bfloat16"),
    ("Plain", 3, "cpu", "nvme", 1.0, "float32"),
    ("Integers", 3, "none", "nvme", 1.0, "bfloat16"),
]


@needs_kernels
@pytest.mark.parametrize(("model", "stage", "optimizer", "params", "fraction", "dtype"), PLACES)
def test_p44_state_on_a_disk_changes_no_bit(ranks, tmp_path, model, stage, optimizer, params, fraction, dtype) -> None:
    offload, precision = nvme(tmp_path, optimizer, params, fraction), PrecisionConfig(compute_dtype=dtype)
    without, on_disk = (ranks(2, train, model, stage, each, precision, "adamw")[0] for each in (OffloadConfig(), offload))
    assert on_disk["stats"] == without["stats"] and same(on_disk["state"], without["state"])


@needs_kernels
@pytest.mark.parametrize(("optimizer", "precision"), [("lion", PrecisionConfig()), ("sgd", PrecisionConfig()), ("adamw", OVERFLOWING)])
def test_every_optimizer_and_skipped_steps_change_no_bit(ranks, tmp_path, optimizer: str, precision: PrecisionConfig) -> None:
    offload = nvme(tmp_path, params="nvme")
    without, on_disk = (ranks(2, train, "Plain", 3, each, precision, optimizer)[0] for each in (OffloadConfig(), offload))
    assert on_disk["stats"] == without["stats"] and same(on_disk["state"], without["state"])
    assert ("nan" in on_disk["stats"] or "inf" in on_disk["stats"]) == (precision is OVERFLOWING), "some steps were skipped"


def measure(stage: int, offload: OffloadConfig, dtype: str, micro_batches: int) -> dict:
    torch.manual_seed(0)
    model, zero = Model(), ZeroConfig(stage=stage)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = ZeroEngine(model, zero, PrecisionConfig(compute_dtype=dtype), offload, optimizer=optimizer)
    store, counts = engine._host.store, []
    for _ in range(3):
        for _ in range(micro_batches):
            engine.backward(engine.module(torch.arange(12).view(3, 4)), 12, last=False)
        engine.step()
        engine.flush()
        counts.append((store.bytes_read, store.bytes_written))
    sizes = {"compute_itemsize": engine.compute_dtype.itemsize, "prefetch_bytes": zero.prefetch_bytes, "offload": offload}
    places = engine.layouts, policy_of(zero), dist.get_world_size()
    return {
        "formula": state_bytes(*places, rank=dist.get_rank(), messages=True, micro_batches=micro_batches, **sizes),
        "device": engine.memory.peak,
        "host": engine.host_memory.peak,
        "disk": engine.disk.peak,
        "file": store.nbytes,
        "traffic": tuple(now - before for before, now in zip(*counts[1:], strict=True)),
        "planned": disk_traffic(*places, micro_batches=micro_batches, **sizes),
    }


@needs_kernels
@pytest.mark.parametrize(
    ("stage", "optimizer", "params", "fraction", "micro_batches", "dtype"),
    [
        (1, "nvme", "none", 1.0, 1, "float32"),
        (2, "nvme", "none", 0.5, 2, "bfloat16"),
        (3, "nvme", "nvme", 1.0, 2, "float32"),
        (3, "nvme", "nvme", 1.0, 1, "bfloat16"),
        (3, "cpu", "nvme", 1.0, 1, "bfloat16"),
    ],
)
def test_bytes_and_traffic_are_those_of_the_formula(ranks, tmp_path, stage, optimizer, params, fraction, micro_batches, dtype) -> None:
    for result in ranks(2, measure, stage, nvme(tmp_path, optimizer, params, fraction), dtype, micro_batches):
        assert result["device"] == result["formula"].total
        assert result["host"] == result["formula"].host
        assert result["disk"] == result["file"] == result["formula"].disk > 0
        assert result["traffic"] == result["planned"]


@needs_kernels
def test_p48_a_step_that_is_not_finite_leaves_state_on_the_disk_as_it_was(tmp_path) -> None:
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=3), offload=nvme(tmp_path, params="nvme"), optimizer=zoo.adamw(model))
    (ids,) = zoo.micro_batches(1, 1)[0]
    engine.backward(engine.module(ids), zoo.count_tokens(ids))
    engine.step()
    before = engine.state_dict()
    engine.backward(engine.module(ids) * torch.inf, zoo.count_tokens(ids))
    with pytest.raises(NonFiniteError):
        engine.step()
    engine.module(ids)
    engine.reset()  # with parameters on their way from the disk
    assert same(engine.state_dict(), before)


@needs_kernels
def test_what_lies_on_the_disk_reads_as_nan_and_an_optimizers_own_state_dict_changes_nothing(tmp_path) -> None:
    states = []
    for offload in (OffloadConfig(), nvme(tmp_path)):
        model = zoo.make("Scalars", torch.float32)  # some have one element
        engine = ZeroEngine(model, ZeroConfig(stage=1), offload=offload, optimizer=zoo.adamw(model))
        for (ids,) in zoo.micro_batches(3, 1):
            engine.backward(engine.module(ids), zoo.count_tokens(ids))
            engine.step()
            if offload.optimizer == "nvme":
                assert all(state["exp_avg"].isnan().all() for state in engine.optimizer.state.values())
                engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        states.append(engine.state_dict())
    assert same(*states)


def test_an_error_of_the_disk_is_raised_where_its_result_is_needed(tmp_path, monkeypatch) -> None:
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=2), offload=nvme(tmp_path), optimizer=zoo.adamw(model))
    (ids,) = zoo.micro_batches(1, 1)[0]
    engine.backward(engine.module(ids), zoo.count_tokens(ids))
    monkeypatch.setattr(engine._host.store, "_descriptor", -1)
    engine.step()
    with pytest.raises(UserError, match="Bad file descriptor in reading the root's master"):
        engine.module(ids)


def test_ctrl_c_while_parameters_come_from_the_disk_frees_nothing_that_is_still_written(tmp_path, monkeypatch) -> None:
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=3), offload=nvme(tmp_path, "none", "nvme"))
    (ids,) = zoo.micro_batches(1, 1)[0]
    expected, go_on, read, wait = float(engine.module(ids).detach()), threading.Event(), os.preadv, Pending.wait
    engine.reset()

    def slowly(*args) -> int:
        assert go_on.wait(20)
        return read(*args)

    def interrupted(pending: Pending) -> None:
        monkeypatch.setattr(Pending, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "preadv", slowly)
    monkeypatch.setattr(Pending, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.module(ids)
    threading.Timer(0.3, go_on.set).start()
    engine.reset()
    assert go_on.is_set(), "it waited for the read"
    assert float(engine.module(ids).detach()) == expected


def test_what_cannot_run_from_a_disk_is_refused(tmp_path) -> None:
    model = zoo.make("Plain", torch.float32)
    with pytest.raises(ValueError, match="nvme needs a folder"):
        ZeroEngine(model, offload=OffloadConfig(optimizer="nvme"))
    with pytest.raises(ValueError, match="RMSprop as it is here runs by torch alone"):
        ZeroEngine(model, offload=nvme(tmp_path), optimizer=torch.optim.RMSprop(model.parameters()))
    model = zoo.make("Plain", torch.float64)
    with pytest.raises(ValueError, match="fp32 masters"):
        ZeroEngine(model, precision=PrecisionConfig(compute_dtype="float64"), offload=nvme(tmp_path), optimizer=zoo.adamw(model))
