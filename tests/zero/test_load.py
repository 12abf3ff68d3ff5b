"""Filling shards: same values for every stage and world size, from a reader, by seeded initialisation, or from rank 0's module."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine
from framework.zero.norm import Verdict
from tests.zero import zoo


def whole(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in engine.full_tensors() if tensor is not None}


def build_by_reset(name: str, stage: int, seed: int = 3) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = zoo.MODELS[name]()
    return whole(ZeroEngine(model, ZeroConfig(stage=stage), optimizer=zoo.adamw(model), seed=seed))


@pytest.mark.parametrize("name", ["Plain", "Tied"])
def test_seeded_initialisation_is_the_same_for_every_stage_and_world_size(ranks, name: str) -> None:
    expected = build_by_reset(name, 0)
    assert expected["blocks.0.up.weight"].std() > 0 and not torch.equal(expected["blocks.0.up.weight"], expected["blocks.1.up.weight"])
    for world_size, stage in ((1, 3), (2, 0), (2, 1), (2, 3), (4, 3)):
        built = ranks(world_size, build_by_reset, name, stage)[0]
        assert all(torch.equal(built[key], expected[key]) for key in expected)
    assert not torch.equal(build_by_reset(name, 0, seed=4)["embed.weight"], expected["embed.weight"])


def test_a_tie_between_blocks_survives_initialisation_on_the_meta_device() -> None:
    expected = build_by_reset("TiedAcrossBlocks", 0)
    sharded = build_by_reset("TiedAcrossBlocks", 3)
    assert all(torch.equal(sharded[name], expected[name]) for name in expected)
    assert expected["blocks.2.up.bias"].std() > 0


def test_a_module_that_cannot_initialise_itself_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    with torch.device("meta"):
        model = nn.ModuleDict({"bare": Bare()})
    with pytest.raises(TypeError, match=r"bare \(Bare\) owns bare.weight on the meta device"):
        ZeroEngine(model)


def different_on_each_rank(stage: int) -> dict[str, torch.Tensor]:
    model = zoo.make("Plain", torch.float32, seed=dist.get_rank())
    return whole(ZeroEngine(model, ZeroConfig(stage=stage), optimizer=zoo.adamw(model)))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_real_module_starts_from_rank_zeros_values(ranks, stage: int) -> None:
    expected = dict(zoo.make("Plain", torch.float32, seed=0).named_parameters())
    built = ranks(2, different_on_each_rank, stage)[0]
    assert all(torch.equal(built[name], expected[name]) for name in expected)


def build_from_reader(stage: int, compute_dtype: str) -> tuple[dict[str, torch.Tensor], int]:
    values = {name: p.detach().clone() for name, p in zoo.make("Tied", torch.float32).named_parameters()}
    elements = [0]

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        elements[0] += stop - start
        return values[name].reshape(-1)[start:stop]

    with torch.device("meta"):
        model = zoo.MODELS["Tied"]()
    engine = ZeroEngine(model, ZeroConfig(stage=stage), PrecisionConfig(compute_dtype=compute_dtype), optimizer=zoo.adamw(model), read=read)
    assert model.head.weight is model.embed.weight
    return whole(engine), elements[0]


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_each_rank_reads_only_its_own_elements_and_masters_keep_full_precision(ranks, compute_dtype: str) -> None:
    expected = dict(zoo.make("Tied", torch.float32).named_parameters())
    results = ranks(2, build_from_reader, 3, compute_dtype)
    assert sum(elements for _, elements in results) == sum(p.numel() for p in expected.values())
    assert all(torch.equal(results[0][0][name], expected[name]) for name in expected)


def test_a_recurrent_module_is_filled_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.LSTM(3, 3)
    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    engine.backward(model(torch.ones(2, 3))[0].sum())
    assert float(engine.step().grad_norm) > 0


class Expanded(zoo.Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, dtype=torch.bool).expand(3))


def place_an_expanded_buffer() -> bool:
    mask = ZeroEngine(Expanded()).module.mask
    return bool(mask.all()) and mask.is_contiguous()  # a broadcast writes all elements, of which the view has one


def test_a_buffer_that_is_an_expanded_view_is_placed(ranks) -> None:
    assert ranks(2, place_an_expanded_buffer) == [True, True]


OPTIMIZERS = {"adamw": zoo.adamw, "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)}


def trains_and_resumes(optimizer: str, stages: tuple[int, int]) -> tuple[list[float], list[float], list[int]]:
    """Losses of steps 3 and 4 by the engine that went on, and by one of another stage that had trained something else and then loaded."""
    (ids,) = zoo.micro_batches(1, 1)[0]
    losses, saved, held = [], [None], []
    for stage in stages:
        model = zoo.make("Scalars", seed=stage)
        precision = PrecisionConfig(compute_dtype="float64")
        engine = ZeroEngine(model, ZeroConfig(stage=stage), precision, optimizer=OPTIMIZERS[optimizer](model))
        for number in range(4):
            if number == 2 and saved[0] is None:
                saved = [engine.state_dict()]
                dist.broadcast_object_list(saved)
            elif number == 2:
                engine.load_state_dict(saved[0])
            engine.backward(model(ids), zoo.count_tokens(ids))
            losses.append(float(engine.step().loss))
        held.append(engine.memory.by_kind["optimizer"])
    return losses[2:4], losses[6:], held


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_state_of_every_shape_is_saved_and_loaded(ranks, optimizer: str) -> None:
    for went_on, loaded, held in ranks(2, trains_and_resumes, optimizer, (3, 2)):
        assert loaded == pytest.approx(went_on, rel=1e-10)
        assert held[0] == held[1]


def loads_a_state_from_before_the_first_step() -> tuple[list[float], list[float]]:
    (ids,) = zoo.micro_batches(1, 1)[0]
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, optimizer=zoo.adamw(model))
    fresh = engine.state_dict()
    losses: list[float] = []
    for number in range(6):
        if number == 3:
            engine.load_state_dict(fresh)
            assert engine.memory.by_kind["optimizer"] == 0
        engine.backward(model(ids), zoo.count_tokens(ids))
        losses.append(float(engine.step().loss))
    return losses[:3], losses[3:]


def test_loading_forgets_the_optimizer_state_of_before() -> None:
    first, again = loads_a_state_from_before_the_first_step()
    assert first == again


def resumed(stage_before: int, stage_after: int, saved: dict | None) -> tuple[list[float], dict]:
    """Train two steps, save; or load and train two more."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = zoo.make("Unused", seed=1 if saved is None else 9)
    engine = ZeroEngine(
        model,
        ZeroConfig(stage=stage_before if saved is None else stage_after),
        PrecisionConfig(compute_dtype="float64"),
        optimizer=zoo.adamw(model),
    )
    steps = zoo.micro_batches(4, 4)
    if saved is not None:
        engine.load_state_dict(saved)
    losses = []
    for micros in steps[:2] if saved is None else steps[2:]:
        for ids in micros[rank::world_size]:
            engine.backward(engine.module(ids), zoo.count_tokens(ids))
        losses.append(float(engine.step().loss))
    return losses, engine.state_dict()


