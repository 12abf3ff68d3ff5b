"""Block-sparse attention: each block of queries sees some blocks of keys, by a pattern that all heads share.

`block_pattern` makes the usual patterns from three parts, of which any may be used: local (a window of blocks, Longformer,
arXiv:2004.05150), strided (every n-th block, Sparse Transformer, arXiv:1904.10509) and global (the first blocks are seen by all and,
without causality, see all).

Only blocks in the pattern are computed and no score leaves the chip; scores, softmax and sums are fp32. No atomics: the same inputs give
the same bits. For dense causal attention use torch's scaled_dot_product_attention, which has tensor-core kernels.

Tolerance against fp64 on the same inputs: output and gradient of v within a unit in the last place of the dtype plus 1e-5 of the tensor's
largest element; gradients of q and k within 4 units of the largest element's last place, because the output enters them as it was rounded.

Shapes: B batch, H query heads, K key/value heads (divides H), T tokens, D head_dim (a multiple of 8 up to 128; others use the reference).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from framework.kernels.layer_op import is_compiled, layer_op
from framework.kernels.library import KernelError, dtype_code, library_for, stream_of

BLOCK_MULTIPLE = 32
"""Blocks are made of whole tiles of the kernel."""


@dataclass(frozen=True, eq=False)
class BlockPattern:
    """Which blocks of `block` keys each block of queries sees: `layout` [blocks, blocks], bool, on the CPU."""

    layout: Tensor
    block: int
    _tables: dict[torch.device, tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.block <= 0 or self.block % BLOCK_MULTIPLE:
            raise KernelError(f"block pattern: got block={self.block}, expected a multiple of {BLOCK_MULTIPLE}.")
        if self.layout.dim() != 2 or self.layout.shape[0] != self.layout.shape[1] or self.layout.dtype != torch.bool:
            raise KernelError(f"block pattern: got a layout {list(self.layout.shape)} of {self.layout.dtype}, expected a square of bools.")

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """offsets and columns of the layout and of its transpose, int32: row i sees columns[offsets[i] : offsets[i + 1]]."""
        if device not in self._tables:
            self._tables[device] = tuple(table.to(device) for layout in (self.layout, self.layout.T) for table in _compressed(layout))
        return self._tables[device]

    def mask(self, tokens: int, causal: bool) -> Tensor:
        """Bool [T, T]: which key each query sees."""
        mask = self.layout.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)[:tokens, :tokens]
        return mask.tril() if causal else mask


def block_pattern(
    tokens: int, block: int = 64, *, local_blocks: int = 0, stride_blocks: int = 0, global_blocks: int = 0, causal: bool = True
) -> BlockPattern:
    """The pattern for sequences of up to `tokens`.

    local_blocks: a block sees itself and local_blocks - 1 before it (and after it, without causality). stride_blocks: and the blocks
    stride_blocks - 1, 2 * stride_blocks - 1, ... global_blocks: and the first ones.
    """
    count = -(-tokens // block)
    queries, keys = torch.arange(count)[:, None], torch.arange(count)[None, :]
    layout = (queries - keys).abs() < local_blocks
    if stride_blocks:
        layout = layout | ((keys + 1) % stride_blocks == 0)
    layout = layout | (keys < global_blocks)
    if causal:
        layout = layout & (keys <= queries)
    else:
        layout = layout | (queries < global_blocks)
    return BlockPattern(layout.expand(count, count).contiguous(), block)


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, pattern: BlockPattern, *, scale: float | None = None, causal: bool = True) -> Tensor:
    """softmax(q k^T * scale) v over what `pattern` and causality let a query see, like `q` [B, H, T, D]; `k`, `v` [B, K, T, D].

    scale: 1 / sqrt(D) by default. A query that sees nothing gets 0. Raises KernelError for a sequence that is longer than the pattern.
    """
    tokens, head_dim = q.shape[2:]
    if tokens > pattern.layout.shape[0] * pattern.block:
        most = pattern.layout.shape[0] * pattern.block
        raise KernelError(f"sparse_attention: got {tokens} tokens, expected at most {most} for this pattern.")
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    if not is_compiled("fw_sparse_attention_forward", q, k, v) or head_dim > 128 or head_dim % 8:
        return sparse_attention_reference(q, k, v, pattern, scale=scale, causal=causal)
    tables = pattern.tables(q.device)
    return _sparse_attention(q.contiguous(), k.contiguous(), v.contiguous(), *tables, pattern.block, scale, causal)[0]


def sparse_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, pattern: BlockPattern, *, scale: float | None = None, causal: bool = True
) -> Tensor:
    """`sparse_attention` in plain torch: all scores, masked."""
    tokens, head_dim = q.shape[2:]
    mask = pattern.mask(tokens, causal).to(q.device)
    return _dense(q, k, v, mask, 1 / math.sqrt(head_dim) if scale is None else scale)[0].to(q.dtype)


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Output, weights and log-sum-exp, in at least fp32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (tensor.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = (q.to(dtype) @ k.transpose(-1, -2) * scale).masked_fill(~mask, -math.inf)
    log_sum_exp = scores.logsumexp(-1)
    weights = (scores - log_sum_exp.masked_fill(log_sum_exp == -math.inf, 0)[..., None]).exp()
    return weights @ v, weights, log_sum_exp


def _mask_of(offsets: Tensor, columns: Tensor, block: int, tokens: int, causal: bool) -> Tensor:
    layout = torch.zeros(offsets.numel() - 1, offsets.numel() - 1, dtype=torch.bool, device=offsets.device)
    rows = torch.repeat_interleave(torch.arange(layout.shape[0], device=offsets.device), offsets.diff().long())
    layout[rows, columns.long()] = True
    return BlockPattern(layout, block).mask(tokens, causal)


def _compressed(layout: Tensor) -> tuple[Tensor, Tensor]:
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), layout.sum(1).cumsum(0)))
    return offsets.int(), layout.nonzero()[:, 1].int().contiguous()


# ---- the operation
def _forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, columns: Tensor, rows_of: Tensor, rows: Tensor, block: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    library = library_for("fw_sparse_attention_forward", q=q, k=k, v=v, offsets=offsets, columns=columns)
    if library is None:
        out, _, log_sum_exp = _dense(q, k, v, _mask_of(offsets, columns, block, q.shape[2], causal), scale)
        return out.to(q.dtype), log_sum_exp.float()
    out, log_sum_exp = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    addresses = (tensor.data_ptr() for tensor in (q, k, v, offsets, columns, out, log_sum_exp))
    library.call("fw_sparse_attention_forward", *addresses, *_sizes(q, k), block, scale, causal, dtype_code(q.dtype), stream_of(q))
    return out, log_sum_exp


def _backward(
    *tensors: Tensor,  # dout, q, k, v, out, log_sum_exp, offsets, columns, rows_of, rows; then block, scale, causal
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out, log_sum_exp, offsets, columns, rows_of, rows, block, scale, causal = tensors
    dout = dout.contiguous()
    library = library_for("fw_sparse_attention_backward", dout=dout, q=q, k=k, v=v, out=out, log_sum_exp=log_sum_exp)
    if library is None:
        return _dense_backward(dout, q, k, v, _mask_of(offsets, columns, block, q.shape[2], causal), scale)
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(log_sum_exp)
    given = (dout, q, k, v, out, log_sum_exp, offsets, columns, rows_of, rows, dq, dk, dv, delta)
    addresses = (tensor.data_ptr() for tensor in given)
    library.call("fw_sparse_attention_backward", *addresses, *_sizes(q, k), block, scale, causal, dtype_code(q.dtype), stream_of(q))
    return dq, dk, dv


def _dense_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    out, weights, _ = _dense(q, k, v, mask, scale)
    dtype, groups = out.dtype, (k.shape[1], q.shape[1] // k.shape[1])
    d = dout.to(dtype)
    dweights = d @ v.to(dtype).repeat_interleave(groups[1], 1).transpose(-1, -2)
    dscores = weights * (dweights - (d * out).sum(-1, keepdim=True)) * scale
    dq = dscores @ k.to(dtype).repeat_interleave(groups[1], 1)
    dk, dv = (part.unflatten(1, groups).sum(2) for part in (dscores.transpose(-1, -2) @ q.to(dtype), weights.transpose(-1, -2) @ d))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int, int, int, int]:
    """batch, heads, kv_heads, tokens, head_dim"""
    return q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3]


def _save(ctx, inputs: tuple, output: tuple) -> None:
    q, k, v, *tables, ctx.block, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, *tables)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout: Tensor | None, _: Tensor | None) -> tuple:
    nothing = (None,) * 7
    if dout is None:
        return None, None, None, *nothing
    return *_sparse_attention_backward(dout, *ctx.saved_tensors, ctx.block, ctx.scale, ctx.causal), *nothing


_TABLES = "Tensor offsets, Tensor columns, Tensor rows_of, Tensor rows, int block, float scale, bool causal"
_sparse_attention_backward = layer_op(
    f"sparse_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sum_exp, {_TABLES})"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    lambda dout, q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
)
_sparse_attention = layer_op(
    f"sparse_attention(Tensor q, Tensor k, Tensor v, {_TABLES}) -> (Tensor, Tensor)",
    _forward,
    lambda q, k, v, *_: (torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)),
    setup_context=_save,
    backward=_gradients,
)
