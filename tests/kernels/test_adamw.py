"""AdamW on flat shards: torch's arithmetic in one pass, for every dtype and instruction set, and nothing touched that should not be."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

import framework.kernels.library as kernels
from framework.kernels.adamw import adamw_, adamw_reference_
from framework.kernels.library import KernelError
from framework.kernels.quantize import quantize_reference
from framework.kernels.shard import ShardCopies, ShardRange, adam_range, join_master, split_master
from tests.kernels.shards import COPIES, DTYPES, ODD_SIZES, close, make_shard, rounded_copy, three_ranges

BETAS, EPS = (0.9, 0.999), 1e-8
CORRECTIONS = {"bias_correction1": 1 - 0.9**3, "bias_correction2_sqrt": (1 - 0.999**3) ** 0.5}


def in_fp64(shard, ranges, factor: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parameters and moments after a step, and how much it changed the parameters."""
    p, (m, v), g = shard.parameters().double(), (state.double() for state in shard.states), shard.grad.double() * factor
    before = p.clone()
    for one in ranges:
        at = slice(one.start, one.stop)
        p[at] *= 1 - one.lr * one.weight_decay
        m[at] = BETAS[0] * m[at] + (1 - BETAS[0]) * g[at]
        v[at] = BETAS[1] * v[at] + (1 - BETAS[1]) * g[at] ** 2
        p[at] -= one.lr / one.bias_correction1 * m[at] / (v[at].sqrt() / one.bias_correction2_sqrt + EPS)
    return p, m, v, p - before


def step(shard, ranges, factor: torch.Tensor | None, function=adamw_) -> None:
    function(
        *(shard.master, *shard.states, shard.grad, ranges),
        **{"betas": BETAS, "eps": EPS, "grad_factor": factor, "copies": shard.copies, "remainder": shard.remainder},
    )


def check_step(numel: int, grad_dtype: torch.dtype, copy, function=adamw_) -> None:
    shard, ranges, factor = make_shard(numel, grad_dtype, copy, n_states=2), three_ranges(numel, **CORRECTIONS), torch.tensor(0.125)
    before, terms = shard.parameters(), [state.abs() + shard.grad.abs() for state in shard.states]
    untouched = torch.ones(numel, dtype=torch.bool)
    for one in ranges:
        untouched[one.start : one.stop] = False
    p, m, v, change = in_fp64(shard, ranges, 0.125)
    states_before = [state.clone() for state in shard.states]
    step(shard, ranges, factor, function)
    close(shard.states[0], m, terms[0].double(), ulps=3)
    close(shard.states[1], v, states_before[1].double() + (0.125 * shard.grad.double()) ** 2, ulps=3)
    close(shard.parameters(), p, p.abs() + 16 * change.abs() + before.double().abs(), ulps=1)
    assert torch.equal(shard.parameters()[untouched], before[untouched])
    if isinstance(copy, torch.dtype):
        expected = torch.where(untouched, torch.zeros((), dtype=copy), rounded_copy(shard.master, copy))
        assert torch.equal(shard.copies.data, expected)


@pytest.mark.parametrize("copy", COPIES, ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
def test_a_step_is_that_of_the_formula_in_fp64(isa, grad_dtype, copy):
    for numel in ODD_SIZES:
        check_step(numel, grad_dtype, copy)


@pytest.mark.parametrize("copy", COPIES, ids=str)
def test_so_is_a_step_of_the_reference(reference_only, copy):
    for numel in (1, 131):
        check_step(numel, torch.bfloat16, copy, adamw_reference_)


@pytest.mark.parametrize("mode", ["auto", "reference"])
def test_many_steps_agree_with_torch(cpu_library, mode):
    kernels.choose(mode)
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(1001))
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=BETAS, eps=EPS, weight_decay=0.1, fused=True)
    p, m, v = parameter.detach().clone(), torch.zeros(1001), torch.zeros(1001)
    with kernels.substitute("cpu", cpu_library):
        for number in range(1, 21):
            parameter.grad = torch.randn(1001)
            optimizer.step()
            ranges = [adam_range(0, 1001, lr=1e-2, weight_decay=0.1, step=number, betas=BETAS)]
            adamw_(p, m, v, parameter.grad, ranges, betas=BETAS, eps=EPS)
    kernels.choose("auto")
    torch.testing.assert_close(p, parameter.detach(), rtol=2e-6, atol=2e-6)


def test_a_large_shard_on_many_threads_is_the_same_as_on_one(isa):
    results = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        shard = make_shard((1 << 20) + 77, torch.bfloat16, torch.bfloat16, n_states=2)
        step(shard, three_ranges(shard.grad.numel(), **CORRECTIONS), torch.tensor(0.5))
        results.append((shard.master, *shard.states, shard.copies.data))
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("copy", [torch.bfloat16, "remainder"], ids=str)
def test_a_factor_that_is_not_finite_leaves_everything_as_it_was(isa, factor, copy):
    for function in (adamw_, adamw_reference_):
        shard, same = make_shard(131, torch.bfloat16, copy, 2), make_shard(131, torch.bfloat16, copy, 2)
        step(shard, three_ranges(131, **CORRECTIONS), torch.tensor(factor), function)
        assert torch.equal(shard.parameters(), same.parameters())
        assert all(torch.equal(one, other) for one, other in zip(shard.states, same.states, strict=True))
        assert torch.equal(shard.copies.data, same.copies.data)


