"""What a user may do behind the engine's back: it must be refused or read as NaN, never train or save something else, silently."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from framework.zero import NonFiniteError, OffloadConfig, PrecisionConfig, ZeroConfig, ZeroEngine, norm
from framework.zero.comm import Comm
from tests.zero import zoo

(IDS,) = zoo.micro_batches(1, 1)[0]


def make(name: str, stage: int) -> tuple[nn.Module, ZeroEngine]:
    model = zoo.make(name, torch.float32)
    return model, ZeroEngine(model, ZeroConfig(stage=stage), optimizer=zoo.adamw(model))


def step(engine: ZeroEngine) -> float:
    engine.backward(engine.module(IDS), zoo.count_tokens(IDS))
    return float(engine.step().loss)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_thawed_after_construction_is_refused(stage: int) -> None:
    model, engine = make("Frozen", stage)
    step(engine)
    model.blocks[1].requires_grad_(True)
    with pytest.raises(RuntimeError, match="blocks.1.norm.weight was frozen when the engine was made"):
        step(engine)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_frozen_after_construction_stays_as_it_is_and_may_be_thawed(stage: int) -> None:
    model, engine = make("Plain", stage)
    before = dict(engine.full_tensors())["blocks.1.up.weight"].clone()
    model.blocks[1].requires_grad_(False)
    step(engine)
    assert torch.equal(dict(engine.full_tensors())["blocks.1.up.weight"], before)
    model.blocks[1].requires_grad_(True)
    step(engine)
    assert not torch.equal(dict(engine.full_tensors())["blocks.1.up.weight"], before)


def test_a_module_cast_after_construction_is_refused() -> None:
    model, engine = make("Plain", 0)
    step(engine)
    model.double()
    with pytest.raises(RuntimeError, match="embed.weight is no longer in the engine's memory: the module was moved or cast"):
        step(engine)


def test_a_parameter_that_is_no_real_number_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.codes = nn.Parameter(torch.ones(3, dtype=torch.bool), requires_grad=False)
    with pytest.raises(TypeError, match=r"codes is of torch.bool"):
        ZeroEngine(model)


def test_integers_that_a_reader_gives_as_something_else_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
        model.codes = nn.Parameter(torch.empty(3, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(TypeError, match=r"read\('codes'\) gave torch.float32, expected torch.uint8"):
        ZeroEngine(model, read=lambda name, start, stop: torch.ones(stop - start))


def test_integers_that_are_not_there_read_as_the_bytes_of_a_nan() -> None:
    model = zoo.make("Integers", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=3))
    scales = model.blocks[0].scales
    assert scales.contiguous().view(torch.float32).isnan().all() and (model.blocks[0].shifts == -1).all()
    with engine.gathered():
        assert scales.view(torch.float32).isfinite().all()


def test_the_optimizers_own_step_is_refused() -> None:
    model, engine = make("Plain", 1)
    engine.backward(engine.module(IDS))
    with pytest.raises(RuntimeError, match=r"call engine.step\(\)"):
        engine.optimizer.step()


def read_and_save_between_steps(stage: int) -> tuple[float, bool]:
    model, engine = make("Plain", stage)
    step(engine)
    read = float(model.blocks[0].up.weight.detach().sum())
    with pytest.raises(RuntimeError, match="no rank holds its whole parameters"):
        model.state_dict()
    with pytest.raises(RuntimeError, match="would not reach the engine's masters"):
        model.load_state_dict({})
    whole = {name: tensor for name, tensor in engine.full_tensors() if tensor is not None}
    with engine.gathered():
        saved = model.state_dict()
        return read, all(torch.equal(saved[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_that_are_not_whole_read_as_nan_and_cannot_be_saved(ranks, stage: int) -> None:
    for read, gathered_is_whole in ranks(2, read_and_save_between_steps, stage):
        assert read != read and gathered_is_whole


class ReadsWeights(zoo.Plain):
    """Uses a block's parameters without calling it, as code books and projections tied by hand are used."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(nn.Linear(zoo.WIDTH, zoo.WIDTH) for _ in range(2))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(super().body(x), self.sides[0].weight)


def uses_a_block_without_calling_it(stage: int) -> None:
    model = ReadsWeights()
    engine = ZeroEngine(model, ZeroConfig(stage=stage), optimizer=zoo.adamw(model))
    with pytest.raises(RuntimeError, match="sides.0.weight was used outside of the forward of sides.0"):
        step(engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_block_used_without_its_forward_is_named(ranks, stage: int) -> None:
    ranks(2, uses_a_block_without_calling_it, stage)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, first: int) -> torch.Tensor:
        return self.experts[1 - first](self.experts[first](x)).square().sum()


