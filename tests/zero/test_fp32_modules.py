"""Modules in fp32 inside a bf16 model: computed as plain torch computes them, in buffers of their own, the same under every stage."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from framework.checkpoint.load import Checkpoint, load_optimizer
from framework.checkpoint.save import save
from framework.zero import OffloadConfig, PrecisionConfig, ZeroConfig, ZeroEngine
from tests.zero import zoo
from tests.zero.test_memory import Block, Model, planned

IN_FP32 = ["norm", "head"]


def precision(*patterns: str, **options) -> PrecisionConfig:
    return PrecisionConfig(compute_dtype="bfloat16", fp32_modules=list(patterns), **options)


class ByHand(zoo.Plain):
    """`zoo.Plain` in bf16 with casts written around its norms and its head."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids[:, :-1])
        for block in self.blocks:
            x = x + block.down(torch.tanh(block.up(block.norm(x.float()).to(x.dtype))))
        return nn.functional.cross_entropy(self.head(x.float()).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def losses_by_hand(steps: list[list[torch.Tensor]]) -> list[float]:
    """Plain torch: fp32 masters, from which a bf16 model with casts is made anew in each step."""
    masters = zoo.make("Plain", torch.float32)
    optimizer = zoo.adamw(masters)
    losses = []
    for micros in steps:
        model = ByHand()
        model.load_state_dict(masters.state_dict())
        for name, inner in model.named_modules():
            if not name.endswith(("norm", "head")) and any(True for _ in inner.parameters(recurse=False)):
                inner.bfloat16()
        tokens = sum(zoo.count_tokens(ids) for ids in micros)
        loss = sum(model(ids) for ids in micros) / tokens
        loss.backward()
        for master, used in zip(masters.parameters(), model.parameters(), strict=True):
            master.grad = used.grad.float()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train(precision: PrecisionConfig, stage: int, name: str = "Plain", offload: OffloadConfig | None = None) -> dict:
    model = zoo.make(name, torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), precision, offload, optimizer=zoo.adamw(model))
    losses = []
    for micros in zoo.micro_batches(4, 4):
        for ids in micros[engine.world.rank :: engine.world.size]:
            engine.backward(engine.module(ids), zoo.count_tokens(ids))
        losses.append(float(engine.step().loss))
    return {"loss": losses, **engine.state_dict()}


def test_it_computes_what_casts_written_by_hand_compute(ranks) -> None:
    by_hand = losses_by_hand(zoo.micro_batches(4, 4))
    (found,) = ranks(1, train, precision(*IN_FP32), 0)
    assert found["loss"] == pytest.approx(by_hand, rel=2e-4)
    (without,) = ranks(1, train, precision(), 0)
    assert without["loss"] != found["loss"]


