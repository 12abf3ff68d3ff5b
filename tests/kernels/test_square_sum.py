"""The sum of squares: exact to 1e-12, the same for any number of threads, and not finite where its input is not."""

from __future__ import annotations

import math

import pytest
import torch

from framework.kernels.library import KernelError
from framework.kernels.square_sum import square_sum, square_sum_reference
from tests.kernels.shards import DTYPES


def exact(x: torch.Tensor) -> float:
    return math.fsum(value * value for value in x.double().tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_exact_at_odd_sizes_and_unaligned_starts(isa, dtype):
    x = torch.randn(20_000).to(dtype)
    for start, stop in ((0, 0), (0, 1), (1, 4), (3, 20), (1, 8194), (7, 20_000)):
        found = square_sum(x[start:stop])
        assert found.dtype == torch.float64 and found.item() == pytest.approx(exact(x[start:stop]), rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_so_is_the_reference(dtype):
    x = torch.randn(20_000).to(dtype)
    assert square_sum_reference(x).item() == pytest.approx(exact(x), rel=1e-12)


def test_it_does_not_drift_where_fp32_sums_do(isa):
    x = torch.full((1 << 24,), 0.1)
    assert square_sum(x).item() == pytest.approx(float(x[0].double() ** 2) * (1 << 24), rel=1e-12)


def test_large_and_small_numbers_neither_overflow_nor_vanish(isa):
    assert square_sum(torch.full((1000,), 1e30)).item() == pytest.approx(1e63, rel=1e-6)
    assert square_sum(torch.full((1000,), 1e-40)).item() == pytest.approx(1e-77, rel=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_not_finite_where_an_element_is_not(isa, dtype, value):
    for numel, at in ((1, 0), (17, 16), (100_003, 70_000)):
        x = torch.ones(numel, dtype=dtype)
        x[at] = value
        found = square_sum(x).item()
        assert math.isnan(found) if math.isnan(value) else found == math.inf


def test_the_same_bits_for_any_number_of_threads(isa):
    x = torch.randn(3_000_017)
    before, found = torch.get_num_threads(), set()
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        found.add(square_sum(x).item())
    torch.set_num_threads(before)
    assert len(found) == 1


def test_it_writes_where_it_is_told(isa):
    out = torch.zeros((), dtype=torch.float64)
    assert square_sum(torch.ones(5), out=out) is out and out.item() == 5


def test_what_is_not_contiguous_is_named():
    with pytest.raises(KernelError, match="x is not contiguous"):
        square_sum(torch.zeros(4, 4).t())
