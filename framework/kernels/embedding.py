"""Embedding lookup whose gradient is the same bits in every run.

Tokens are sorted by id and summed in their order in the batch, in fp32, rounded once: no atomic additions, whose order differs from run
to run.

Tolerance of the gradient against fp64: half a unit in the last place of the dtype plus 1e-6 of the sum of absolute values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.kernels.layer_op import is_compiled, layer_op
from framework.kernels.library import dtype_code, library_for, stream_of

CHUNK = 64
"""FW_EMBEDDING_CHUNK: tokens of a chunk."""


def embedding(ids: Tensor, weight: Tensor, padding_index: int = -1) -> Tensor:
    """Rows of `weight` [V, cols] by `ids` [...] int64, each in [0, V): [..., cols]. The row `padding_index` (-1: none) gets no gradient."""
    if not is_compiled("fw_embedding_backward", weight):
        return embedding_reference(ids, weight, padding_index)
    return _embedding(ids.long(), weight, padding_index)


def embedding_reference(ids: Tensor, weight: Tensor, padding_index: int = -1) -> Tensor:
    """`embedding` in plain torch."""
    return F.embedding(ids, weight, None if padding_index < 0 else padding_index)


def _backward(dy: Tensor, ids: Tensor, vocabulary: int, padding_index: int) -> Tensor:
    cols = dy.shape[-1]
    dy, ids = dy.reshape(-1, cols).contiguous(), ids.flatten()
    library = library_for("fw_embedding_backward", dy=dy)
    if library is None:
        dweight = torch.zeros(vocabulary, cols, dtype=torch.promote_types(dy.dtype, torch.float32), device=dy.device)
        dweight.index_add_(0, ids, dy.to(dweight.dtype))
        if padding_index >= 0:
            dweight[padding_index] = 0
        return dweight.to(dy.dtype)
    dweight = torch.zeros(vocabulary, cols, dtype=dy.dtype, device=dy.device)
    sorted_ids, order = torch.sort(ids, stable=True)
    partial = torch.empty(-(-ids.numel() // CHUNK), 2, cols, dtype=torch.float32, device=dy.device)
    library.call(
        "fw_embedding_backward",
        *(dy.data_ptr(), sorted_ids.data_ptr(), order.data_ptr(), dweight.data_ptr(), partial.data_ptr()),
        *(ids.numel(), cols, vocabulary, padding_index, dtype_code(dy.dtype), stream_of(dy)),
    )
    return dweight


_embedding_backward = layer_op(
    "embedding_backward(Tensor dy, Tensor ids, int vocabulary, int padding_index) -> Tensor",
    _backward,
    lambda dy, ids, vocabulary, padding_index: dy.new_empty(vocabulary, dy.shape[-1]),
)


def _save(ctx, inputs: tuple, output: Tensor) -> None:
    ids, weight, ctx.padding_index = inputs
    ctx.vocabulary = weight.shape[0]
    ctx.save_for_backward(ids)


_embedding = layer_op(
    "embedding(Tensor ids, Tensor weight, int padding_index) -> Tensor",
    lambda ids, weight, padding_index: F.embedding(ids, weight),
    lambda ids, weight, padding_index: weight.new_empty(*ids.shape, weight.shape[1]),
    setup_context=_save,
    backward=lambda ctx, dy: (None, _embedding_backward(dy, *ctx.saved_tensors, ctx.vocabulary, ctx.padding_index), None),
)
