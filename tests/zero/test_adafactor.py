"""Adafactor on shards does what torch.optim.Adafactor does in one process, under every stage and number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine, adafactor_step
from framework.zero.adafactor_step import parts
from tests.zero import zoo

STEPS, PER_STEP = 4, 6


class Convolved(zoo.Plain):
    """A parameter of three dimensions, one of none, and a row that is longer than a shard of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(3, 5, zoo.WIDTH) / 5)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.wide = nn.Parameter(torch.randn(2, 700) / 50)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x * self.gain + self.mix.sum(dim=(0, 1))) + (self.wide.cos().sum(dim=0)[: zoo.WIDTH] + self.wide.sin().sum())


def make(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Adafactor]:
    torch.manual_seed(1)
    model = Convolved().to(dtype)
    model.never = nn.Linear(3, 5, dtype=dtype)
    matrices, others = ([p for p in model.parameters() if (p.dim() >= 2) is which] for which in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02, "d": 2.0}]
    return model, torch.optim.Adafactor(groups, lr=0.05)


def plain(dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor], dict[str, dict]]:
    model, optimizer = make(dtype)
    losses = []
    for micros in zoo.micro_batches(STEPS, PER_STEP):
        loss = sum(model(ids) for ids in micros) / sum(zoo.count_tokens(ids) for ids in micros)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        losses.append(loss.item())
    parameters = dict(model.named_parameters())
    return losses, parameters, {name: dict(optimizer.state[parameter]) for name, parameter in parameters.items()}


def sharded(dtype: str, stage: int) -> tuple[list[float], dict]:
    model, optimizer = make(getattr(torch, dtype))
    engine = ZeroEngine(model, ZeroConfig(stage=stage), PrecisionConfig(compute_dtype=dtype), optimizer=optimizer, grad_clip=0.7)
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adafactor_step, "CHUNK", 100)
        for micros in zoo.micro_batches(STEPS, PER_STEP):
            for ids in micros[dist.get_rank() :: dist.get_world_size()]:
                engine.backward(engine.module(ids), zoo.count_tokens(ids))
            losses.append(float(engine.step().loss))
    return losses, engine.state_dict()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 2e-5)])
@pytest.mark.parametrize(("stage", "world"), [(0, 1), (0, 3), (1, 2), (2, 3), (3, 2), (3, 3)])
def test_p44_adafactor_trains_on_shards_as_torchs_does_on_whole_tensors(ranks, stage, world, dtype, tolerance) -> None:
    losses, parameters, states = plain(getattr(torch, dtype))
    found, state = ranks(world, sharded, dtype, stage)[0]
    assert found == pytest.approx(losses, rel=tolerance)
    for name, parameter in parameters.items():
        torch.testing.assert_close(state["model"][name], parameter.detach(), rtol=tolerance, atol=tolerance)
        assert state["optimizer"].get(name, {}).keys() == states[name].keys(), name
        for key, value in states[name].items():
            expected = value.view(1) if key == "variance" and not value.dim() else value
            torch.testing.assert_close(state["optimizer"][name][key], expected, rtol=50 * tolerance, atol=1e-12)


@pytest.mark.parametrize(("shape", "start", "stop"), [((4, 6), 0, 24), ((4, 6), 5, 20), ((4, 6), 7, 9), ((2, 3, 4), 3, 22), ((5, 1), 1, 4)])
def test_parts_are_rectangles_that_cover_a_piece(shape, start: int, stop: int) -> None:
    whole = torch.arange(torch.Size(shape).numel())
    below, beside = whole.view(-1, shape[-1]), torch.cat(list(whole.view(-1, *shape[-2:])), dim=1)
    found = list(parts(torch.Size(shape), start, stop))
    for part in found:
        rectangle = whole[start:stop][part.at].view(part.rows.stop - part.rows.start, -1)
        first = part.columns.start - part.matrix * shape[-1]
        assert torch.equal(rectangle, below[part.rows, first : first + rectangle.shape[1]])
        rows = slice(part.rows.start - part.matrix * shape[-2], part.rows.stop - part.matrix * shape[-2])
        assert torch.equal(rectangle, beside[rows, part.columns])
    assert torch.equal(torch.cat([whole[start:stop][part.at] for part in found]), whole[start:stop])


def test_a_step_that_uses_nothing_of_what_the_optimizer_has_changes_nothing() -> None:
    model = zoo.make("BranchingRoot", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=torch.optim.Adafactor(model.side.parameters()))
    before = dict(engine.full_tensors())
    ids = torch.arange(8).view(2, 4)
    engine.backward(engine.module(ids), zoo.count_tokens(ids))
    assert float(engine.step().grad_norm) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.full_tensors())