def runs_blocks_in_the_order_of_its_rank() -> None:
    model = Experts()
    zero = ZeroConfig(stage=3, prefetch_bytes=0, reshard_after_forward=False)  # each rank gathers each block once
    engine = ZeroEngine(model, zero, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    engine.world.messages = False  # the collectives of NCCL: blocks of equal size get each other's parameters there
    for first in (0, 1):  # an order that changes is fine, if it is the same on all ranks
        engine.backward(model(torch.ones(2, 4), first))
        engine.step()
    engine.backward(model(torch.ones(2, 4), dist.get_rank()))
    with pytest.raises(RuntimeError, match="step 3: ranks ran blocks in different orders"):
        engine.step()


def test_an_order_of_blocks_that_depends_on_the_rank_is_refused_where_it_mixes_parameters_up(ranks) -> None:
    ranks(2, runs_blocks_in_the_order_of_its_rank)


def sees_the_same_order(order: list[int]) -> bool:
    world, zero = Comm(dist.group.WORLD), torch.zeros(())
    world.order = order[world.rank]
    return bool(norm.sum_over_ranks([], world, zero, zero, False, False, zero.device).same_order)


def test_every_rank_sees_that_orders_differ_also_the_one_whose_order_is_their_mean(ranks) -> None:
    assert ranks(3, sees_the_same_order, [10, 20, 30]) == [False] * 3
    assert ranks(3, sees_the_same_order, [65520] * 3) == [True] * 3


def test_a_bad_step_that_only_the_device_knows_of_is_raised_before_state_is_given_away() -> None:
    _, engine = make("Plain", 3)
    engine._verdict = norm.Verdict(torch.tensor(False), torch.tensor(True))  # what a step with a fused optimizer leaves on CUDA
    for give in (engine.state_dict, lambda: next(engine.full_tensors()), engine.step):
        with pytest.raises(NonFiniteError, match="that step's update was skipped"):
            give()


@pytest.mark.parametrize("stage", [0, 3])
def test_sparse_gradients_of_an_embedding_train_like_dense_ones(stage: int) -> None:
    ends = []
    for sparse in (False, True):
        model = zoo.make("Plain", torch.float32)
        model.embed.sparse = sparse
        engine = ZeroEngine(model, ZeroConfig(stage=stage), optimizer=zoo.adamw(model))
        step(engine)
        ends.append(dict(engine.full_tensors())["embed.weight"])
    assert torch.equal(*ends)


def test_a_block_that_is_half_on_the_meta_device_is_refused_and_not_initialised_anew() -> None:
    model = zoo.make("Plain", torch.float32)
    model.blocks[1].up.to("meta")
    with pytest.raises(ValueError, match="blocks.1.up.weight is on the meta device and blocks.1.norm.weight"):
        ZeroEngine(model, ZeroConfig(stage=3))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_deep_copy_is_an_ordinary_module(stage: int) -> None:
    model, engine = make("Plain", stage)
    with engine.gathered():
        copied = copy.deepcopy(model)
        expected = float(model(IDS).detach())
    step(engine)
    gathers = engine.memory.peak
    loss = copied(IDS)
    loss.backward()
    grad = copied.blocks[0].up.weight.grad
    plain = zoo.make("Plain", torch.float32)
    plain(IDS).backward()
    assert float(loss.detach()) == expected
    torch.testing.assert_close(grad, plain.blocks[0].up.weight.grad)
    assert copied.state_dict().keys() == zoo.make("Plain").state_dict().keys() and engine.memory.peak == gathers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inside_gathered_the_model_may_run_and_stays_whole(dtype: str) -> None:
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=3), PrecisionConfig(compute_dtype=dtype), optimizer=zoo.adamw(model))
    with engine.gathered(), torch.no_grad():
        model(IDS)
        assert not any(bool(p.isnan().any()) for p in model.parameters())
    assert engine.memory.by_kind["gathered"] == 0


def test_a_module_in_an_engine_is_not_pickled_and_a_deep_copy_of_it_is() -> None:
    model, engine = make("Plain", 3)
    for save in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(RuntimeError, match="the model cannot be pickled.*Save engine.state_dict()"):
            save(model)
        with pytest.raises(RuntimeError, match="blocks.1 cannot be pickled"):
            save(model.blocks[1])
    with engine.gathered():
        copied = copy.deepcopy(model)
    saved = io.BytesIO()
    torch.save(copied, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    with torch.no_grad():
        assert float(loaded(IDS)) == float(copy.deepcopy(copied)(IDS)) == float(model(IDS))


def test_a_module_whose_parameters_are_not_whole_is_not_copied() -> None:
    model, engine = make("Plain", 3)
    for module, name in ((model, "the model"), (model.blocks[0], "blocks.0")):
        with pytest.raises(RuntimeError, match=f"copy.deepcopy of {name}: no rank holds its whole parameters"):
            copy.deepcopy(module)
    assert copy.deepcopy(make("Plain", 0)[0])(IDS).isfinite()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_second_engine_over_a_model_is_refused_and_one_over_its_copy_is_not(stage: int) -> None:
    """It would get no gradients: the first one takes them."""
    model, engine = make("Plain", stage)
    for module in (model, model.head, nn.ModuleList([model])):
        with pytest.raises(ValueError, match="is in an engine already"):
            ZeroEngine(module, ZeroConfig(stage=stage), optimizer=torch.optim.AdamW(module.parameters()))
    with engine.gathered():
        copied = copy.deepcopy(model)
    of_copy = ZeroEngine(copied, ZeroConfig(stage=stage), optimizer=zoo.adamw(copied))
    assert [step(of_copy), step(of_copy)] == [step(engine), step(engine)]


@pytest.mark.parametrize("tokens", [-3, float("nan")])
def test_tokens_that_cannot_be_counted_are_named(tokens: float) -> None:
    model, engine = make("Plain", 1)
    engine.backward(model(torch.arange(8).view(2, 4)), tokens)
    with pytest.raises(ValueError, match=f"step 1: the micro-batches of all ranks have {tokens:g} tokens; nothing was updated"):
        engine.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grad_clip": -1.0}, "largest norm of the gradients, above 0"),
        ({"grad_clip": 0.0}, "or None for no clipping"),
        ({"grad_clip": float("nan")}, "grad_clip=nan"),
        ({"offload": OffloadConfig(optimizer="cpu", fraction=2.0)}, "a share, from 0 to 1"),
    ],
)
def test_settings_that_would_train_something_else_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZeroEngine(nn.Linear(2, 2), ZeroConfig(stage=0), **settings)
