"""Moments in 8 bits: what a code stands for, and steps on shards that are those on whole tensors, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from framework.kernels.moments import BLOCK, code_values, dequantize_moment, empty_moment, quantize_moment
from framework.zero import OffloadConfig, PrecisionConfig, ZeroConfig, ZeroEngine, eight_bit
from framework.zero.eight_bit import AdamW8bit, EightBit, Lion8bit, in_8_bits
from tests.zero.test_memory import Model
from tests.zero.test_muon import assert_skips

STEPS = 4


def there_and_back(x: torch.Tensor, *, signed: bool) -> torch.Tensor:
    stored = empty_moment(x.numel(), x.device, signed=signed)
    quantize_moment(x, *stored, signed=signed)
    return dequantize_moment(*stored, signed=signed)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_reach_over_decades_and_err_by_little_of_each_value(signed: bool) -> None:
    values, _ = code_values(signed, torch.device("cpu"))
    assert len(values) == (255 if signed else 256) and values[-1] == 1 and values[0] == (-1 if signed else 0)
    assert bool((values[1:] > values[:-1]).all())
    torch.manual_seed(0)
    x = 10 ** torch.empty(40 * BLOCK + 17).uniform_(-3, 0)
    x = x * (torch.randint(2, x.shape) * 2 - 1) if signed else x
    error = (there_and_back(x, signed=signed) - x).abs() / x.abs()
    first = x.abs() > 0.1
    assert error[first].max() < (0.071 if signed else 0.036) and error[first].mean() < (0.015 if signed else 0.008)
    assert error.max() < (0.35 if signed else 0.2), "three decades below the largest"


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 10_000])
def test_what_was_read_and_is_written_again_is_the_same_to_the_bit(signed: bool, numel: int) -> None:
    torch.manual_seed(numel)
    x = torch.randn(numel) * 10 ** torch.empty(numel).uniform_(-12, 3)
    once = there_and_back(x if signed else x.square(), signed=signed)
    assert torch.equal(there_and_back(once, signed=signed), once)
    assert torch.equal(there_and_back(torch.zeros(numel), signed=signed), torch.zeros(numel))


def test_a_second_moment_that_is_not_zero_does_not_become_zero() -> None:
    x = torch.full((BLOCK,), 1e-30)
    x[0] = 1.0
    assert bool((there_and_back(x, signed=False) > 0).all())


def test_blocks_do_not_know_of_each_other() -> None:
    torch.manual_seed(0)
    x = torch.randn(8 * BLOCK)
    halves = torch.cat([there_and_back(half, signed=True) for half in x.split(3 * BLOCK)])
    assert torch.equal(there_and_back(x, signed=True), halves)


# ---- steps
def make(kind: type[EightBit], model: nn.Module) -> EightBit:
    matrices, others = ([p for p in model.parameters() if (p.dim() >= 2) is which] for which in (True, False))
    return kind([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 5e-3}], lr=1e-2, betas=(0.9, 0.95))


def plain(kind: type[EightBit], steps: int = STEPS) -> tuple[dict[str, torch.Tensor], dict[str, dict]]:
    """Parameters and state, after training whole tensors in one process."""
    torch.manual_seed(0)
    model = Model(2)
    optimizer = make(kind, model)
    for step in range(steps):
        optimizer.zero_grad()
        (model(batch(step)) / 16).backward()
        optimizer.step()
    names = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return names, {name: eight_bit.dequantized(optimizer.state[parameter]) for name, parameter in model.named_parameters()}


def batch(step: int) -> torch.Tensor:
    return (torch.arange(16).view(4, 4) * (step + 3)) % 200


def built(kind: type[EightBit], stage: int, offload: OffloadConfig) -> ZeroEngine:
    torch.manual_seed(0)
    model = Model(2)
    return ZeroEngine(model, ZeroConfig(stage=stage), offload=offload, optimizer=make(kind, model))


def train(engine: ZeroEngine, first: int = 0, last: int = STEPS) -> ZeroEngine:
    """Every rank has the same samples, so that sums over two or four ranks are exact."""
    for step in range(first, last):
        engine.backward(engine.module(batch(step)), 16)
        engine.step()
    return engine


def sharded(kind: type[EightBit], stage: int, offload: OffloadConfig) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eight_bit, "CHUNK", 2 * BLOCK)
        engine = train(built(kind, stage, offload))
        engine.flush()
    held = sum(engine.sharded_optimizer.state_nbytes(on_host=on_host) for on_host in (False, True))
    expected = sum(
        len(kind.moments) * (eight_bit.bytes_per_moment(piece.numel) if in_8_bits(piece.slot.shape) else 4 * piece.numel)
        for _, piece, _ in engine.sharded_optimizer.state_pieces()
    )
    return engine.state_dict() | {"bytes": (held, expected)}


@pytest.mark.parametrize("kind", [AdamW8bit, Lion8bit])
@pytest.mark.parametrize(
    ("stage", "world", "offload"),
    [(0, 1, "none"), (0, 2, "none"), (1, 2, "none"), (2, 4, "none"), (3, 2, "none"), (3, 4, "none"), (1, 2, "cpu"), (3, 2, "cpu")],
)
def test_on_shards_it_is_what_it_is_on_whole_tensors_to_the_bit(ranks, kind, stage: int, world: int, offload: str) -> None:
    parameters, states = plain(kind)
    found = ranks(world, sharded, kind, stage, OffloadConfig(optimizer=offload))[0]
    assert found["bytes"][0] == found["bytes"][1]
    for name, parameter in parameters.items():
        assert torch.equal(found["model"][name], parameter), name
        for key in kind.moments:
            assert torch.equal(found["optimizer"][name][key].flatten(), states[name][key].flatten()), (name, key)


def losses(kind: type[torch.optim.Optimizer]) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 50))
    optimizer = kind(model.parameters(), lr=3e-3)
    found = []
    for step in range(150):
        ids = (torch.arange(64) * (step % 7 + 1)) % 50
        loss = nn.functional.cross_entropy(model(ids), (ids * ids + 1) % 50)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_it_learns_as_with_moments_in_fp32() -> None:
    in_8, in_32 = losses(AdamW8bit), losses(torch.optim.AdamW)
    assert in_32[0] == in_8[0] > 3.9 and in_32[-1] < 0.1
    assert sum(in_8) == pytest.approx(sum(in_32), rel=0.05) and in_8[-1] < 0.1


@pytest.mark.parametrize("kind", [AdamW8bit, Lion8bit])
def test_a_step_that_is_not_finite_changes_nothing(kind) -> None:
    assert_skips(train(built(kind, 3, OffloadConfig()), last=2))


def test_float64_is_refused() -> None:
    model = nn.Linear(64, 64)
    with pytest.raises(ValueError, match="AdamW8bit is for fp32 masters"):
        ZeroEngine(model, ZeroConfig(stage=1), PrecisionConfig(compute_dtype="float64"), optimizer=AdamW8bit(model.parameters()))