def test_without_a_factor_gradients_are_taken_as_they_are(isa):
    shards = [make_shard(131, torch.float32, None, 2) for _ in range(2)]
    step(shards[0], three_ranges(131, **CORRECTIONS), None)
    step(shards[1], three_ranges(131, **CORRECTIONS), torch.tensor(1.0))
    assert torch.equal(shards[0].master, shards[1].master)


def test_nan_and_infinity_in_a_gradient_reach_the_parameters_as_nan(isa):
    for copy in (torch.bfloat16, "remainder"):
        shard = make_shard(37, torch.float32, copy, 2)
        shard.grad[[3, 36]] = torch.tensor([float("nan"), float("inf")])
        step(shard, [ShardRange(start=0, stop=37, lr=0.1, **CORRECTIONS)], torch.tensor(1.0))
        assert shard.parameters().isnan().nonzero().flatten().tolist() == [3, 36]
        assert shard.copies.data.isnan().nonzero().flatten().tolist() == [3, 36]


def test_an_empty_shard_and_no_ranges_are_no_work(isa):
    shard = make_shard(0, torch.bfloat16, torch.bfloat16, 2)
    step(shard, [], torch.tensor(1.0))
    step(shard, [ShardRange(start=0, stop=0, lr=0.1)], torch.tensor(1.0))


# ---- the master as copy and remainder
def test_splitting_a_master_loses_nothing():
    bits = torch.cat(
        (
            torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int64),
            torch.arange(0x3F80_0000, 0x3F82_0001),  # every remainder, ties included; then zeros, denormal, largest, infinities, NaN
            torch.tensor([0, -(2**31), 1, 0x7F7F_FFFF, 0x7F80_0000, -0x80_0000, 0x7FFF_FFFF, -1]),
        )
    ).to(torch.int32)
    master = bits.view(torch.float32)
    again = join_master(*split_master(master))
    assert torch.equal(again.isnan(), master.isnan())
    assert torch.equal(again.view(torch.int32)[~master.isnan()], bits[~master.isnan()])


def test_the_copy_of_a_split_master_is_the_nearest_bf16():
    master = torch.randn(100_000)
    copy, _ = split_master(master)
    assert ((copy.double() - master.double()).abs() <= (master.bfloat16().double() - master.double()).abs()).all()


def test_a_step_with_a_remainder_is_the_step_with_the_fp32_master_bit_for_bit(isa):
    for numel in (1, 17, 4099):
        whole, split = (make_shard(numel, torch.bfloat16, copy, 2) for copy in (None, "remainder"))
        for shard in (whole, split):
            for _ in range(3):
                step(shard, three_ranges(numel, **CORRECTIONS), torch.tensor(0.125))
        assert torch.equal(whole.master, split.parameters())


@pytest.mark.parametrize("function", [adamw_, adamw_reference_])
def test_a_bf16_copy_is_rounded_with_ties_away_from_zero_however_the_master_is_kept(isa, function):
    """A cast would take the even one of two neighbours, and the copies of a split and a whole master would differ."""
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, -1 - 3 * 2**-8]).repeat(9)
    away = torch.tensor([1 + 2**-7, 1 + 2**-6, -1 - 2**-7, -1 - 2**-6], dtype=torch.bfloat16).repeat(9)
    unchanged = [ShardRange(start=0, stop=36, lr=0.0, **CORRECTIONS)]
    for kept in (torch.bfloat16, "remainder"):
        shard = make_shard(36, torch.float32, kept, 2)
        if kept == "remainder":
            shard.copies.data[:], shard.remainder[:] = split_master(ties)
        else:
            shard.master[:] = ties
        step(shard, unchanged, None, function)
        assert torch.equal(shard.copies.data, away) and torch.equal(shard.parameters(), ties)


@pytest.mark.parametrize("function", [adamw_, adamw_reference_])
def test_without_master_and_remainder_a_step_begins_at_the_bf16_parameter_and_is_rounded(isa, function):
    for numel in (1, 17, 4099):
        whole = make_shard(numel, torch.bfloat16, torch.bfloat16, 2)
        alone = make_shard(numel, torch.bfloat16, torch.bfloat16, 2)
        for _ in range(3):
            whole.master[:] = alone.copies.data[:] = whole.copies.data
            step(whole, three_ranges(numel, **CORRECTIONS), torch.tensor(0.125), function)
            alone.master = None
            step(alone, three_ranges(numel, **CORRECTIONS), torch.tensor(0.125), function)
            assert torch.equal(alone.copies.data, whole.copies.data)
            assert all(torch.equal(one, other) for one, other in zip(alone.states, whole.states, strict=True))


