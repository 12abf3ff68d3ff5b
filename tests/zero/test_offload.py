"""Model state in host memory: the numbers are those of training without it, the bytes those of the plan, and updates run in order."""

from __future__ import annotations

import threading

import pytest
import torch

from framework.kernels import library
from framework.zero import NonFiniteError, OffloadConfig, PrecisionConfig, ZeroConfig, ZeroEngine
from framework.zero import flat_optimizer as flat
from framework.zero.policy import offloaded
from tests.zero import zoo
from tests.zero.test_exactness import CLIP, MICROS, STEPS, assert_equal
from tests.zero.test_memory import Model, planned

OPTIMIZER, ALL, HALF = (
    OffloadConfig(optimizer="cpu"),
    OffloadConfig(optimizer="cpu", params="cpu"),
    OffloadConfig(optimizer="cpu", fraction=0.5),
)
PLACES = [(stage, OPTIMIZER) for stage in (0, 1, 2, 3)] + [(3, ALL), (2, HALF), (3, OffloadConfig(params="cpu"))]
needs_kernels = pytest.mark.skipif(library.missing("cpu") is not None, reason=f"no compiled kernels: {library.missing('cpu')}")


def train(name: str, stage: int, offload: OffloadConfig, dtype: str) -> dict:
    model = zoo.make(name, torch.float64 if dtype == "float64" else torch.float32)
    precision = PrecisionConfig(compute_dtype=dtype)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), precision, offload, optimizer=zoo.adamw(model), grad_clip=CLIP)
    trained = zoo.train(engine, zoo.micro_batches(STEPS, MICROS))
    return {**trained, "model": {name: tensor for name, tensor in engine.full_tensors() if tensor is not None}}


@pytest.mark.parametrize(("stage", "offload"), PLACES, ids=str)
def test_p44_offloaded_state_trains_as_unsharded_torch(ranks, stage: int, offload: OffloadConfig) -> None:
    for name in ("Plain", "LowRank", "Unused", "SkippedBlock", "Branching"):
        micro_batches = zoo.micro_batches(STEPS, MICROS)
        assert_equal(ranks(2, train, name, stage, offload, "float64"), zoo.train_plain(name, micro_batches, CLIP), 1e-10)
        plain = zoo.train_plain(name, micro_batches, CLIP, torch.float32)
        assert_equal(ranks(2, train, name, stage, offload, "float32"), plain, 2e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("stage", "offload"), PLACES, ids=str)
def test_offloading_changes_no_bit(ranks, stage: int, offload: OffloadConfig, dtype: str) -> None:
    without, offloaded = (ranks(2, train, "Plain", stage, each, dtype)[0] for each in (OffloadConfig(), offload))
    assert offloaded["loss"] == without["loss"] and offloaded["norm"] == without["norm"]
    for name, tensor in without["model"].items():
        assert torch.equal(offloaded["model"][name], tensor), name


def measure(stage: int, offload: OffloadConfig, dtype: str) -> dict:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), PrecisionConfig(compute_dtype=dtype), offload, optimizer=optimizer)
    for _ in range(3):
        engine.backward(engine.module(torch.arange(12).view(3, 4)), 12)
        engine.step()
    engine.flush()
    return {"peak": engine.memory.peak, "host": engine.host_memory.current, "formula": planned(engine)}


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("stage", "offload"), PLACES, ids=str)
def test_bytes_on_device_and_host_are_those_of_the_formula(ranks, stage: int, offload: OffloadConfig, dtype: str) -> None:
    for result in ranks(2, measure, stage, offload, dtype):
        assert result["peak"] == result["formula"].total
        assert result["host"] == result["formula"].host
        assert result["host"] > 0


def test_the_last_blocks_are_offloaded_up_to_the_fraction() -> None:
    config = lambda fraction: OffloadConfig(optimizer="cpu", fraction=fraction)  # noqa: E731
    numels = [40, 20, 20, 20]
    assert offloaded(config(1.0), numels) == [True] * 4
    assert offloaded(config(0.4), numels) == [False, False, True, True]
    assert offloaded(config(0.0), numels) == offloaded(OffloadConfig(), numels) == [False] * 4


@needs_kernels
def test_a_step_returns_before_the_updates_are_done_and_a_block_waits_for_its_own(monkeypatch) -> None:
    """The kernel is held up for blocks 1 and 2: block 0 can already run forward, and block 1 waits."""
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=2), offload=OPTIMIZER, optimizer=zoo.adamw(model))
    go_on, order, kernel = threading.Event(), [], flat.adamw_
    (ids,) = zoo.micro_batches(1, 1)[0]

    def slow(master, *args, **kwargs):
        order.append(
            next(b.layout.unit for b in engine.buffers if b.master.data_ptr() <= master.data_ptr() < b.master.data_ptr() + b.master.nbytes)
        )
        if order[-1] == "blocks.1":
            assert go_on.wait(20)
        kernel(master, *args, **kwargs)

    monkeypatch.setattr(flat, "adamw_", slow)
    engine.backward(engine.module(ids), zoo.count_tokens(ids))
    engine.step()
    reached = []
    for name, block in zip(("blocks.0", "blocks.1", "blocks.2"), model.blocks, strict=True):
        block.register_forward_hook(lambda *_, name=name: reached.append((name, go_on.is_set())))
    threading.Timer(0.5, go_on.set).start()
    engine.module(ids)
    assert order == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert reached == [("blocks.0", False), ("blocks.1", True), ("blocks.2", True)]


