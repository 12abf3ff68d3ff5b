"""Rotary position embedding (arXiv:2104.09864) applied to queries or keys as projections leave them, [B, T, H, D].

Pairs (i, i + D/2) of a head are turned by their position's angle: the layout of Hugging Face weights. The head dimension
comes after the tokens, before any transpose, and the tables have half the width, without repetition.

Tolerance against fp64 on the same inputs: half a unit in the last place of the dtype plus 3e-7 of the pair's length. The reference
rounds cos, sin and each product to the dtype.

Shapes: B batch, T tokens, H heads, D head_dim (even).
"""

from __future__ import annotations

import torch
from torch import Tensor

from framework.kernels.layer_op import is_compiled, layer_op
from framework.kernels.library import dtype_code, library_for, stream_of


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [B, T, H, D] turned; `cos` and `sin` fp32, [T, D/2] or [B, T, D/2]. No gradient flows to the tables."""
    tables_fit = cos.dtype == sin.dtype == torch.float32 and cos.shape == sin.shape and cos.shape[-2:] == (x.shape[1], x.shape[3] // 2)
    if not is_compiled("fw_rope", x) or not tables_fit or (cos.dim() == 3 and cos.shape[0] not in (1, x.shape[0])):
        return rope_reference(x, cos, sin)
    return _rope(x.contiguous(), cos.contiguous(), sin.contiguous(), False)


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope` in plain torch."""
    cos, sin = (torch.cat((table, table), -1).unsqueeze(-2).to(x.dtype) for table in (cos, sin))  # [.., T, 1, D]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _turn(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    library = library_for("fw_rope", x=x, cos=cos, sin=sin)
    if library is None:
        return rope_reference(x.float(), cos, -sin if inverse else sin).to(x.dtype)
    y = torch.empty_like(x)
    batch, tokens, heads, head_dim = x.shape
    stride = cos.stride(0) if cos.dim() == 3 and cos.shape[0] > 1 else 0
    library.call(
        "fw_rope",
        *(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()),
        *(batch, tokens, heads, head_dim, stride, inverse, dtype_code(x.dtype), stream_of(x)),
    )
    return y


def _save(ctx, inputs: tuple, output: Tensor) -> None:
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx, dy: Tensor) -> tuple:
    return _rope(dy.contiguous(), *ctx.saved_tensors, not ctx.inverse), None, None, None


_rope = layer_op(
    "rope(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor",
    _turn,
    lambda x, cos, sin, inverse: torch.empty_like(x),
    setup_context=_save,
    backward=_gradients,
)
