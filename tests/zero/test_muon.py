"""Muon on shards does what torch.optim.Muon and torch.optim.AdamW do in one process, under every stage and number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from framework.zero import OffloadConfig, PrecisionConfig, ZeroConfig, ZeroEngine
from framework.zero.muon import Muon
from tests.zero import zoo

STEPS, PER_STEP, DECAY = 3, 6, 0.1
OPTIONS = {"lr": 1e-2, "momentum": 0.9}


def hidden(model: nn.Module, *, matrices: bool) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if p.requires_grad and (name.startswith("blocks.") and p.dim() == 2) is matrices]


def groups(model: nn.Module) -> list[dict]:
    of_matrices = {"params": hidden(model, matrices=True), "weight_decay": DECAY}
    of_others = {"params": hidden(model, matrices=False), "orthogonal": False, "lr": 3e-3}
    return [group for group in (of_matrices, of_others) if group["params"]]


def plain(name: str, dtype: torch.dtype, adjust_lr: str, clip: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """By torch's own."""
    model = zoo.make(name, dtype)
    optimizers = [torch.optim.Muon(hidden(model, matrices=True), weight_decay=DECAY, adjust_lr_fn=adjust_lr, **OPTIONS)]
    if others := hidden(model, matrices=False):
        optimizers.append(torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0))
    losses = []
    for micros in zoo.micro_batches(STEPS, PER_STEP):
        loss = sum(model(ids) for ids in micros) / sum(zoo.count_tokens(ids) for ids in micros)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], clip)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def sharded(name: str, dtype: str, adjust_lr: str, clip: float, stage: int):
    model = zoo.make(name, getattr(torch, dtype))
    optimizer = Muon(groups(model), adjust_lr=adjust_lr, **OPTIONS)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), PrecisionConfig(compute_dtype=dtype), optimizer=optimizer, grad_clip=clip)
    losses = []
    for micros in zoo.micro_batches(STEPS, PER_STEP):
        for ids in micros[dist.get_rank() :: dist.get_world_size()]:
            engine.backward(engine.module(ids), zoo.count_tokens(ids))
        losses.append(float(engine.step().loss))
    return losses, {name: tensor for name, tensor in engine.full_tensors() if tensor is not None}


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (0, 3), (1, 2), (2, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize(("name", "adjust_lr"), [("Unused", "original"), ("LowRank", "match_rms_adamw")])
def test_p44_muon_trains_on_shards_as_torchs_does_on_whole_matrices(ranks, name, adjust_lr, stage, world) -> None:
    losses, parameters = plain(name, torch.float64, adjust_lr, 0.5)
    found, tensors = ranks(world, sharded, name, "float64", adjust_lr, 0.5, stage)[0]
    assert found == pytest.approx(losses, rel=1e-9)
    for parameter, tensor in tensors.items():
        torch.testing.assert_close(tensor, parameters[parameter], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stage", [0, 3])
def test_in_fp32_they_differ_by_what_rounding_to_bf16_makes_of_the_last_bit_of_a_gradient(ranks, stage: int) -> None:
    losses, parameters = plain("Plain", torch.float32, "original", 1.0)
    found, tensors = ranks(2, sharded, "Plain", "float32", "original", 1.0, stage)[0]
    assert found == pytest.approx(losses, rel=1e-4)
    for parameter, tensor in tensors.items():
        torch.testing.assert_close(tensor, parameters[parameter], rtol=0, atol=2e-4)  # 2% of a step


def test_unsharded_it_is_torchs_to_the_bit() -> None:
    ours, torchs = zoo.make("Plain", torch.float32), zoo.make("Plain", torch.float32)
    optimizers = [Muon(hidden(ours, matrices=True), lr=0.02, weight_decay=0.1)]
    optimizers.append(torch.optim.Muon(hidden(torchs, matrices=True), lr=0.02, weight_decay=0.1))
    for (ids,) in zoo.micro_batches(3, 1):
        for model, optimizer in zip((ours, torchs), optimizers, strict=True):
            model.zero_grad()
            model(ids).backward()
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), torchs.parameters(), strict=True))


def assert_skips(engine: ZeroEngine) -> None:
    """A step that is not finite, in a kernel that the host does not ask, as on CUDA."""
    before = engine.state_dict()
    engine.sharded_optimizer.step(torch.tensor(1.0), torch.tensor(False), [True] * 100, engine._offsets)
    engine.sharded_optimizer.take_back_count()
    after = engine.state_dict()
    for name, tensor in before["model"].items():
        assert torch.equal(after["model"][name], tensor)
        assert all(torch.equal(value, after["optimizer"][name][key]) for key, value in before["optimizer"][name].items())


@pytest.mark.parametrize("make", [lambda model: Muon(groups(model), **OPTIONS), lambda model: torch.optim.Adafactor(model.parameters())])
def test_a_step_that_is_not_finite_changes_nothing(make) -> None:
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=make(model))
    for (ids,) in zoo.micro_batches(2, 1):
        engine.backward(engine.module(ids), zoo.count_tokens(ids))
        engine.step()
    assert_skips(engine)


@pytest.mark.parametrize("make", [lambda model: Muon(groups(model), **OPTIONS), lambda model: torch.optim.Adafactor(model.parameters())])
def test_masters_in_host_memory_are_refused(make) -> None:
    model = zoo.make("Plain", torch.float32)
    with pytest.raises(ValueError, match="needs its state on the device"):
        ZeroEngine(model, ZeroConfig(stage=1), offload=OffloadConfig(optimizer="cpu"), optimizer=make(model))


@pytest.mark.parametrize(
    ("options", "message"), [({"momentum": 1.0}, "momentum=1.0"), ({"lr": -1.0}, "lr=-1.0"), ({"adjust_lr": "other"}, "adjust_lr='other'")]
)
def test_settings_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.ones(2, 2))], **options)
    with pytest.raises(ValueError, match=r"a parameter of shape \(3,\) in a group of matrices"):
        Muon([nn.Parameter(torch.ones(3))])
