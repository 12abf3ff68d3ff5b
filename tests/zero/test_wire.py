"""Compressed communication is what plain torch makes of the same rounding, in one process: quantise, add in the order of ranks, go on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine
from tests.zero import zoo

STEPS, MICROS, CLIP, LR = 3, 4, 0.5, 0.3


# ---- what is said of the format, in plain torch
def rounded(values: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """Once to `bits` and back, in blocks of 64 with a scale each; fp32."""
    limit = {8: 127, 4: 7}[bits]
    rows = torch.nn.functional.pad(values.flatten().float(), (0, -values.numel() % 64)).view(-1, 64)
    scale = rows.abs().amax(1, keepdim=True) / limit
    q = torch.where(scale > 0, (rows * (1 / scale)).round(), 0)
    return (q * scale).flatten()[: values.numel()].view(values.shape)


def sent(values: torch.Tensor, how: str, residual: torch.Tensor | None = None) -> torch.Tensor:
    """What arrives of `values`; `residual` is added, and keeps what is lost."""
    if how == "none":
        return values
    if how == "bf16":
        return values.bfloat16().float()
    whole = values if residual is None else values + residual
    arrived = rounded(whole, 4 if how == "int4" else 8)
    if residual is not None:
        residual.copy_(whole - arrived)
    return arrived


def train_emulated(name: str, zero: ZeroConfig, world_size: int, dtype: torch.dtype = torch.float32) -> dict:
    """All ranks' work in one process, in turn."""
    model, masters = zoo.make(name, dtype), {}
    for key, parameter in zoo.make(name, torch.float32).named_parameters():
        masters[key] = parameter.detach().clone()
    parameters = dict(model.named_parameters())
    trained = [key for key, parameter in parameters.items() if parameter.requires_grad]
    feedback = zero.error_feedback
    residuals = [{key: torch.zeros_like(masters[key]) if feedback else None for key in trained} for _ in range(world_size)]
    losses, norms = [], []
    for micros in zoo.micro_batches(STEPS, MICROS):
        tokens = sum(map(zoo.count_tokens, micros))
        total = {key: torch.zeros_like(masters[key]) for key in trained}
        with torch.no_grad():
            for key, parameter in parameters.items():
                parameter.copy_(masters[key] if zero.gather_compression == "none" else rounded(masters[key]))
        loss_sum, used = 0.0, set()
        rounds = [[micros[rank::world_size]] for rank in range(world_size)]  # [rank][round]: micro-batches that are reduced together
        if zero.stage > 1:
            rounds = [[[ids] for ids in of_rank[0]] for of_rank in rounds]
        for number in range(len(rounds[0])):
            reduced = {key: torch.zeros_like(masters[key]) for key in trained}
            for rank in range(world_size):
                grads = {key: torch.zeros_like(masters[key]) for key in trained}
                for ids in rounds[rank][number]:
                    model.zero_grad()
                    loss = model(ids)
                    loss.backward()
                    loss_sum += float(loss.detach())
                    for key in trained:
                        if parameters[key].grad is not None:
                            grads[key] += parameters[key].grad
                            used.add(key)
                for key in trained:
                    reduced[key] += sent(grads[key], zero.reduce_compression, residuals[rank][key])
            for key in trained:
                total[key] += reduced[key]
        norm = float(torch.cat([grad.flatten().double() for grad in total.values()]).norm()) / tokens
        factor = min(1.0, CLIP / (norm + 1e-6)) / tokens
        for key in used:
            masters[key] -= LR * factor * total[key]
        losses.append(loss_sum / tokens)
        norms.append(norm)
    return {"loss": losses, "norm": norms, "model": masters}


# ---- the engine
def train_sharded(name: str, zero: ZeroConfig, compute_dtype: str = "float32") -> dict:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = zoo.make(name, torch.float32)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=LR)
    engine = ZeroEngine(model, zero, PrecisionConfig(compute_dtype=compute_dtype), optimizer=optimizer, grad_clip=CLIP)
    losses, norms = [], []
    for micros in zoo.micro_batches(STEPS, MICROS):
        mine = micros[rank::world_size]
        for index, ids in enumerate(mine):
            engine.backward(engine.module(ids), zoo.count_tokens(ids), last=index == len(mine) - 1)
        stats = engine.step()
        losses.append(float(stats.loss))
        norms.append(float(stats.grad_norm))
    whole = {name: tensor for name, tensor in engine.full_tensors() if tensor is not None}
    with engine.gathered():
        seen = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    assert engine.memory.by_kind.get("gathered", 0) == engine.memory.by_kind.get("gathering", 0) == 0
    return {"loss": losses, "norm": norms, "model": whole, "seen": seen}


def share_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of the elements. A rounding that falls between two codes may go either way, since kernels round a product and a sum at once."""
    equal = [(found[key].float() - expected[key]).abs() <= 2e-6 * expected[key].abs().clamp(min=0.1) for key in expected]
    return float(torch.cat([one.flatten().float() for one in equal]).mean())


def assert_follows(name: str, zero: ZeroConfig, results: list[dict], dtype: torch.dtype = torch.float32) -> None:
    emulated = train_emulated(name, zero, len(results), dtype)
    for result in results:
        assert result["loss"] == pytest.approx(emulated["loss"], rel=1e-5)
        assert result["norm"] == pytest.approx(emulated["norm"], rel=1e-5)
        assert all(torch.equal(result["seen"][key], tensor) for key, tensor in results[0]["seen"].items()), "ranks have the same parameters"
    assert share_equal(results[0]["model"], emulated["model"]) > 0.99


COMPRESSED = [
    ZeroConfig(stage=1, reduce_compression="bf16"),
    ZeroConfig(stage=3, reduce_compression="bf16"),
    ZeroConfig(stage=3, gather_compression="int8"),
    ZeroConfig(stage=1, reduce_compression="int8"),
    ZeroConfig(stage=2, reduce_compression="int8", error_feedback=True),
    ZeroConfig(stage=3, gather_compression="int8", reduce_compression="int8", error_feedback=True),
]


def shown(zero: ZeroConfig) -> str:
    return f"{zero.stage}-{zero.gather_compression}-{zero.reduce_compression}{'-feedback' if zero.error_feedback else ''}"


@pytest.mark.parametrize("zero", COMPRESSED, ids=shown)
def test_p45_training_is_that_of_the_same_rounding_in_one_process(ranks, zero: ZeroConfig) -> None:
    for world_size, name in ((2, "Plain"), (2, "Unused"), (4, "Tied"), (2, "LowRank"), (2, "Branching")):
        assert_follows(name, zero, ranks(world_size, train_sharded, name, zero))


def test_the_comparison_tells_rounding_from_none(ranks) -> None:
    results = ranks(2, train_sharded, "Plain", ZeroConfig(stage=3))
    for zero in COMPRESSED:
        assert share_equal(results[0]["model"], train_emulated("Plain", zero, 2)["model"]) < 0.9, zero
