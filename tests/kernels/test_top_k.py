"""Top-k activation sparsity, exactly."""

from __future__ import annotations

import pytest
import torch

from framework.kernels.library import KernelError
from framework.kernels.top_k import top_k, top_k_reference
from tests.kernels.tolerance import DTYPES, randn


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_k_largest_of_each_row_remain(device, dtype: torch.dtype):
    for cols, k in ((1, 1), (40, 7), (700, 700), (700, 1), (1031, 300)):
        x = randn(3, cols, dtype=dtype, device=device)
        y = top_k(x, k)
        assert torch.equal(y, top_k_reference(x, k)) and (y != 0).sum(-1).tolist() == [k] * 3


def test_of_equal_entries_the_first_remain(device):
    x = torch.ones(2, 600, device=device)
    x[:, ::2] = -1
    x[1, 500] = 2
    y = top_k(x, 10)
    assert y[0].nonzero().flatten().tolist() == list(range(10))
    assert y[1].nonzero().flatten().tolist() == [*range(9), 500]


def test_nan_counts_as_largest_and_denormals_count(device):
    x = torch.tensor([[1.0, float("nan"), 1e-44, 0.0, -float("inf")]], device=device)
    assert top_k(x, 1).isnan().tolist() == [[False, True, False, False, False]]
    assert top_k(x, 4)[0, 2] == 1e-44


def test_the_gradient_passes_what_was_kept_or_everything(device):
    x = randn(4, 50, device=device).requires_grad_()
    dy = randn(4, 50, device=device, seed=1)
    (grad,) = torch.autograd.grad(top_k(x, 5), x, dy)
    assert torch.equal(grad, torch.where(top_k_reference(x, 5) != 0, dy, 0))
    (grad,) = torch.autograd.grad(top_k(x, 5, straight_through=True), x, dy)
    assert torch.equal(grad, dy)


def test_an_impossible_k_is_refused_and_no_rows_are_no_work(device):
    x = randn(4, 50, device=device)
    for k in (0, 51):
        with pytest.raises(KernelError, match="expected 1 to 50"):
            top_k(x, k)
    assert top_k(x[:0], 3).shape == (0, 50)
