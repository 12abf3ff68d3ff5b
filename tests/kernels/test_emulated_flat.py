"""CUDA sums of squares, casts and quantisation, against fp64 and their references."""

from __future__ import annotations

import math

import pytest
import torch

from framework.kernels.cast import cast_
from framework.kernels.nf4 import nf4_dequantize, nf4_dequantize_reference
from framework.kernels.quantize import (
    dequantize,
    dequantize_reference,
    dequantize_sum_quantize,
    dequantize_sum_quantize_reference,
    quantize,
    quantize_reference,
)
from framework.kernels.square_sum import square_sum
from tests.kernels.tolerance import DTYPES, randn, unaligned

SIZES = [0, 1, 7, 8, 2051, 20_003]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_square_sum_is_exact_to_fp64(device, numel: int, dtype: torch.dtype):
    for place in (torch.Tensor.clone, unaligned):
        x = place(randn(numel, dtype=dtype, device=device))
        assert square_sum(x).item() == pytest.approx(x.double().square().sum().item(), rel=1e-12)


def test_square_sum_neither_overflows_nor_hides_what_is_not_finite(device):
    x = torch.full((300,), 1e30, device=device)
    assert square_sum(x).item() == pytest.approx(300 * float(x[0]) ** 2, rel=1e-12)
    x[7] = math.inf
    assert square_sum(x).item() == math.inf
    x[8] = math.nan
    assert math.isnan(square_sum(x).item())


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_a_cast_is_torchs_bit_for_bit(device, source: torch.dtype, target: torch.dtype):
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 65504, 65520, 1e38, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, 6e-8, 2e-5]
    for place in (torch.Tensor.clone, unaligned):
        for x in (torch.tensor(special), randn(1003, scale=100), randn(0)):
            src = place(x.to(source).to(device))
            dst = place(torch.zeros(x.numel(), dtype=target, device=device))
            cast_(dst, src)
            expected = src.to(target)
            bits = torch.int32 if target == torch.float32 else torch.int16
            finite = ~expected.isnan()
            assert torch.equal(dst.view(bits)[finite], expected.view(bits)[finite]) and dst[~finite].isnan().all()


@pytest.mark.parametrize("bits, block", [(8, 64), (8, 50), (4, 64), (4, 6), (8, 5000)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantisation_and_back_equal_the_reference(device, dtype: torch.dtype, bits: int, block: int):
    for numel, place in ((0, torch.Tensor.clone), (1, torch.Tensor.clone), (1027, torch.Tensor.clone), (1027, unaligned)):
        x = place(randn(numel, dtype=dtype, device=device))
        q, scales = quantize(x, bits=bits, block=block)
        expected, expected_scales = quantize_reference(x, bits=bits, block=block)
        assert torch.equal(q, expected) and torch.equal(scales, expected_scales)
        back = dequantize(place(q), scales, numel, bits=bits, block=block, dtype=dtype)
        value = dequantize_reference(q, scales, numel, bits=bits, block=block)
        assert torch.equal(back, value.to(dtype))
        total = place(x)
        dequantize(q, scales, numel, bits=bits, block=block, out=total, add=True)
        torch.testing.assert_close(total, (x.float() + value).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_error_feedback_keeps_what_was_lost(device, bits: int):
    x, error = randn(1000, device=device), randn(1000, device=device, seed=1, scale=0.1)
    expected_error = error.clone()
    q, scales = quantize(x, bits=bits, error=error)
    expected, expected_scales = quantize_reference(x, bits=bits, error=expected_error)
    assert torch.equal(q, expected) and torch.equal(scales, expected_scales)
    torch.testing.assert_close(error, expected_error, rtol=0, atol=1e-6)


def test_a_block_that_is_not_finite_comes_out_as_nan(device):
    x = randn(256, device=device)
    x[70], x[130], x[192:] = math.nan, math.inf, 1e-44
    error = torch.ones(256, device=device)
    q, scales = quantize(x)
    assert scales.isnan().tolist() == [False, True, True, False] and scales[3] == 0 and not q[64:].any()
    quantize(x, error=error)
    assert (error[64:192] == 1).all()


@pytest.mark.parametrize("sum_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_sums_of_quantised_parts_equal_the_reference(device, bits: int, sum_dtype: torch.dtype | None):
    numel, parts = 1027, 3
    made = [quantize_reference(randn(numel, device=device, seed=part), bits=bits) for part in range(parts)]
    q, scales = (torch.stack(tensors) for tensors in zip(*made, strict=True))
    for again in (True, False):
        if not again and sum_dtype is None:
            continue
        got = dequantize_sum_quantize(q, scales, numel, bits=bits, again=again, sum_dtype=sum_dtype)
        want = dequantize_sum_quantize_reference(q, scales, numel, bits=bits, again=again, sum_dtype=sum_dtype)
        if again:
            torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=0)
            difference = (dequantize_reference(*got[:2], numel, bits=bits) - dequantize_reference(*want[:2], numel, bits=bits)).abs()
            assert (difference <= got[1].repeat_interleave(64)[:numel] * 1.001).all()  # one step, where a sum lies between two
        if sum_dtype is not None:
            torch.testing.assert_close(got[2], want[2], rtol=torch.finfo(sum_dtype).eps, atol=1e-6)


@pytest.mark.parametrize("block", [64, 12])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nf4_equals_the_reference(device, dtype: torch.dtype, block: int):
    for numel in (0, 1, 2051):
        for place in (torch.Tensor.clone, unaligned):
            q = place(torch.randint(0, 256, ((numel + 1) // 2,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device))
            absmax = randn(-(-numel // block), device=device).abs()
            got = nf4_dequantize(q, absmax, numel, block=block, dtype=dtype)
            assert torch.equal(got, nf4_dequantize_reference(q, absmax, numel, block=block).to(dtype))
