"""Flows that are not forward, backward, step: numbers stay right, and no memory is held longer than in the ordinary flow."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine, comm
from tests.zero import zoo

(IDS,) = zoo.micro_batches(1, 1)[0]


def step(engine: ZeroEngine) -> float:
    engine.backward(engine.module(IDS), zoo.count_tokens(IDS))
    return float(engine.step().loss)


class Skipping(zoo.Plain):
    """Leaves out the middle block for inputs of odd length."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.skips = ids.shape[1] % 2 == 1
        return super().forward(ids)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index == 1 and self.skips else block(x)
        return x


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_block_that_only_the_first_micro_batch_used_keeps_its_gradient(stage: int) -> None:
    micros = [torch.arange(8).view(2, 4), torch.arange(10).view(2, 5)]
    torch.manual_seed(1)
    plain = Skipping().double()
    sum(plain(ids) for ids in micros).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
    torch.manual_seed(1)
    model = Skipping()
    engine = ZeroEngine(model, ZeroConfig(stage=stage), PrecisionConfig(compute_dtype="float64"), optimizer=zoo.adamw(model))
    engine.backward(model(micros[0]), 0)
    engine.backward(model(micros[1]), 1)
    torch.testing.assert_close(engine.step().grad_norm, expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_kept_graph_may_run_backward_twice(stage: int) -> None:
    norms = []
    for twice in (True, False):
        model = zoo.make("LowRank")
        engine = ZeroEngine(model, ZeroConfig(stage=stage), PrecisionConfig(compute_dtype="float64"), optimizer=zoo.adamw(model))
        loss = model(IDS)
        if twice:
            loss.backward(retain_graph=True)
        engine.backward(loss if twice else 2 * loss)
        norms.append(float(engine.step().grad_norm))
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)


def most_gathered(model: nn.Module, *inputs: torch.Tensor, discard: bool = False) -> float:
    """Most bytes of blocks' gathered parameters in three steps, in units of one block's."""
    engine = ZeroEngine(model, ZeroConfig(stage=3, prefetch_bytes=0), optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    add, most = engine.memory.add, [0]

    def record(kind: str, nbytes: int) -> None:
        add(kind, nbytes)
        most[0] = max(most[0], engine.memory.by_kind["gathered"])

    engine.memory.add = record
    for _ in range(3):
        if discard:
            model(*inputs)
        engine.backward(model(*inputs).sum())
        engine.step()
    root, block = (sum(4 * buffer.padded for buffer in unit.buffers) for unit in engine.units[:2])
    return (most[0] - root) / block


def test_a_forward_that_was_thrown_away_does_not_keep_blocks_gathered_in_the_next_backward() -> None:
    """But for its last block, which stays for the backward that does not come."""
    assert most_gathered(zoo.make("Plain", torch.float32), IDS) == 1
    assert most_gathered(zoo.make("Plain", torch.float32), IDS, discard=True) == 2


class Sharing(nn.Module):
    """Blocks that all get one tensor besides: a parameter of the root, or something computed from it."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        self.latents, self.computed = nn.Parameter(torch.randn(8)), computed
        self.blocks = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.latents * 2 if self.computed else self.latents
        for block in self.blocks:
            x = torch.tanh(block(x, shared))
        return x


@pytest.mark.parametrize("computed", [True, False])
def test_an_input_that_all_blocks_share_does_not_keep_them_gathered(computed: bool) -> None:
    model = Sharing(computed)
    assert most_gathered(model, torch.ones(8)) == 1
    assert not model.latents._backward_hooks  # none is left behind on a tensor that outlives the step


class CallsBackward(zoo.Plain):
    def training_step(self, engine: ZeroEngine, fail: bool) -> None:
        loss = self(IDS)
        if fail:
            loss.register_hook(_raise)
        engine.backward(loss, zoo.count_tokens(IDS))


def _raise(*_):
    raise ArithmeticError("here")


def test_a_backward_that_fails_inside_a_wrapped_method_leaves_the_root_to_be_released() -> None:
    model = CallsBackward()
    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=zoo.adamw(model))
    engine.wrap_method(model, "training_step")
    with pytest.raises(ArithmeticError):
        model.training_step(engine, fail=True)
    step(engine)
    assert engine.memory.by_kind["gathered"] == 0


def fails_while_messages_are_under_way(stage: int) -> list[float]:
    """Rank 1 comes to the failure a second after rank 0, whose prefetch is under way by then."""
    losses = []
    for fail in (True, False):
        model = zoo.make("Plain", torch.float32)
        engine = ZeroEngine(model, ZeroConfig(stage=stage, prefetch_bytes=1), optimizer=zoo.adamw(model))
        step(engine)
        if fail:
            hooks = [
                model.blocks[0].up.register_forward_hook(lambda *_: time.sleep(dist.get_rank())),
                model.blocks[1].up.register_forward_hook(_raise),
            ]
            with pytest.raises(ArithmeticError):
                step(engine)
            for hook in hooks:
                hook.remove()
            engine.reset()
        held = engine.memory.current
        losses += [step(engine) for _ in range(4)]
        assert engine.memory.by_kind.get("gathered", 0) == 0 and held <= engine.memory.current
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_a_failure_on_all_ranks_with_messages_under_way_is_recovered_from(ranks, stage: int) -> None:
    for losses in ranks(2, fails_while_messages_are_under_way, stage):
        assert losses[:4] == losses[4:]


def fails_on_one_rank() -> None:
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=zoo.adamw(model), group=dist.new_group())
    step(engine)
    if dist.get_rank() == 0:
        comm.ABANDON_SECONDS = 0.5
        engine.world.abandon(engine.world.all_gather(torch.empty(512), torch.empty(256), tag=10**6))  # the other rank does not answer
        with pytest.raises(RuntimeError, match="left them at different points"):
            step(engine)
        comm.ABANDON_SECONDS = 10


def test_a_rank_that_failed_alone_refuses_to_go_on(ranks) -> None:
    ranks(2, fails_on_one_rank)


class ListsOfLayers(nn.Module):
    """Each layer is a plain list, as in many vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)]) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, norm in self.layers:
            x = x + norm(linear(x))
        return x


def train_lists(stage: int | None) -> list[float]:
    torch.manual_seed(0)
    model, x = ListsOfLayers(), torch.linspace(-1, 1, 8).view(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = None if stage is None else ZeroEngine(model, ZeroConfig(stage=stage), optimizer=optimizer)
    losses = []
    for _ in range(3):
        loss = model(x).square().sum()
        losses.append(float(loss.detach()))
        if engine is None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            engine.backward(loss)
            engine.step()
    return losses


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_layers_in_lists_of_lists_train_as_unsharded(ranks, stage: int) -> None:
    assert ranks(2, train_lists, stage)[0] == pytest.approx(train_lists(None), rel=1e-5)
