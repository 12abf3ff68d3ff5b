"""SwiGLU, against fp64."""

from __future__ import annotations

import math

import pytest
import torch

from framework.kernels.swiglu import swiglu, swiglu_reference
from tests.kernels.tolerance import DTYPES, assert_rounded, randn, unaligned

FUNCTION = "fw_swiglu_backward"


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 7), (2, 1000), (4100,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_and_gradients_are_those_of_fp64(layer_device, dtype: torch.dtype, shape: tuple[int, ...]):
    for place in (torch.Tensor.clone, unaligned):
        gate, up = (place(randn(*shape, dtype=dtype, device=layer_device, seed=seed, scale=3)).requires_grad_() for seed in range(2))
        dy = randn(*shape, dtype=dtype, device=layer_device, seed=2)
        y = swiglu(gate, up)
        grads = torch.autograd.grad(y, (gate, up), dy)
        exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (gate, up)]
        exact = swiglu_reference(*exact_inputs)
        exact_grads = torch.autograd.grad(exact, exact_inputs, dy.double())
        if y.numel():
            terms = exact.detach(), dy.double() * exact_inputs[1], dy.double() * exact_inputs[0]  # sizes before derivatives near 0 cancel
            for got, want, term in zip((y, *grads), (exact, *exact_grads), terms, strict=True):
                assert_rounded(got, want.detach(), 1e-6, of=term.detach().abs())


def test_large_gates_neither_overflow_nor_give_nan(layer_device):
    gate = torch.tensor([-200.0, 200.0, math.inf, math.nan], device=layer_device)
    y = swiglu(gate, torch.ones_like(gate))
    assert y[:3].tolist() == [0.0, 200.0, math.inf] and y[3].isnan()


def test_an_expanded_gradient_is_read_as_what_it_is(layer_device):
    gate, up = (randn(4, 8, device=layer_device, seed=seed).requires_grad_() for seed in range(2))
    grads = torch.autograd.grad(swiglu(gate, up).sum(), (gate, up))
    expected = torch.autograd.grad(swiglu_reference(gate, up).sum(), (gate, up))
    for grad, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, want)
