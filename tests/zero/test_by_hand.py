"""Micro-batches in an order of one's own, and parameters that are looked at or changed by hand: exact at every stage."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine
from tests.zero import zoo

MICROS, STEPS = 3, 2
(IDS,) = zoo.micro_batches(1, 1)[0]


class PipelineStage(nn.Module):
    """What one rank of a pipeline holds: hidden states in, hidden states out."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH)
        self.blocks = nn.ModuleList(zoo.Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def make(stage: int | None) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine | None]:
    torch.manual_seed(3)
    model = PipelineStage().double()
    optimizer = zoo.adamw(model)
    zero = None if stage is None else ZeroConfig(stage=stage)
    engine = None if zero is None else ZeroEngine(model, zero, PrecisionConfig(compute_dtype="float64"), optimizer=optimizer)
    return model, optimizer, engine


def inputs(step: int, world_size: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(2 + n % 3, zoo.WIDTH, dtype=torch.float64, generator=generator) for n in range(MICROS * world_size)]


def forward(engine: ZeroEngine, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    return x, engine.module(x)


def one_forward_one_backward(engine: ZeroEngine, micros: list[torch.Tensor]) -> None:
    """F0 F1 B0 F2 B1 B2."""
    waiting = [forward(engine, micros[0])]
    for number in range(1, MICROS + 1):
        if number < MICROS:
            waiting.append(forward(engine, micros[number]))
        _, y = waiting.pop(0)
        engine.backward(y.square().sum(), y.numel(), last=number == MICROS)


def one_forward_one_backward_by_hand(engine: ZeroEngine, micros: list[torch.Tensor]) -> None:
    with engine.manual():
        one_forward_one_backward(engine, micros)


def zero_bubble(engine: ZeroEngine, micros: list[torch.Tensor], *, released: bool = False) -> None:
    """Gradients of inputs first, those of weights after all of them."""
    parameters, left = list(engine.module.parameters()), []
    with engine.manual() as step:
        for micro in micros:
            x, y = forward(engine, micro)
            engine.count(y.square().sum(), y.numel())
            left.append(stage_backward_input([y], [2 * y.detach()], [x], iter(parameters))[1])
            assert x.grad.isfinite().all() and all(p.grad is None for p in parameters)
            if released:
                step.release()
                assert engine.memory.by_kind.get("gathered", 0) == 0
        if released:
            step.gather()
        for groups in left:
            stage_backward_weight(iter(parameters), groups)


def zero_bubble_released_between(engine: ZeroEngine, micros: list[torch.Tensor]) -> None:
    zero_bubble(engine, micros, released=True)


def train(stage: int, schedules: list) -> list[tuple[list[float], dict]]:
    results = []
    for schedule in schedules:
        *_, engine = make(stage)
        norms = []
        for step in range(STEPS):
            schedule(engine, inputs(step)[dist.get_rank() :: 2])
            norms.append(float(engine.step().grad_norm))
        assert engine.memory.by_kind.get("gathered", 0) == 0
        results.append((norms, dict(engine.full_tensors())))
    return results


def train_plain() -> tuple[list[float], dict]:
    model, optimizer, _ = make(None)
    norms = []
    for step in range(STEPS):
        outputs = [model(x) for x in inputs(step)]
        optimizer.zero_grad()
        (sum(y.square().sum() for y in outputs) / sum(y.numel() for y in outputs)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        optimizer.step()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_schedules_of_pipelines_train_as_plain_torch(ranks, stage: int) -> None:
    """Forward and backward of micro-batches interleaved, and a zero-bubble split by torch's own functions."""
    schedules = [one_forward_one_backward, one_forward_one_backward_by_hand, zero_bubble, zero_bubble_released_between]
    norms, parameters = train_plain()
    for schedule, (got_norms, got) in zip(schedules, ranks(2, train, stage, schedules)[0], strict=True):
        assert got_norms == pytest.approx(norms, rel=1e-10), schedule.__name__
        for name, tensor in got.items():
            torch.testing.assert_close(tensor, parameters[name], rtol=1e-10, atol=1e-12, msg=lambda m, s=schedule: f"{s.__name__}: {m}")


def bytes_of_a_manual_step(stage: int) -> tuple[int, list[int]]:
    *_, engine = make(stage)
    for step in range(2):
        before = engine.world.bytes_sent
        zero_bubble(engine, inputs(step)[dist.get_rank() :: 2])
        sent = engine.world.bytes_sent - before
        engine.step()
    return sent, sum(8 * buffer.padded for buffer in engine.buffers) // 2


def test_a_manual_step_gathers_and_reduces_once_however_many_micro_batches(ranks) -> None:
    for stage in (2, 3):
        sent, half = ranks(2, bytes_of_a_manual_step, stage)[0]
        assert sent == 2 * half


def test_linear_layers_need_no_parameters_for_the_gradients_of_their_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = copy.deepcopy(model)
    x = torch.randn(3, 4, requires_grad=True)
    expected(x).sum().backward()
    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    with engine.manual() as step:
        y = model(x)
        engine.count(y.sum(), 1)
        _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], model.parameters())
        step.release()
        stage_backward_weight(model.parameters(), groups)
        step.collect()
        assert all(p.grad is None for p in model.parameters())
    engine.step()
    for (_, trained), before in zip(engine.full_tensors(), expected.parameters(), strict=True):
        torch.testing.assert_close(trained, (before - before.grad).detach())


