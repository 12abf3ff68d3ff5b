"""Cross-entropy of hidden states against a vocabulary matrix, without ever holding all logits.

The logits of SmolLM2 are 85 times as large as the hidden states they come from (vocabulary 49152, width 576), so they are made and
used chunk by chunk. Compare `linear_cross_entropy_reference`, the same in plain torch.

Unusual: the gradients are computed in the forward pass, while a chunk's logits are there, and only scaled in the backward pass. This
saves the second matmul of a recomputation at no cost in memory: the loss is where a step's memory peaks either way. It also means that
the backward pass does not read `weight`.

Peak memory on top of the inputs: one chunk of logits in the compute dtype where the compiled softmax (`cross_entropy.py`) writes gradients
over them, elsewhere that and 2 chunks in fp32 (2 x 128 MiB); the gradient of `weight` in fp32, with one product in the compute dtype beside
it where that is another; and the gradient of `hidden`.

Tolerance against fp64: that of the matmuls in the compute dtype; the softmax itself is exact to fp32 (`cross_entropy.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.kernels.cross_entropy import cross_entropy_

CHUNK_LOGITS = {"cpu": 2**25, "cuda": 2**28}
"""Logits held at once: 682 tokens of a vocabulary of 49152; on a GPU 2093 tokens of one of 128256, so that matmuls are large enough."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_logits: int | None = None) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[label], 0-d, in fp32 (fp64 for fp64 inputs).

    `hidden` [N, width] and `weight` [vocabulary, width] in the compute dtype, `labels` [N] int64. N = 0 gives 0.0 with a graph.
    One backward pass only.
    """
    device_type = hidden.device.type
    chunk_logits = CHUNK_LOGITS.get(device_type, CHUNK_LOGITS["cpu"]) if chunk_logits is None else chunk_logits
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk_logits, torch.is_grad_enabled())
    dtype = torch.get_autocast_dtype(device_type)
    with torch.autocast(device_type, enabled=False):
        return _ChunkedCrossEntropy.apply(hidden.to(dtype), weight.to(dtype), labels, chunk_logits, torch.is_grad_enabled())


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same with all logits in memory."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(_loss_dtype(logits.dtype)), labels, reduction="sum")


def _loss_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_logits: int, with_grad: bool) -> Tensor:
        dtype = _loss_dtype(hidden.dtype)
        hidden_grad = torch.empty_like(hidden) if with_grad and hidden.requires_grad else None
        weight_grad = torch.zeros_like(weight, dtype=dtype) if with_grad and weight.requires_grad else None
        loss = torch.zeros((), dtype=dtype, device=hidden.device)
        chunk_tokens = max(1, chunk_logits // weight.shape[0])
        labels = labels.contiguous()
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows, targets = hidden[start : start + chunk_tokens], labels[start : start + chunk_tokens]
            logits = F.linear(rows, weight)  # [chunk, vocabulary]
            loss += cross_entropy_(logits, targets, with_grad=hidden_grad is not None or weight_grad is not None).sum()
            if hidden_grad is not None:
                torch.mm(logits, weight, out=hidden_grad[start : start + chunk_tokens])  # the logits have become their gradient
            if weight_grad is not None and weight_grad.dtype == logits.dtype:
                weight_grad.addmm_(logits.T, rows)
            elif weight_grad is not None:
                weight_grad += logits.T @ rows
            del logits  # before the next chunk is made
        ctx.grads = (hidden_grad, weight_grad)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        return loss

    @staticmethod
    def backward(ctx, loss_grad: Tensor):
        if ctx.grads is None:
            raise RuntimeError("the loss was already backpropagated once; its gradients are scaled in place and cannot serve again")
        hidden_grad, weight_grad = (
            None if grad is None else grad.mul_(loss_grad).to(dtype) for grad, dtype in zip(ctx.grads, ctx.dtypes, strict=True)
        )
        ctx.grads = None
        return hidden_grad, weight_grad, None, None, None