@pytest.mark.parametrize("name", ["Plain", "Tied", "LowRank", "Checkpointed"])
def test_p44_p46_losses_are_the_same_for_every_stage(ranks, name: str) -> None:
    expected = ranks(2, train, precision(*IN_FP32), 0, name)[0]
    for stage in (1, 2, 3):
        found = ranks(2, train, precision(*IN_FP32), stage, name)[0]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        for key, tensor in expected["model"].items():
            torch.testing.assert_close(found["model"][key], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kept", ["remainder", "none"])
def test_other_ways_to_keep_masters_and_host_memory_go_with_it(ranks, kept: str) -> None:
    expected = ranks(2, train, precision(*IN_FP32, master_weights=kept), 0)[0]
    for offload in (OffloadConfig(optimizer="cpu"), OffloadConfig(optimizer="cpu", params="cpu")):
        found = ranks(2, train, precision(*IN_FP32, master_weights=kept), 3, "Plain", offload)[0]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_a_norm_returns_what_came_in_and_a_head_fp32() -> None:
    model = zoo.make("Tied", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(), precision(*IN_FP32), optimizer=zoo.adamw(model))
    seen = {}
    for name in ("embed", "blocks.0.norm", "blocks.0.up", "head"):
        model.get_submodule(name).register_forward_hook(lambda _, args, out, name=name: seen.update({name: (args[0].dtype, out.dtype)}))
    engine.backward(engine.module(torch.ones(2, 4, dtype=torch.long)), 6)
    fp32, bf16 = torch.float32, torch.bfloat16
    assert seen == {"embed": (torch.int64, bf16), "blocks.0.norm": (fp32, bf16), "blocks.0.up": (bf16, bf16), "head": (fp32, fp32)}
    assert model.embed.weight.dtype is fp32, "it is the head"
    engine.step()
    copy = deepcopy(model.blocks[0].norm)
    copy.register_forward_hook(lambda _, args, out: seen.update(copy=args[0].dtype))
    copy(torch.ones(1, zoo.WIDTH, dtype=bf16))
    assert seen["copy"] is bf16, "a copy is an ordinary module"


def test_blocks_are_compiled_with_the_casts_in_them() -> None:
    losses = []
    for name in ("Plain", "Compiled"):  # the latter in one graph, or not at all
        model = zoo.make(name, torch.float32)
        engine = ZeroEngine(model, ZeroConfig(stage=3), precision("norm"), optimizer=zoo.adamw(model))
        losses.append(float(engine.module(torch.ones(2, 4, dtype=torch.long)).detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_p17_checkpoints_do_not_tell_which_modules_were_fp32(tmp_path) -> None:
    saved = ZeroEngine(model := zoo.make("Tied", torch.float32), ZeroConfig(), precision(*IN_FP32), optimizer=zoo.adamw(model))
    saved.backward(saved.module(torch.ones(2, 4, dtype=torch.long)), 6)
    saved.step()
    save(saved, tmp_path / "step_1", run={})
    checkpoint = Checkpoint(tmp_path / "step_1")
    model = zoo.make("Tied", torch.float32)
    kept = precision("up", master_weights="remainder")
    loaded = ZeroEngine(model, ZeroConfig(stage=3), kept, optimizer=zoo.adamw(model), read=checkpoint.reader(None))
    load_optimizer(loaded, checkpoint)
    one, other = saved.state_dict(), loaded.state_dict()
    assert all(torch.equal(tensor, other["model"][name]) for name, tensor in one["model"].items())
    assert all(torch.equal(state["exp_avg"], other["optimizer"][name]["exp_avg"]) for name, state in one["optimizer"].items())


class NormedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Normed(Model):
    def __init__(self) -> None:
        super().__init__(blocks=0)
        self.blocks.extend(NormedBlock() for _ in range(5))


def measure(precision: PrecisionConfig, stage: int, offload: OffloadConfig) -> dict:
    torch.manual_seed(0)
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), precision, offload, optimizer=optimizer)
    for _ in range(2):
        engine.backward(engine.module(torch.arange(12).view(3, 4)).float(), 12)
        engine.step()
    engine.flush()
    return {"peak": engine.memory.peak, "host": engine.host_memory.current, "formula": planned(engine)}


@pytest.mark.parametrize("pattern", ["norm", "up"])
def test_bytes_are_those_of_the_formula(ranks, pattern: str) -> None:
    for stage, offload in ((0, OffloadConfig()), (2, OffloadConfig(optimizer="cpu")), (3, OffloadConfig())):
        for result in ranks(2, measure, precision(pattern), stage, offload):
            assert result["peak"] == result["formula"].total
            assert result["host"] == result["formula"].host


def test_a_pattern_that_means_nothing_is_refused() -> None:
    model = zoo.make("Plain", torch.float32)
    with pytest.raises(ValueError, match=r"got 'nrom', expected a module with parameters .*did you mean norm\?"):
        ZeroEngine(model, ZeroConfig(), precision("nrom"))
    with pytest.raises(ValueError, match="are for bfloat16 and float16, got float32"):
        ZeroEngine(model, ZeroConfig(), PrecisionConfig(fp32_modules=["norm"]))