def test_a_manual_step_that_fails_is_forgotten() -> None:
    *_, engine = make(3)
    *_, other = make(3)
    for chosen in (engine, other):
        if chosen is engine:
            with pytest.raises(KeyboardInterrupt), engine.manual():
                forward(engine, inputs(0)[0])[1].sum().backward()
                raise KeyboardInterrupt
        zero_bubble(chosen, inputs(0)[:3])
    assert float(engine.step().grad_norm) == float(other.step().grad_norm)


def test_a_gradient_assigned_outside_of_a_manual_step_and_a_step_inside_are_refused() -> None:
    model, _, engine = make(1)
    y = model(inputs(0)[0])
    engine.backward(y.sum())
    model.outlet.weight.grad = torch.ones_like(model.outlet.weight)
    with pytest.raises(RuntimeError, match="outlet.weight.grad was assigned by hand"):
        engine.step()
    with pytest.raises(RuntimeError, match="leave it before"), engine.manual():
        engine.step()


# ---- whole parameters
def changes_a_row(stage: int, dtype: str) -> dict:
    """Rank 0 writes a row of the embedding and all of a weight in a block; rank 1 writes something else."""
    model = zoo.make("Tied", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), PrecisionConfig(compute_dtype=dtype), optimizer=zoo.adamw(model))
    for _ in range(2):
        engine.backward(model(IDS), zoo.count_tokens(IDS))
        engine.step()
    before = dict(engine.full_tensors())
    weight = model.blocks[1].up.weight
    with engine.gathered([model.embed, weight], modify=True), torch.no_grad():
        unchosen_is_released = bool(model.blocks[0].up.weight.isnan().all()) if stage == 3 else True
        model.embed.weight[5] = 0.25 + dist.get_rank()
        weight.data = torch.full_like(weight, 0.5 - dist.get_rank())
    after = dict(engine.full_tensors())
    engine.backward(model(IDS), zoo.count_tokens(IDS))
    return {"before": before, "after": after, "loss": float(engine.step().loss), "unchosen": unchosen_is_released}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_rank_0_changes_holds_on_every_rank_and_no_other_master_moves(ranks, dtype: str) -> None:
    losses = []
    for stage in (0, 1, 3):
        result, other = ranks(2, changes_a_row, stage, dtype)
        expected = {name: tensor.clone() for name, tensor in result["before"].items()}
        expected["embed.weight"][5], expected["blocks.1.up.weight"][:] = 0.25, 0.5
        assert all(torch.equal(result["after"][name], tensor) for name, tensor in expected.items())
        assert result["unchosen"] and result["loss"] == other["loss"]
        losses.append(result["loss"])
    plain = zoo.make("Tied", torch.float32)
    plain.load_state_dict(expected, strict=False)
    assert losses == pytest.approx([float(plain(IDS).detach()) / zoo.count_tokens(IDS)] * 3, rel=1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_exception_inside_undoes_changes(stage: int) -> None:
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), optimizer=zoo.adamw(model))
    before = dict(engine.full_tensors())
    with pytest.raises(ArithmeticError), engine.gathered(modify=True), torch.no_grad():
        model.head.weight.zero_()
        raise ArithmeticError
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.full_tensors())


def test_changes_without_modify_and_parameters_of_others_are_refused() -> None:
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=zoo.adamw(model))
    with pytest.raises(RuntimeError, match="head.weight was changed inside engine.gathered()"), engine.gathered(model.head):
        nn.init.zeros_(model.head.weight)
    with pytest.raises(RuntimeError, match=r"engine.step\(\) inside engine.gathered"), engine.gathered(model.head, modify=True):
        engine.backward(model(IDS), zoo.count_tokens(IDS))
        engine.step()
    with pytest.raises(ValueError, match="not one of the engine's module"), engine.gathered(nn.Linear(2, 2)):
        pass
    assert engine.memory.by_kind["gathered"] == 0


# ---- entries
class Streams(zoo.Plain):
    def stream(self, count: int) -> Iterator[float]:
        for _ in range(count):
            yield float(self.head.weight.detach().sum())

    async def later(self) -> None: ...


def test_a_generator_is_entered_until_it_ends_and_what_is_asynchronous_is_refused() -> None:
    model = Streams()
    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=zoo.adamw(model))
    engine.wrap_method(model, "stream")
    with torch.no_grad():
        values = list(model.stream(3))
    assert len(set(values)) == 1 and values[0] == values[0] and engine.memory.by_kind["gathered"] == 0
    with pytest.raises(TypeError, match="later is asynchronous"):
        engine.wrap_method(model, "later")


def test_a_wrapped_method_of_a_deep_copy_is_the_copys_own() -> None:
    model = Streams()
    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=zoo.adamw(model))
    engine.wrap_method(model, "stream")
    with engine.gathered():
        copied = copy.deepcopy(model)
    nn.init.ones_(copied.head.weight)
    assert list(copied.stream(1)) == [copied.head.weight.numel()]
