"""Rotary positions, against fp64."""

from __future__ import annotations

import pytest
import torch

from framework.kernels.rope import rope, rope_reference
from tests.kernels.tolerance import DTYPES, assert_rounded, randn, unaligned

FUNCTION = "fw_rope"


def tables(*shape: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    angles = randn(*shape, device=device, scale=3)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("per_batch", [False, True], ids=["shared", "per_batch"])
@pytest.mark.parametrize("head_dim", [2, 16, 36, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_and_gradient_are_those_of_fp64(layer_device, dtype: torch.dtype, head_dim: int, per_batch: bool):
    batch, tokens, heads = 2, 5, 3
    cos, sin = tables(*([batch] if per_batch else []), tokens, head_dim // 2, device=layer_device)
    for place in (torch.Tensor.clone, unaligned):
        x = place(randn(batch, tokens, heads, head_dim, dtype=dtype, device=layer_device)).requires_grad_()
        dy = randn(*x.shape, dtype=dtype, device=layer_device, seed=1)
        y = rope(x, cos, sin)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert_rounded(y, rope_reference(x.detach().double(), cos.double(), sin.double()), 3e-7)
        assert_rounded(dx, rope_reference(dy.double(), cos.double(), -sin.double()), 3e-7)


def test_a_rotation_keeps_lengths_and_no_tokens_are_no_work(layer_device):
    cos, sin = tables(4, 8, device=layer_device)
    x = randn(1, 4, 2, 16, device=layer_device)
    torch.testing.assert_close(rope(x, cos, sin).norm(dim=-1), x.norm(dim=-1))
    assert rope(x[:, :0], cos[:0], sin[:0]).shape == (1, 0, 2, 16)


def test_a_table_for_all_rows_may_have_a_batch_of_one_and_one_that_does_not_fit_is_refused(layer_device):
    cos, sin = tables(4, 8, device=layer_device)
    x = randn(3, 4, 2, 16, device=layer_device)
    assert torch.equal(rope(x, cos[None], sin[None]), rope(x, cos, sin))
    with pytest.raises(RuntimeError):
        rope(x, cos[:3], sin[:3])
