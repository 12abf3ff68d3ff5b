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
from framework.kernels.layer_op import layer_op

CHUNK_LOGITS = {"cpu": 2**25, "cuda": 2**28}
"""Logits held at once: 682 tokens of a vocabulary of 49152; on a GPU 2093 tokens of one of 128256, so that matmuls are large enough."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_logits: int | None = None) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[label], 0-d, in fp32 (fp64 for fp64 inputs).

    `hidden` [N, width] and `weight` [vocabulary, width] in the compute dtype, `labels` [N] int64. N = 0 gives 0.0 with a graph.
    One backward pass only.
    """
    device_type = hidden.device.type
    chunk_logits = CHUNK_LOGITS.get(device_type, CHUNK_LOGITS["cpu"]) if chunk_logits is None else chunk_logits
    with_grads = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, weight)]
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return _linear_cross_entropy(hidden, weight, labels, chunk_logits, *with_grads)[0]
    dtype = torch.get_autocast_dtype(device_type)
    with torch.autocast(device_type, enabled=False):
        return _linear_cross_entropy(hidden.to(dtype), weight.to(dtype), labels, chunk_logits, *with_grads)[0]


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same with all logits in memory."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(_loss_dtype(logits.dtype)), labels, reduction="sum")


def _loss_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_logits: int, with_hidden_grad: bool, with_weight_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss; and where they are wanted, else empty: the gradient of `hidden`, and that of `weight` in the loss's dtype."""
    loss, hidden_grad, weight_grad = _outputs(hidden, weight, with_hidden_grad, with_weight_grad)
    for made in (loss, weight_grad):
        made.zero_()
    chunk_tokens = max(1, chunk_logits // weight.shape[0])
    labels = labels.contiguous()
    for start in range(0, hidden.shape[0], chunk_tokens):
        rows, targets = hidden[start : start + chunk_tokens], labels[start : start + chunk_tokens]
        logits = F.linear(rows, weight)  # [chunk, vocabulary]
        loss += cross_entropy_(logits, targets, with_grad=with_hidden_grad or with_weight_grad).sum()
        if with_hidden_grad:
            torch.mm(logits, weight, out=hidden_grad[start : start + chunk_tokens])  # the logits have become their gradient
        if with_weight_grad and weight_grad.dtype == logits.dtype:
            weight_grad.addmm_(logits.T, rows)
        elif with_weight_grad:
            weight_grad += logits.T @ rows
        del logits  # before the next chunk is made
    return loss, hidden_grad, weight_grad


def _outputs(hidden: Tensor, weight: Tensor, with_hidden_grad: bool, with_weight_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _loss_dtype(hidden.dtype)
    hidden_grad = hidden.new_empty(hidden.shape if with_hidden_grad else 0)
    return hidden.new_empty((), dtype=dtype), hidden_grad, weight.new_empty(weight.shape if with_weight_grad else 0, dtype=dtype)


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, _, _, *ctx.wanted = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])
    ctx.dtypes, ctx.done = (hidden.dtype, weight.dtype), False


def _backward(ctx, loss_grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    if ctx.done:
        raise RuntimeError("the loss was already backpropagated once; its gradients are scaled in place and cannot serve again")
    ctx.done = True
    scaled = Tensor.mul_ if type(loss_grad) is Tensor else Tensor.mul  # a graph that is being traced must not change what it has saved
    grads = zip(ctx.saved_tensors, ctx.dtypes, ctx.wanted, strict=True)
    return *(scaled(grad, loss_grad).to(dtype) if wanted else None for grad, dtype, wanted in grads), *[None] * 4


_linear_cross_entropy = layer_op(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, int chunk_logits, bool with_hidden_grad, bool with_weight_grad) "
    "-> (Tensor, Tensor, Tensor)",
    _loss_and_gradients,
    lambda hidden, weight, labels, chunk_logits, *with_grads: _outputs(hidden, weight, *with_grads),
    setup_context=_setup_context,
    backward=_backward,
)
