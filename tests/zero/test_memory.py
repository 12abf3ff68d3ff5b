"""Bytes: the engine's meter against storages that really exist, and both against the closed formula."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from framework.kernels import library
from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine
from framework.zero.layout import Piece, span
from framework.zero.memory import StateBytes, state_bytes

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().sum()


def live_tensor_bytes() -> int:
    """Bytes of all storages that Python can reach, each once (of real tensors: torch.compile leaves fake ones behind)."""
    gc.collect()
    real = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in real}
    return sum(storages.values())


def adamw_state(pieces: Sequence[Piece]) -> int:
    """Two fp32 moments; our kernels have them for the gaps between parameters, too."""
    return 8 * (span(pieces) if library.missing("cpu") is None else sum(piece.numel for piece in pieces))


def planned(engine: ZeroEngine, **more: Any) -> StateBytes:
    """What the formula says of this rank; `more`: what an engine does not know."""
    options = {
        "rank": engine.world.rank,
        "compute_itemsize": engine.compute_dtype.itemsize,
        "master_weights": engine._precision.master_weights,
        "optimizer_of": adamw_state,
        "prefetch_bytes": engine.zero.prefetch_bytes,
        "messages": True,
        "offload": engine._host.config,
        "compression": engine.zero,
    }
    return state_bytes(engine.layouts, engine.policy, engine.world.size, **options | more)


def train(zero: ZeroConfig, precision: PrecisionConfig, kind: type[Model] = Model, micro_batches: int = 1) -> dict:
    torch.manual_seed(0)
    model = kind()
    before = live_tensor_bytes() - sum(p.nbytes for p in model.parameters())
    engine = ZeroEngine(model, zero, precision, optimizer=torch.optim.AdamW(model.parameters(), fused=True))
    for _ in range(3):
        for number in range(micro_batches):
            engine.backward(engine.module(torch.arange(12).view(3, 4)), 12, last=number == micro_batches - 1)
        engine.step()
    formula = planned(engine, micro_batches=micro_batches)
    return {"peak": engine.memory.peak, "formula": formula, "current": engine.memory.current, "live": live_tensor_bytes() - before}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "zero", [ZeroConfig(stage=s, prefetch_bytes=b) for s, b in ((0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (3, 300_000))], ids=str
)
def test_peak_model_state_is_that_of_the_formula(ranks, zero: ZeroConfig, compute_dtype: str, world_size: int) -> None:
    for result in ranks(world_size, train, zero, PrecisionConfig(compute_dtype=compute_dtype)):
        assert result["peak"] == result["formula"].total
        assert result["current"] == pytest.approx(result["live"], rel=0.02)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("zero", [ZeroConfig(stage=2), ZeroConfig(stage=3, reshard_after_forward=False, prefetch_bytes=0)], ids=str)
def test_what_micro_batches_add_up_and_what_is_kept_after_forward_counts(ranks, zero: ZeroConfig, micro_batches: int) -> None:
    for result in ranks(4, train, zero, PrecisionConfig(), Model, micro_batches):
        assert result["peak"] == result["formula"].total
        assert result["current"] == pytest.approx(result["live"], rel=0.02)


COMPRESSED = [
    ZeroConfig(stage=1, reduce_compression="bf16"),
    ZeroConfig(stage=2, reduce_compression="int8", error_feedback=True),
    ZeroConfig(stage=3, reduce_compression="bf16", prefetch_bytes=0),
    ZeroConfig(stage=3, gather_compression="int8", prefetch_bytes=0),
    ZeroConfig(stage=3, gather_compression="int8", reduce_compression="int8", error_feedback=True, prefetch_bytes=300_000),
]


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", COMPRESSED, ids=str)
def test_what_compression_takes_is_counted_too(ranks, zero: ZeroConfig, compute_dtype: str) -> None:
    for result in ranks(2, train, zero, PrecisionConfig(compute_dtype=compute_dtype)):
        assert result["peak"] == result["formula"].total
        assert result["current"] == pytest.approx(result["live"], rel=0.02)


def test_between_steps_stages_2_and_3_hold_no_gradients(ranks) -> None:
    for stage in (2, 3):
        (result,) = ranks(1, train, ZeroConfig(stage=stage), PrecisionConfig())
        assert result["current"] == result["formula"].params + result["formula"].master + result["formula"].optimizer


class Unlike(Model):
    """Blocks of one class, of many sizes."""

    def __init__(self) -> None:
        super().__init__(blocks=0)
        for width in (64, 128, 192, 256, 320):
            block = Block()
            block.up, block.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
            self.blocks.append(block)


class WithCodes(Model):
    """A third of each block is frozen integers, an eighth of it in another data type."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.codes = nn.Parameter(torch.zeros(16_000, dtype=torch.uint8), requires_grad=False)
            block.wide = nn.Parameter(torch.zeros(250, dtype=torch.int64), requires_grad=False)
            block.down.requires_grad_(False)


@pytest.mark.parametrize("zero", [ZeroConfig(stage=1), ZeroConfig(stage=3, prefetch_bytes=0), ZeroConfig(stage=3)], ids=str)
def test_frozen_integers_count_with_their_own_bytes(ranks, zero: ZeroConfig) -> None:
    for result in ranks(2, train, zero, PrecisionConfig(compute_dtype="bfloat16"), WithCodes):
        assert result["peak"] == result["formula"].total
        assert result["current"] == pytest.approx(result["live"], rel=0.02)


def most_reducing(stage: int) -> tuple[int, int, list[float]]:
    torch.manual_seed(0)
    model = Unlike()
    engine = ZeroEngine(model, ZeroConfig(stage=stage, prefetch_bytes=0), optimizer=torch.optim.AdamW(model.parameters()))
    norms = []
    for _ in range(3):
        engine.backward(model(torch.arange(12).view(3, 4)), 12)
        norms.append(float(engine.step().grad_norm))
    return engine.memory.peak, planned(engine).total, norms


def test_blocks_of_many_sizes_share_the_room_for_gradients(ranks) -> None:
    for stage in (2, 3):
        peak, bound, norms = ranks(2, most_reducing, stage)[0]
        assert peak <= bound
        assert norms == pytest.approx(ranks(2, most_reducing, 1)[0][2], rel=1e-5)


def test_stage_3_needs_a_fourth_on_four_ranks_but_for_what_is_in_use(ranks) -> None:
    one = ranks(1, train, ZeroConfig(stage=0), PrecisionConfig())[0]["formula"]
    four = ranks(4, train, ZeroConfig(stage=3), PrecisionConfig())[0]["formula"]
    assert four.total - four.temporary == pytest.approx((one.total - one.temporary) / 4, rel=0.02)


def build_from_meta() -> tuple[int, int]:
    """Build on the meta device from a reader; the largest sum of storages alive while reading."""
    with torch.device("meta"):
        model = Model(blocks=6)
    peaks = [0]
    before = live_tensor_bytes()

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        if "up.weight" in name:
            peaks[0] = max(peaks[0], live_tensor_bytes() - before)
        return torch.full((stop - start,), float(len(name)))

    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=torch.optim.AdamW(model.parameters()), read=read)
    with engine.gathered():
        assert all(bool((p == len(name)).all()) for name, p in model.named_parameters())
    return max(peaks[0], live_tensor_bytes() - before), sum(4 * p.numel() for p in model.parameters())


def test_no_rank_holds_the_whole_model_at_stage_3_while_it_is_built(ranks) -> None:
    for peak, whole in ranks(4, build_from_meta):
        assert peak < 2.2 * whole / 4  # its shard of parameters and of gradients, and one unit
