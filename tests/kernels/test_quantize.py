"""Block quantisation: bit for bit the reference, errors within half a step, nothing lost with error feedback, NaN in and NaN out."""

from __future__ import annotations

import pytest
import torch

import framework.kernels.library as kernels
from framework.kernels.library import KernelError
from framework.kernels.quantize import (
    dequantize,
    dequantize_reference,
    dequantize_sum_quantize,
    dequantize_sum_quantize_reference,
    quantize,
    quantize_reference,
)
from tests.kernels.shards import DTYPES, EPSILON

FORMATS = [(8, 64), (8, 1), (8, 7), (8, 300), (8, 5000), (4, 64), (4, 2), (4, 6), (4, 300)]
SIZES = (0, 1, 2, 5, 63, 64, 65, 301, 8193)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "block"), FORMATS)
def test_quantising_is_bit_for_bit_the_reference(isa, bits, block, dtype):
    for numel in SIZES:
        x = torch.randn(numel + 1).to(dtype)[1:]
        q, scales = quantize(x, bits=bits, block=block)
        expected_q, expected_scales = quantize_reference(x, bits=bits, block=block)
        assert torch.equal(q, expected_q) and torch.equal(scales, expected_scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "block"), FORMATS)
def test_there_and_back_is_within_half_a_step(isa, bits, block, dtype):
    for numel in SIZES:
        x = torch.randn(numel)
        q, scales = quantize(x, bits=bits, block=block)
        back = dequantize(q, scales, numel, bits=bits, block=block, dtype=dtype)
        step = scales.repeat_interleave(block)[:numel]
        assert back.dtype == dtype and ((back.float() - x).abs() <= step * 0.5001 + back.float().abs() * 2.0**-8).all()
        assert torch.equal(back, dequantize_reference(q, scales, numel, bits=bits, block=block).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "block"), FORMATS)
def test_adding_to_what_is_there_rounds_once(isa, bits, block, dtype):
    x, there = torch.randn(301), torch.randn(302).to(dtype)[1:]
    q, scales = quantize(x, bits=bits, block=block)
    exact = there.double() + dequantize_reference(q, scales, 301, bits=bits, block=block).double()
    size = exact.abs() + there.double().abs()
    dequantize(q, scales, 301, bits=bits, block=block, out=there, add=True)
    unit = torch.finfo(dtype).eps
    assert ((there.double() - exact).abs() <= 0.51 * unit * exact.abs() + 2 * EPSILON * size + 1e-7 * (dtype == torch.float16)).all()


@pytest.mark.parametrize(("bits", "block"), [(8, 64), (4, 64), (4, 6)])
def test_with_error_feedback_nothing_is_lost_over_many_steps(isa, bits, block):
    numel, steps = 301, 50
    x, error, total = torch.randn(numel), torch.zeros(numel), torch.zeros(numel, dtype=torch.float64)
    for _ in range(steps):
        q, scales = quantize(x, bits=bits, block=block, error=error)
        total += dequantize(q, scales, numel, bits=bits, block=block).double()
    assert ((total + error.double() - steps * x.double()).abs() < 1e-4).all()
    assert (error.abs() <= scales.repeat_interleave(block)[:numel] * 0.51).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_residual_is_that_of_the_reference(isa, bits):
    for numel in SIZES:
        x, error = torch.randn(numel), torch.randn(numel) * 0.1
        expected_error = error.clone()
        q, scales = quantize(x, bits=bits, error=error)
        expected_q, expected_scales = quantize_reference(x, bits=bits, error=expected_error)
        assert torch.equal(q, expected_q) and torch.equal(scales, expected_scales)
        torch.testing.assert_close(error, expected_error, rtol=0, atol=8 * EPSILON)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_with_a_number_that_is_not_finite_comes_out_as_nan_and_keeps_its_error(isa, bits, value):
    for function in (quantize, quantize_reference):
        x, error = torch.ones(200), torch.full((200,), 0.25)
        x[70] = value
        q, scales = function(x, bits=bits, block=64, error=error)
        back = dequantize(q, scales, 200, bits=bits, block=64)
        assert back.isnan().nonzero().flatten().tolist() == list(range(64, 128))
        assert (error[64:128] == 0.25).all() and (error[:64] < 0.1).all()


def test_blocks_of_zeros_and_of_denormals_are_zero(isa):
    x = torch.cat((torch.zeros(64), torch.full((64,), 1e-39)))
    for function in (quantize, quantize_reference):
        q, scales = function(x)
        assert (q == 0).all() and (scales == 0).all()