@needs_kernels
def test_what_goes_wrong_on_the_host_is_raised_where_its_result_is_needed(monkeypatch) -> None:
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=3), offload=OPTIMIZER, optimizer=zoo.adamw(model))
    (ids,) = zoo.micro_batches(1, 1)[0]
    engine.backward(engine.module(ids), zoo.count_tokens(ids))
    monkeypatch.setattr(flat, "adamw_", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no memory left")))
    engine.step()
    with pytest.raises(MemoryError, match="no memory left"):
        engine.flush()


def test_p48_a_step_that_is_not_finite_leaves_offloaded_state_as_it_was() -> None:
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=3), offload=ALL, optimizer=zoo.adamw(model))
    (ids,) = zoo.micro_batches(1, 1)[0]
    engine.backward(engine.module(ids), zoo.count_tokens(ids))
    engine.step()
    before = dict(engine.full_tensors())
    engine.backward(engine.module(ids) * torch.inf, zoo.count_tokens(ids))
    with pytest.raises(NonFiniteError):
        engine.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.full_tensors())


def test_parameters_are_offloaded_at_stage_3_only() -> None:
    with pytest.raises(ValueError, match="need ZeRO stage 3"):
        ZeroEngine(zoo.make("Plain"), ZeroConfig(stage=2), offload=ALL)


@needs_kernels
def test_what_is_loaded_right_after_a_step_is_not_changed_by_its_update() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = ZeroEngine(model, ZeroConfig(stage=2), offload=OffloadConfig(optimizer="cpu"), optimizer=optimizer)

    def step() -> None:
        engine.backward(engine.module(torch.ones(2, 1024)).square().sum(), 2)
        engine.step()

    step()
    saved = engine.state_dict()
    step()
    engine.load_state_dict(saved)
    engine.flush()
    assert all(torch.equal(tensor, saved["model"][name]) for name, tensor in engine.full_tensors())


@needs_kernels
def test_gradients_assigned_by_hand_wait_for_the_update_that_reads_the_last_ones(monkeypatch) -> None:
    """At stage 0 they lie in the same place. The kernel is held up for the root, so that the last block's gradients are not read yet."""
    ends, kernel = [], flat.adamw_
    for held in (False, True):
        model = zoo.make("Plain", torch.float32)
        engine = ZeroEngine(model, ZeroConfig(stage=0), offload=OPTIMIZER, optimizer=zoo.adamw(model))
        go_on = threading.Event()

        def slow(*args, go_on=go_on, **kwargs):
            assert go_on.wait(20)
            kernel(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(flat, "adamw_", slow if held else kernel)
            (ids,) = zoo.micro_batches(1, 1)[0]
            engine.backward(engine.module(ids), zoo.count_tokens(ids))
            engine.step()
            threading.Timer(0.2, go_on.set).start()
            with engine.manual() as manual:
                parameter = model.blocks[2].down.weight
                parameter.grad = torch.full(parameter.shape, 7.0)
                manual.collect()
                engine.count(torch.tensor(1.0), 1)
            engine.step()
            ends.append(dict(engine.full_tensors()))
    assert all(torch.equal(ends[1][name], tensor) for name, tensor in ends[0].items())


class OneMatrix(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(zoo.WIDTH, zoo.WIDTH) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ self.weight


class Reordered(zoo.Plain):
    """Blocks in the order of `order`, which may be another one in each pass; each so small that all of it is rank 0's."""

    block, order = OneMatrix, (0, 1, 2)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def gathers_of_a_changed_order() -> tuple[list[int], list[int]]:
    """(tags in the order of gathers, elements of the blocks on this rank)."""
    torch.manual_seed(1)
    model = Reordered()
    engine = ZeroEngine(model, ZeroConfig(stage=3), offload=OPTIMIZER, optimizer=zoo.adamw(model))
    tags, send = [], engine.world.all_gather
    engine.world.all_gather = lambda out, shard, tag: tags.append(tag) or send(out, shard, tag)
    for model.order in ((0, 1, 2), (0, 1, 2), (2, 0, 1)):
        ids = torch.arange(8).view(2, 4)
        engine.backward(engine.module(ids), zoo.count_tokens(ids))
        engine.step()
    return tags, [sum(piece.numel for piece in buffer.pieces) for buffer in engine.buffers if buffer.layout.unit]


def test_ranks_without_a_piece_of_a_block_gather_in_the_order_of_the_others(ranks) -> None:
    (first, _), (second, held) = ranks(2, gathers_of_a_changed_order)
    assert held == [0, 0, 0] and second == first
