"""NF4: the published table, bitsandbytes' packing, bit for bit the reference."""

from __future__ import annotations

import pytest
import torch

from framework.kernels.library import KernelError
from framework.kernels.nf4 import TABLE, nf4_dequantize, nf4_dequantize_reference, nf4_quantize
from tests.kernels.shards import DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [2, 6, 64, 300])
def test_dequantising_is_bit_for_bit_the_reference(isa, block, dtype):
    for numel in (0, 1, 2, 17, 64, 301, 40_001):
        q, absmax = nf4_quantize(torch.randn(numel), block=block)
        found = nf4_dequantize(q, absmax, numel, block=block, dtype=dtype)
        assert torch.equal(found, nf4_dequantize_reference(q, absmax, numel, block=block).to(dtype))


def test_the_first_element_is_in_the_high_nibble(isa):
    q = torch.tensor([0x0F, 0x70], dtype=torch.uint8)
    assert nf4_dequantize(q, torch.tensor([2.0]), 3, block=64).tolist() == [2 * TABLE[0], 2 * TABLE[15], 2 * TABLE[7]]


def test_the_table_is_the_one_published_with_qlora():
    normal = torch.distributions.Normal(0.0, 1.0)
    offset = 0.9677083
    positive = normal.icdf(torch.linspace(offset, 0.5, 9)[:-1])
    negative = -normal.icdf(torch.linspace(offset, 0.5, 8)[:-1])
    values = torch.cat((negative, torch.zeros(1), positive)).sort().values
    torch.testing.assert_close(values / values.max(), torch.tensor(TABLE), rtol=0, atol=1e-5)


def test_quantising_takes_the_nearest_value():
    x = torch.randn(1000)
    q, absmax = nf4_quantize(x)
    scale = absmax.repeat_interleave(64)[:1000]
    nearest = (torch.tensor(TABLE)[None] * scale[:, None] - x[:, None]).abs().amin(dim=1)
    found = (nf4_dequantize_reference(q, absmax, 1000) - x).abs()
    torch.testing.assert_close(found, nearest, rtol=0, atol=1e-6)


def test_wrong_sizes_are_refused():
    q, absmax = nf4_quantize(torch.randn(64))
    with pytest.raises(KernelError, match="do not fit 63 elements in blocks of 32"):
        nf4_dequantize(q, absmax, 63, block=32)
    with pytest.raises(KernelError, match="expected an even number"):
        nf4_quantize(torch.randn(4), block=3)
