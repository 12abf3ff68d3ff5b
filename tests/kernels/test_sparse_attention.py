"""Block-sparse attention, against dense fp64 with a mask."""

from __future__ import annotations

import math

import pytest
import torch

from framework.kernels.library import KernelError
from framework.kernels.sparse_attention import BlockPattern, block_pattern, sparse_attention, sparse_attention_reference
from tests.kernels.tolerance import DTYPES, assert_rounded, randn, unaligned

PATTERNS = {
    "local": {"local_blocks": 2},
    "strided": {"local_blocks": 1, "stride_blocks": 2},
    "global": {"local_blocks": 1, "global_blocks": 1},
    "holes": {"global_blocks": 1},
}


def test_patterns_are_drawn_as_documented():
    def drawn(**parts: int | bool) -> list[str]:
        return ["".join(".x"[int(seen)] for seen in row) for row in block_pattern(5 * 32, 32, **parts).layout.tolist()]

    assert drawn(local_blocks=2) == ["x....", "xx...", ".xx..", "..xx.", "...xx"]
    assert drawn(local_blocks=1, stride_blocks=2) == ["x....", ".x...", ".xx..", ".x.x.", ".x.xx"]
    assert drawn(local_blocks=1, global_blocks=1) == ["x....", "xx...", "x.x..", "x..x.", "x...x"]
    assert drawn(local_blocks=2, causal=False) == ["xx...", "xxx..", ".xxx.", "..xxx", "...xx"]
    assert drawn(global_blocks=1, causal=False) == ["xxxxx", "x....", "x....", "x....", "x...."]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients_are_those_of_fp64(device, dtype: torch.dtype, name: str, causal: bool):
    batch, heads, kv_heads, tokens = 1, 2, 1, 100
    pattern = block_pattern(tokens, 32, **PATTERNS[name], causal=causal)
    head_dim = 72 if name == "local" else 16
    place = unaligned if name == "strided" else torch.Tensor.clone
    q = place(randn(batch, heads, tokens, head_dim, dtype=dtype, device=device)).requires_grad_()
    k, v = (place(randn(batch, kv_heads, tokens, head_dim, dtype=dtype, device=device, seed=seed)).requires_grad_() for seed in (1, 2))
    dout = randn(*q.shape, dtype=dtype, device=device, seed=3)
    out = sparse_attention(q, k, v, pattern, causal=causal)
    grads = torch.autograd.grad(out, (q, k, v), dout)

    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    exact = sparse_attention_reference(*exact_inputs, pattern, causal=causal)
    exact_grads = torch.autograd.grad(exact, exact_inputs, dout.double())
    assert_rounded(out, exact.detach(), 1e-5, units=1)
    assert_rounded(grads[2], exact_grads[2], 1e-5, units=1)
    for got, want in zip(grads[:2], exact_grads[:2], strict=True):  # the output enters as it was rounded
        assert_rounded(got, want, max(1e-5, 4 * torch.finfo(dtype).eps), units=1)


def test_a_full_pattern_is_dense_attention(device):
    q, k, v = (randn(2, 2, 64, 8, device=device, seed=seed) for seed in range(3))
    out = sparse_attention(q, k, v, block_pattern(64, 32, local_blocks=2))
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=1e-5, atol=1e-5)


def test_queries_that_see_nothing_give_zero(device):
    q, k, v = (randn(1, 1, 64, 8, device=device, seed=seed).requires_grad_() for seed in range(3))
    pattern = BlockPattern(torch.tensor([[False, False], [True, False]]), 32)
    out = sparse_attention(q, k, v, pattern)
    assert not out[:, :, :32].any() and out[:, :, 32:].any()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_nan_reaches_the_queries_that_see_it_only(device):
    q, k, v = (randn(1, 1, 64, 8, device=device, seed=seed) for seed in range(3))
    v[0, 0, 40] = math.nan
    out = sparse_attention(q, k, v, block_pattern(64, 32, local_blocks=1))
    assert out[0, 0, :32].isfinite().all() and out[0, 0, 40:].isnan().all()


def test_mistakes_are_named(device):
    q = randn(1, 1, 96, 8, device=device)
    with pytest.raises(KernelError, match="96 tokens, expected at most 64"):
        sparse_attention(q, q, q, block_pattern(64, 32, local_blocks=1))
    with pytest.raises(KernelError, match="multiple of 32"):
        block_pattern(64, 24, local_blocks=1)


def test_other_head_widths_and_no_tokens_work(device):
    pattern = block_pattern(64, 32, local_blocks=2)
    q = randn(1, 1, 40, 12, device=device)
    assert sparse_attention(q, q, q, pattern).shape == q.shape
    assert sparse_attention(q[:, :, :0, :8], q[:, :, :0, :8], q[:, :, :0, :8], pattern).shape == (1, 1, 0, 8)
