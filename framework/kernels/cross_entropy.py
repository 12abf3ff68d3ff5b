"""Softmax cross-entropy on logits: per row log(sum(exp(logits))) - logits[label], without a second tensor of the logits' size in fp32.

`cross_entropy_` writes the gradient over the logits in the same pass; it is what `linear_cross_entropy.py` calls chunk by chunk.
`cross_entropy` is the same for autograd: it keeps the logits, and makes their gradient in the backward pass.

Tolerance against fp64 on the same inputs: the loss within 2e-6 of max(1, |loss|), the gradient within half a unit in the last place of its
dtype plus 2e-6.

A row with label -100 has loss 0 and gradient 0. Other labels outside of the vocabulary give NaN where the kernel runs; the reference
raises.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.kernels.layer_op import is_compiled, layer_op
from framework.kernels.library import KernelError, dtype_code, library_for, stream_of

IGNORED_LABEL = -100


def cross_entropy_(logits: Tensor, labels: Tensor, *, with_grad: bool = True, grad_factor: float = 1.0) -> Tensor:
    """Loss [N] in fp32 (fp64 for fp64 logits), without autograd. `logits` [N, V] becomes its gradient times `grad_factor`, unless
    `with_grad` is False."""
    library = library_for("fw_cross_entropy", logits=logits, labels=labels)
    if labels.dtype != torch.int64 or labels.shape != logits.shape[:1]:
        raise KernelError(f"got labels {list(labels.shape)} in {labels.dtype}, expected [{logits.shape[0]}] in torch.int64.")
    if library is None:
        return cross_entropy_reference_(logits, labels, with_grad=with_grad, grad_factor=grad_factor)
    rows, vocabulary = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    library.call(
        "fw_cross_entropy",
        *(logits.data_ptr(), labels.data_ptr(), loss.data_ptr(), rows, vocabulary, vocabulary, grad_factor, with_grad),
        *(dtype_code(logits.dtype), stream_of(logits)),
    )
    return loss


@torch.no_grad()
def cross_entropy_reference_(logits: Tensor, labels: Tensor, *, with_grad: bool = True, grad_factor: float = 1.0) -> Tensor:
    """`cross_entropy_` in plain torch."""
    log_probabilities = F.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    trained = labels != IGNORED_LABEL
    targets = torch.where(trained, labels, 0)[:, None]
    loss = torch.where(trained, -log_probabilities.gather(1, targets).squeeze(1), 0)
    if with_grad:
        grad = log_probabilities.exp_()  # softmax - one_hot
        grad.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=grad.dtype))
        logits.copy_(grad.mul_(grad_factor).masked_fill_(~trained[:, None], 0))
    return loss


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss [N] in fp32 (fp64 for fp64 logits) of `logits` [N, V] and `labels` [N] int64, with a gradient for the logits."""
    if not is_compiled("fw_cross_entropy", logits):
        return cross_entropy_reference(logits, labels)
    return _cross_entropy(logits.contiguous(), labels.contiguous())


def cross_entropy_reference(logits: Tensor, labels: Tensor) -> Tensor:
    """`cross_entropy` in plain torch."""
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, reduction="none")


def _backward(dloss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    grad = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)  # rounded once, at the end
    cross_entropy_(grad, labels)
    return grad.mul_(dloss[:, None]).to(logits.dtype)


_cross_entropy_backward = layer_op(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor labels) -> Tensor",
    _backward,
    lambda dloss, logits, labels: torch.empty_like(logits),
)
_cross_entropy = layer_op(
    "cross_entropy(Tensor logits, Tensor labels) -> Tensor",
    lambda logits, labels: cross_entropy_(logits, labels, with_grad=False),
    lambda logits, labels: torch.empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    backward=lambda ctx, dloss: (_cross_entropy_backward(dloss, *ctx.saved_tensors), None),
)
