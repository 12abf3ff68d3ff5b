"""RMSNorm and residual addition + RMSNorm, against fp64."""

from __future__ import annotations

import pytest
import torch

from framework.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tests.kernels.tolerance import DTYPES, assert_rounded, randn, unaligned

FUNCTION = "fw_rms_norm_backward"
SHAPES = [(5, 64), (2, 3, 40), (3, 1027), (2, 1536), (1, 10_600)]  # a warp a row, a block a row, sums in shared memory and in global memory


@pytest.mark.parametrize("start_off", [False, True], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_are_those_of_fp64(layer_device, shape: tuple[int, ...], dtype: torch.dtype, start_off: bool):
    x, residual, dy, dsum = (randn(*shape, dtype=dtype, device=layer_device, seed=seed) for seed in range(4))
    weight = randn(shape[-1], dtype=dtype, device=layer_device) + 1
    if start_off:
        x, residual, weight = (unaligned(tensor) for tensor in (x, residual, weight))
    leaves = [tensor.requires_grad_() for tensor in (x, residual, weight)]
    y, total = add_rms_norm(*leaves, 1e-5)
    grads = torch.autograd.grad((y, total), leaves, (dy, dsum))

    summed = (x + residual).detach().double().requires_grad_()  # rounded to the dtype first
    exact_weight = weight.detach().double().requires_grad_()
    exact = rms_norm_reference(summed, exact_weight, 1e-5)
    exact_sum_grad, exact_weight_grad = torch.autograd.grad(exact, (summed, exact_weight), dy.double())
    assert torch.equal(total, x + residual)
    assert_rounded(y, exact, 2e-6)
    for grad in grads[:2]:
        assert_rounded(grad, exact_sum_grad + dsum.double(), 2e-6)
    assert_rounded(grads[2], exact_weight_grad, 1e-5, of=exact_weight_grad.norm())

    alone = rms_norm(x, weight, 1e-5)
    assert_rounded(alone, rms_norm_reference(x.detach().double(), exact_weight, 1e-5), 2e-6)


def test_only_one_of_the_outputs_needs_a_gradient(layer_device):
    x, residual, weight = randn(4, 32), randn(4, 32, seed=1), randn(32)
    leaves = [tensor.to(layer_device).requires_grad_() for tensor in (x, residual, weight)]
    (of_sum,) = torch.autograd.grad(add_rms_norm(*leaves, 1e-5)[1].sum(), leaves[:1])
    assert torch.equal(of_sum, torch.ones_like(of_sum))
    grads = torch.autograd.grad(add_rms_norm(*leaves, 1e-5)[0].square().sum(), leaves)  # a stride-0 gradient would arrive from sum()
    expected = torch.autograd.grad(add_rms_norm_reference(*leaves, 1e-5)[0].square().sum(), leaves)
    for grad, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)


def test_nothing_in_nothing_out(layer_device):
    x = torch.empty(0, 16, device=layer_device, requires_grad=True)
    weight = torch.ones(16, device=layer_device, requires_grad=True)
    y = rms_norm(x, weight, 1e-5)
    y.sum().backward()
    assert y.shape == (0, 16) and x.grad.shape == (0, 16) and not weight.grad.any()


def test_what_is_not_finite_stays_in_its_row(layer_device):
    x = randn(3, 40, device=layer_device)
    x[1, 3] = float("nan")
    y = rms_norm(x, torch.ones(40, device=layer_device), 1e-5)
    assert y[1].isnan().all() and y[::2].isfinite().all()


def test_views_work(layer_device):
    x = randn(6, 8, 32, device=layer_device).transpose(0, 1)
    weight = randn(32, device=layer_device)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
