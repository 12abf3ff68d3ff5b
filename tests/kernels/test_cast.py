"""Casts between fp32, bf16 and fp16, compared bit for bit with torch's."""

from __future__ import annotations

import pytest
import torch

from framework.kernels.cast import cast_, cast_reference_
from framework.kernels.library import KernelError
from tests.kernels.shards import DTYPES


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, but for the payload of NaN."""
    integers = torch.int32 if found.dtype == torch.float32 else torch.int16
    number = ~expected.isnan()
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(found[number].view(integers), expected[number].view(integers))


def hard_values(dtype: torch.dtype) -> torch.Tensor:
    """Every 16-bit pattern; of fp32 those with all 16-bit halves, ties of both targets and random ones."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    halves = torch.arange(2**16) << 16
    patterns = [halves, halves + 0x8000, halves + 0x7FFF, halves + 0x1000, halves + 0x3000, torch.randint(2**32, (50_000,))]
    patterns = torch.cat(patterns)
    return torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_every_kind_of_number_is_cast_as_torch_does(isa, source, target):
    x = hard_values(source)
    assert same(cast_(torch.empty(x.shape, dtype=target), x), x.to(target))


@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_odd_sizes_and_unaligned_starts_touch_nothing_else(isa, target):
    x = torch.randn(3000)
    for numel in (0, 1, 3, 15, 17, 63, 131, 2048):
        whole = torch.full((numel + 7,), 9.0, dtype=target)
        cast_(whole[3 : 3 + numel], x[1 : 1 + numel])
        assert torch.equal(whole[3 : 3 + numel], x[1 : 1 + numel].to(target))
        assert (whole[:3] == 9).all() and (whole[3 + numel :] == 9).all()


@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_large_casts_past_the_cache_are_the_same(isa, target):
    x = torch.randn((1 << 21) + 13)
    whole = torch.empty(x.numel() + 1, dtype=target)
    assert torch.equal(cast_(whole[1:], x), x.to(target))


def test_the_reference_is_torch():
    x = torch.randn(2, 5)
    assert torch.equal(cast_reference_(torch.empty(2, 5, dtype=torch.float16), x), x.half())


def test_other_sizes_and_strides_are_refused():
    with pytest.raises(KernelError, match="got 3 elements for 4"):
        cast_(torch.empty(4), torch.empty(3))
    with pytest.raises(KernelError, match="dst is not contiguous"):
        cast_(torch.empty(8)[::2], torch.empty(4))