# ---- the quantised copy
@pytest.mark.parametrize("master", [torch.bfloat16, "remainder"], ids=str)
@pytest.mark.parametrize(("bits", "block"), [(8, 64), (8, 7), (4, 32), (4, 6)])
def test_the_quantised_copy_is_the_masters_after_the_step(isa, bits, block, master):
    for function in (adamw_, adamw_reference_):
        for numel in (1, 131, 70001):
            shard = make_shard(numel, torch.bfloat16, master, 2)
            q = torch.full((numel if bits == 8 else (numel + 1) // 2,), 99, dtype=torch.int8)
            scales = torch.full((-(-numel // block),), -1.0)
            shard.copies = ShardCopies(data=shard.copies.data, quantized=q, scales=scales, bits=bits, block=block)
            ranges = three_ranges(numel, **CORRECTIONS)
            step(shard, ranges, torch.tensor(0.125), function)
            expected_q, expected_scales = quantize_reference(shard.parameters(), bits=bits, block=block)
            written = torch.zeros(scales.numel(), dtype=torch.bool)
            for one in ranges:
                written[one.start // block : -(-one.stop // block)] = one.stop > one.start
            assert torch.equal(scales, torch.where(written, expected_scales, -1.0))
            bytes_written = written.repeat_interleave(block if bits == 8 else block // 2)[: q.numel()]
            assert torch.equal(q, torch.where(bytes_written, expected_q.view(torch.int8), 99))


# ---- denormals
def test_moments_that_have_decayed_to_denormals_cost_no_time(isa):
    numel = 1 << 18
    seconds = {}
    for name, moment in (("normal", 1e-10), ("denormal", 1e-42)):
        p, m, v = torch.ones(numel), torch.full((numel,), moment), torch.full((numel,), moment)
        grad, ranges = torch.zeros(numel), [ShardRange(start=0, stop=numel, lr=1e-3, **CORRECTIONS)]
        times = []
        for _ in range(9):
            m.fill_(moment), v.fill_(moment)
            began = time.perf_counter()
            adamw_(p, m, v, grad, ranges, betas=BETAS, eps=EPS)
            times.append(time.perf_counter() - began)
        seconds[name] = min(times), statistics.median(times)
    assert seconds["denormal"][0] < 3 * seconds["normal"][0], seconds
    assert (m == 0).all() and (v == 0).all()


def test_the_processors_mode_for_denormals_is_as_it_was_afterwards(isa):
    shard = make_shard(1 << 17, torch.bfloat16, torch.bfloat16, 2)
    step(shard, three_ranges(1 << 17, **CORRECTIONS), torch.tensor(1.0))
    assert (torch.full((64,), 1e-40) * 0.5 != 0).all()


# ---- refusals
def test_what_is_not_contiguous_is_named():
    with pytest.raises(KernelError, match="grad is not contiguous"):
        adamw_(torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.zeros(6)[::2], [], betas=BETAS, eps=EPS)


def test_wrong_arguments_are_refused_in_words():
    p, m, v, g = (torch.zeros(8) for _ in range(4))
    rest = {"betas": BETAS, "eps": EPS}
    with pytest.raises(KernelError, match="got both master and remainder, expected one"):
        adamw_(p, m, v, g, [], remainder=torch.zeros(8, dtype=torch.int16), **rest)
    for remainder in (None, torch.zeros(8, dtype=torch.int16)):
        with pytest.raises(KernelError, match=r"without master there must be copies\.data, the bf16 copy"):
            adamw_(None, m, v, g, [], remainder=remainder, **rest)
    with pytest.raises(KernelError, match="expected all in torch.float32 or all in torch.float64"):
        adamw_(p, m.bfloat16(), v, g, [], **rest)
    with pytest.raises(KernelError, match="ranges ascend, do not overlap and lie within it"):
        adamw_(p, m, v, g, [ShardRange(start=0, stop=9, lr=1)], **rest)
    with pytest.raises(KernelError, match=r"got tensors of \[7, 8, 8\] elements and a gradient of 8"):
        adamw_(p[:7], m, v, g, [], **rest)
    quantized = ShardCopies(quantized=torch.zeros(8, dtype=torch.int8), scales=torch.zeros(1), bits=4, block=7)
    with pytest.raises(KernelError, match="an even number for 4 bits"):
        adamw_(p, m, v, g, [], copies=quantized, **rest)


def test_double_precision_is_updated_in_double_precision(cpu_library):
    shard = make_shard(64, torch.float32, None, 2)
    p, m, v = (tensor.double() for tensor in (shard.master, *shard.states))
    ranges = three_ranges(64, **CORRECTIONS)
    expected, *_ = in_fp64(shard, ranges, 1.0)
    with kernels.substitute("cpu", cpu_library):
        adamw_(p, m, v, shard.grad.double(), ranges, betas=BETAS, eps=EPS)
    torch.testing.assert_close(p, expected, rtol=1e-12, atol=1e-12)