def test_the_largest_numbers_keep_their_magnitude(isa):
    x = torch.tensor([3.4e38, -3.4e38, 1e38, 0.0])
    for bits in (8, 4):
        q, scales = quantize(x, bits=bits, block=4)
        torch.testing.assert_close(dequantize(q, scales, 4, bits=bits, block=4)[:2], x[:2], rtol=1e-6, atol=0)


def test_the_format_is_the_documented_one(isa):
    q, scales = quantize(torch.tensor([7.0, -7.0, 3.0]), bits=4, block=4)
    assert q.tolist() == [0x97, 0x03] and scales.tolist() == [1.0]  # -7 is 9 in two's complement, and in the high nibble
    assert quantize(torch.tensor([127.0, -5.4]), block=2)[0].tolist() == [127, -5]


# ---- the step of a quantised reduce
@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize(("bits", "block"), [(8, 64), (8, 7), (8, 4096), (4, 64), (4, 6)])
def test_the_sum_of_parts_is_quantised_again(isa, bits, block, parts):
    for numel in (0, 1, 65, 301, 40_001):
        quantized = [quantize(torch.randn(numel), bits=bits, block=block) for _ in range(parts)]
        q, scales = torch.stack([one for one, _ in quantized]), torch.stack([one for _, one in quantized])
        found = dequantize_sum_quantize(q, scales, numel, bits=bits, block=block, sum_dtype=torch.float32)
        expected = dequantize_sum_quantize_reference(q, scales, numel, bits=bits, block=block, sum_dtype=torch.float32)
        torch.testing.assert_close(found[2], expected[2], rtol=0, atol=parts * 8 * EPSILON)
        torch.testing.assert_close(found[1], expected[1], rtol=parts * 4 * EPSILON, atol=parts * 8 * EPSILON)  # parts may cancel
        back = dequantize(found[0], found[1], numel, bits=bits, block=block)
        step = found[1].repeat_interleave(block)[:numel]
        assert ((back - expected[2]).abs() <= step * 0.51).all()


def test_what_is_not_wanted_is_not_made(isa):
    q, scales = quantize(torch.randn(64))
    only_sum = dequantize_sum_quantize(q[None], scales[None], 64, again=False, sum_dtype=torch.bfloat16)
    assert only_sum[:2] == (None, None) and only_sum[2].dtype == torch.bfloat16
    assert dequantize_sum_quantize(q[None], scales[None], 64)[2] is None
    big = quantize(torch.randn(20_000), block=9000)
    total = dequantize_sum_quantize(big[0][None], big[1][None], 20_000, block=9000, again=False, sum_dtype=torch.float32)[2]
    assert torch.equal(total, dequantize(*big, 20_000, block=9000))


# ---- refusals
def test_wrong_arguments_are_refused_in_words():
    q, scales = quantize(torch.zeros(64))
    with pytest.raises(KernelError, match="got bits=3"):
        quantize(torch.zeros(4), bits=3)
    with pytest.raises(KernelError, match="an even number for 4 bits"):
        quantize(torch.zeros(4), bits=4, block=7)
    with pytest.raises(KernelError, match="got 64 quantised bytes and 1 scales in torch.float32 for 65 elements, expected 65 and 2"):
        dequantize(q, scales, 65)
    with pytest.raises(KernelError, match="add=True needs out"):
        dequantize(q, scales, 64, add=True)
    with pytest.raises(KernelError, match="expected at most 4096"):
        dequantize_sum_quantize(q[None], scales[None], 64, block=5000)
    with pytest.raises(KernelError, match="x is not contiguous"):
        quantize(torch.zeros(8, 2).t())


def test_a_call_past_the_faces_is_checked_by_the_library(cpu_library):
    with pytest.raises(KernelError, match="it refuses these arguments"):
        cpu_library.call("fw_quantize", None, 0, 4, 5, 64, None, None, None, None)
    assert kernels.mode() == "auto"


def test_tensors_that_do_not_fit_are_refused_before_anything_is_read():
    x = torch.randn(128)
    q, scales = quantize(x)
    for wrong in (
        lambda: quantize(x, error=torch.zeros(128, dtype=torch.bfloat16)),
        lambda: quantize(x, error=torch.zeros(64)),
        lambda: quantize(x, out=(q[:64], scales)),
        lambda: dequantize(q, scales.bfloat16(), 128),
        lambda: dequantize(q, scales, 128, out=torch.empty(64)),
    ):
        with pytest.raises(KernelError, match="expected"):
            wrong()
