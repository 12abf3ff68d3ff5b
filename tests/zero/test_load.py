"""Filling shards: same values for every stage and world size, from a reader, by seeded initialisation, or from rank 0's module."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine
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
