"""CUDA AdamW, Lion and SGD on flat shards, against their references and torch.optim."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from framework.kernels.adamw import adamw_, adamw_reference_
from framework.kernels.lion import lion_, lion_reference_
from framework.kernels.quantize import quantize_reference
from framework.kernels.sgd import sgd_, sgd_reference_
from framework.kernels.shard import ShardCopies, ShardRange, adam_range, join_master, split_master
from tests.kernels.tolerance import DTYPES, randn, unaligned

BETAS = 0.9, 0.999


def ranges(numel: int) -> list[ShardRange]:
    """With a gap, an empty range, edges that are no multiples of anything, and settings of their own."""
    cuts = [(0, 1), (3, 40), (41, 41), (64, numel * 2 // 3), (numel * 2 // 3, numel)] if numel > 64 else [(0, numel)]
    return [
        adam_range(*cut, lr=0.01 * (number + 1), weight_decay=0.1 * (number % 2), step=3, betas=BETAS) for number, cut in enumerate(cuts)
    ]


def run(step, device: torch.device, numel: int, dtype: torch.dtype, split: bool, start_off: bool, states: int, **arguments) -> list[Tensor]:
    place = unaligned if start_off else torch.Tensor.clone
    master = place(randn(numel, device=device))
    tensors = [place(randn(numel, device=device, seed=i + 1).abs() / 10) for i in range(states)]
    grad = place(randn(numel, dtype=dtype, device=device, seed=9) * 8)
    copy = place(torch.zeros(numel, dtype=torch.bfloat16, device=device))
    quantized, scales = torch.zeros(numel, dtype=torch.int8, device=device), torch.zeros(-(-numel // 64), device=device)
    remainder = None
    if split:
        high, low = split_master(master)
        copy, remainder, master = place(high), place(low), None
    copies = ShardCopies(data=copy, quantized=quantized, scales=scales)
    step(master, *tensors, grad, ranges(numel), copies=copies, remainder=remainder, **arguments)
    whole = join_master(copy, remainder) if split else master
    return [whole, copy, *tensors, quantized, scales]


OPTIMIZERS = {
    "adamw": (adamw_, adamw_reference_, 2, {"betas": BETAS, "eps": 1e-8}),
    "lion": (lion_, lion_reference_, 1, {"betas": BETAS}),
    "sgd": (sgd_, sgd_reference_, 1, {"momentum": 0.9, "dampening": 0.1, "nesterov": True, "first_step": False}),
}


@pytest.mark.parametrize("split", [False, True], ids=["fp32", "split"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_equals_the_reference(device, name: str, dtype: torch.dtype, split: bool):
    step, reference, states, arguments = OPTIMIZERS[name]
    for numel, start_off in ((2500, False), (1003, True), (1, False)):
        factor = torch.tensor([0.125], device=device)
        given = (device, numel, dtype, split, start_off, states)
        compiled = run(step, *given, grad_factor=factor, **arguments)
        expected = run(reference, *given, grad_factor=factor, **arguments)
        for got, want in zip(compiled[:-2], expected[:-2], strict=True):
            assert got.dtype == want.dtype
            tolerance = 1e-2 if got.dtype == torch.bfloat16 else 2e-6
            torch.testing.assert_close(got, want, rtol=tolerance, atol=1e-6)
        touched = slice(64 if numel > 64 else 0, None)  # whole blocks that only ranges cover
        if numel > 64:
            q, scales = quantize_reference(compiled[0])
            assert torch.equal(compiled[-2][touched], q[touched]) and torch.equal(compiled[-1][1:], scales[1:])


@pytest.mark.parametrize("start_off", [False, True])
def test_a_bf16_copy_has_ties_away_from_zero_however_the_master_is_kept(device, start_off: bool):
    place, numel = unaligned if start_off else torch.Tensor.clone, 100
    master = place(torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, 1.3], device=device).repeat(25))
    grad, one = place(torch.zeros(numel, device=device)), [ShardRange(start=0, stop=numel, lr=0.1)]
    high, low = map(place, split_master(master))
    expected, settings = high.clone(), {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "first_step": True}
    copy = place(torch.zeros(numel, dtype=torch.bfloat16, device=device))
    sgd_(master, None, grad, one, **settings, copies=ShardCopies(data=copy))
    sgd_(None, None, grad, one, **settings, copies=ShardCopies(data=high), remainder=low)
    assert torch.equal(copy, expected) and torch.equal(high, expected) and torch.equal(join_master(high, low), master)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bf16_parameter_without_master_is_updated_in_fp32_and_rounded(device, name: str):
    step, _, states, arguments = OPTIMIZERS[name]
    start, grad = randn(2500, device=device).bfloat16(), randn(2500, device=device, seed=9)
    copies, masters = [start.clone(), torch.zeros_like(start)], [None, start.float()]
    for copy, master in zip(copies, masters, strict=True):
        moments = [randn(2500, device=device, seed=i + 1).abs() / 10 for i in range(states)]
        step(master, *moments, grad, ranges(2500), copies=ShardCopies(data=copy), **arguments)
    touched = copies[1] != 0
    assert torch.equal(copies[0][touched], copies[1][touched]) and torch.equal(copies[0][~touched], start[~touched])


def test_many_ranges_take_several_launches(device):
    numel = 4000
    many = [ShardRange(start=i * 20, stop=i * 20 + 13, lr=0.01 * (1 + i % 7)) for i in range(200)]
    got, want, grad = randn(numel, device=device), randn(numel, device=device), randn(numel, device=device, seed=1)
    quantized, scales = torch.zeros(numel, dtype=torch.int8, device=device), torch.zeros(-(-numel // 64), device=device)
    settings = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "first_step": True}
    sgd_(got, None, grad, many, **settings, copies=ShardCopies(quantized=quantized, scales=scales))
    sgd_reference_(want, None, grad, many, **settings)
    torch.testing.assert_close(got, want)
    q, expected_scales = quantize_reference(torch.cat((got[: many[-1].stop], torch.zeros(numel - many[-1].stop, device=device))))
    assert torch.equal(quantized[: many[-1].stop], q[: many[-1].stop]) and torch.equal(scales, expected_scales)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), float("-inf")])
def test_a_factor_that_is_not_finite_changes_nothing(device, factor: float):
    for name, (step, _, states, arguments) in OPTIMIZERS.items():
        given = device, 300, torch.bfloat16, False, False, states
        nothing = run(lambda *_, **__: None, *given)
        skipped = run(step, *given, grad_factor=torch.tensor([factor], device=device), **arguments)
        assert all(torch.equal(got, want) for got, want in zip(skipped, nothing, strict=True)), name


def test_adamw_is_torchs_fused_adamw(device):
    numel, weight_decay = 700, 0.1
    parameter = torch.nn.Parameter(randn(numel, device=device))
    master, m, v = parameter.detach().clone(), torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=BETAS, weight_decay=weight_decay, fused=True)
    for step in range(1, 6):
        parameter.grad = randn(numel, device=device, seed=step)
        optimizer.step()
        one = adam_range(0, numel, lr=1e-2, weight_decay=weight_decay, step=step, betas=BETAS)
        adamw_(master, m, v, parameter.grad, [one], betas=BETAS, eps=1e-8)
    torch.testing.assert_close(master, parameter.detach(), rtol=2e-6, atol=2e-6)


def test_no_ranges_are_no_work(device):
    master = randn(10, device=device)
    before = master.clone()
    adamw_(master, master.clone(), master.clone(), master.clone(), [], betas=BETAS, eps=1e-8)
    assert torch.equal(master, before)
