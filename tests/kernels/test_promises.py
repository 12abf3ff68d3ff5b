"""What every operation promises and the tests of each leave out: views, starts off alignment, nothing at all, NaN and infinities."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from framework.kernels.cross_entropy import cross_entropy
from framework.kernels.embedding import embedding
from framework.kernels.library import KernelError
from framework.kernels.linear_cross_entropy import linear_cross_entropy
from framework.kernels.lion import lion_, lion_reference_
from framework.kernels.nf4 import nf4_dequantize, nf4_dequantize_reference, nf4_quantize
from framework.kernels.quantize import dequantize, dequantize_sum_quantize, quantize
from framework.kernels.rms_norm import add_rms_norm, rms_norm
from framework.kernels.rope import rope
from framework.kernels.sgd import sgd_, sgd_reference_
from framework.kernels.shard import ShardRange
from framework.kernels.sparse_attention import block_pattern, sparse_attention
from framework.kernels.swiglu import swiglu
from framework.kernels.top_k import top_k
from tests.kernels.tolerance import DTYPES, randn, unaligned

SETTINGS = {"lion": {"betas": (0.9, 0.99)}, "sgd": {"momentum": 0.9}}
OPTIMIZERS = {"lion": (lion_, lion_reference_), "sgd": (sgd_, sgd_reference_)}


# ---- flat operations refuse views
def strided(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(2 * numel, dtype=dtype)[::2]


Q, SCALES = quantize(torch.ones(64))
REFUSED = {
    "sgd": lambda: sgd_(torch.zeros(3), strided(3), torch.zeros(3), [], momentum=0.9),
    "dequantise": lambda: dequantize(strided(64, torch.int8), SCALES, 64),
    "dequantise to": lambda: dequantize(Q, SCALES, 64, out=strided(64)),
    "sum of parts": lambda: dequantize_sum_quantize(torch.zeros(64, 2, dtype=torch.int8).T, torch.zeros(2, 1), 64),
    "nf4": lambda: nf4_dequantize(strided(32, torch.uint8), torch.ones(1), 64),
    "nf4 to": lambda: nf4_dequantize(torch.zeros(32, dtype=torch.uint8), torch.ones(1), 64, out=strided(64)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_flat_operations_refuse_what_is_not_contiguous(name: str):
    with pytest.raises(KernelError, match="is not contiguous"):
        REFUSED[name]()


# ---- layers take views, and tensors at any address
def layers(device: torch.device) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """name -> (function of its float inputs, those inputs)"""
    labels, ids, angles = (
        torch.tensor([1, 3, -100], device=device),
        torch.tensor([[0, 4], [4, 2]], device=device),
        randn(3, 4, device=device),
    )
    pattern = block_pattern(64, 32, local_blocks=1)

    def x(*shape: int, seed: int = 0) -> Tensor:
        return randn(*shape, device=device, seed=seed)

    return {
        "rms_norm": (lambda a, w: rms_norm(a, w, 1e-5), [x(3, 40), x(40)]),
        "add_rms_norm": (lambda a, b, w: torch.cat(add_rms_norm(a, b, w, 1e-5)), [x(3, 40), x(3, 40, seed=1), x(40)]),
        "rope": (lambda a: rope(a, angles.cos(), angles.sin()), [x(2, 3, 2, 8)]),
        "swiglu": (swiglu, [x(3, 40), x(3, 40, seed=1)]),
        "cross_entropy": (lambda a: cross_entropy(a, labels), [x(3, 40)]),
        "linear_cross_entropy": (lambda a, w: linear_cross_entropy(a, w, labels), [x(3, 8), x(20, 8)]),
        "embedding": (lambda w: embedding(ids, w), [x(5, 8)]),
        "top_k": (lambda a: top_k(a, 7), [x(3, 40)]),
        "sparse_attention": (
            lambda q, k, v: sparse_attention(q, k, v, pattern),
            [x(1, 2, 40, 16), x(1, 1, 40, 16), x(1, 1, 40, 16, seed=1)],
        ),
    }


def as_view(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("place", [as_view, unaligned], ids=["a view", "unaligned"])
@pytest.mark.parametrize("name", layers(torch.device("cpu")))
def test_layers_give_the_same_wherever_their_inputs_lie(device, name: str, place: Callable[[Tensor], Tensor]):
    function, inputs = layers(device)[name]
    results = []
    for made in (torch.clone, place):
        leaves = [made(one).requires_grad_() for one in inputs]
        y = function(*leaves)
        dy = made(randn(*y.shape, device=device, seed=5)) if y.dim() else torch.ones_like(y)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    for plain, placed in zip(*results, strict=True):
        torch.testing.assert_close(placed, plain, rtol=1e-6, atol=1e-6)


# ---- nothing at all
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_empty_shard_and_no_ranges_are_no_work(isa, name: str):
    nothing, some = torch.zeros(0), torch.ones(5)
    OPTIMIZERS[name][0](nothing, nothing, nothing, [ShardRange(start=0, stop=0, lr=0.1)], **SETTINGS[name])
    OPTIMIZERS[name][0](some, some.clone(), some.clone(), [], **SETTINGS[name])
    assert (some == 1).all()


# ---- NaN and infinities
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_that_are_not_finite_do_what_they_do_in_the_reference(isa, name: str, dtype: torch.dtype):
    grad = randn(37, dtype=dtype)
    grad[3], grad[20], grad[36] = math.nan, math.inf, -math.inf
    results = []
    for function in OPTIMIZERS[name]:
        master, state = randn(37, seed=1), randn(37, seed=2)
        function(master, state, grad, [ShardRange(start=0, stop=37, lr=0.1)], **SETTINGS[name])
        results.append((master, state))
    assert results[0][1][3].isnan()  # that of Lion's master is not: torch.sign(NaN) is 0
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_a_scale_that_is_not_a_number_spoils_its_block_only(isa):
    q, absmax = nf4_quantize(randn(192))
    absmax[1] = math.nan
    found = nf4_dequantize(q, absmax, 192)
    assert found[64:128].isnan().all()
    torch.testing.assert_close(found, nf4_dequantize_reference(q, absmax, 192), rtol=0, atol=0, equal_nan=True)


def test_nan_stays_where_it_is(device):
    angles, x = randn(3, 4, device=device), randn(1, 3, 2, 8, device=device)
    x[0, 1, 0, 2] = math.nan
    assert rope(x, angles.cos(), angles.sin()).isnan().nonzero().tolist() == [[0, 1, 0, 2], [0, 1, 0, 6]]
    weight = randn(5, 8, device=device).requires_grad_()
    dy = randn(3, 8, device=device)
    dy[1] = math.inf
    (grad,) = torch.autograd.grad(embedding(torch.tensor([0, 2, 4], device=device), weight), weight, dy)
    assert grad[2].isinf().all() and grad[[0, 1, 3, 4]].isfinite().all()
    hidden = randn(3, 8, device=device)
    hidden[0, 0] = math.nan
    assert linear_cross_entropy(hidden, weight.detach(), torch.tensor([1, 2, 3], device=device)).isnan()
    assert linear_cross_entropy(hidden, weight.detach(), torch.tensor([-100, 2, 3], device=device)).isfinite()