@pytest.mark.parametrize(("before", "after"), [((2, 3), (1, 0)), ((1, 0), (4, 3)), ((2, 1), (2, 2))])
def test_state_moves_between_stages_and_world_sizes(ranks, before: tuple[int, int], after: tuple[int, int]) -> None:
    plain = zoo.train_plain("Unused", zoo.micro_batches(4, 4), None)
    saved = ranks(before[0], resumed, before[1], after[1], None)[0][1]
    losses, _ = ranks(after[0], resumed, before[1], after[1], saved)[0]
    assert losses == pytest.approx(plain["loss"][2:], rel=1e-10)


def loads_what_does_not_fit() -> list[str]:
    """On every rank, also those that have nothing of what does not fit."""
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=zoo.adamw(model))
    before, said = whole(engine), []
    weights = {slot.name: torch.zeros(slot.shape) for buffer in engine.buffers for slot in buffer.layout.slots}
    state = {"model": weights, "optimizer": {}, "param_groups": [{}, {}], "step": 7}
    for changed in ({"model": weights | {"blocks.2.down.bias": torch.zeros(5)}}, {"param_groups": [{}]}):
        with pytest.raises((KeyError, ValueError)) as refused:
            engine.load_state_dict(state | changed)
        said.append(str(refused.value))
    assert engine.steps_done == 0 and all(torch.equal(tensor, before[name]) for name, tensor in whole(engine).items())
    return said


def test_what_does_not_fit_is_refused_on_every_rank_before_anything_changes(ranks) -> None:
    for shape, groups in ranks(2, loads_what_does_not_fit):
        assert "blocks.2.down.bias: got shape (5,), expected (12,)" in shape
        assert "has 2 groups" in groups


@pytest.mark.parametrize("fatal", [True, False])
def test_loading_forgets_a_bad_step_that_was_not_reported_yet(fatal: bool) -> None:
    """As on CUDA, where the device alone knows of it until the next step."""
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=1), optimizer=zoo.adamw(model))
    (ids,) = zoo.micro_batches(1, 1)[0]
    engine.backward(engine.module(ids), zoo.count_tokens(ids))
    engine.step()
    saved = engine.state_dict()
    engine._verdict = Verdict(torch.tensor(False), torch.tensor(fatal))
    engine.load_state_dict(saved)
    assert engine.state_dict()["optimizer"]["embed.weight"]["step"] == 1
