"""RMSNorm (arXiv:1910.07467) over the last dimension, alone or fused with the residual addition before it.

y = s * rstd * weight,  rstd = 1 / sqrt(mean(s^2) + eps),  s = x or x + residual (rounded to the dtype first). Statistics and sums are fp32.

Tolerance against fp64 on the same inputs: y and the gradient of x within half a unit in the last place of their dtype plus 2e-6 of the
largest element, the gradient of the weight within 1e-5 of its norm. Compiled sums have a fixed order: the same inputs give the same bits.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.kernels.layer_op import is_compiled, layer_op
from framework.kernels.library import dtype_code, library_for, stream_of


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y like `x` [..., cols]; `weight` [cols]."""
    if not is_compiled("fw_rms_norm_forward", x, weight) or weight.shape != x.shape[-1:]:
        return rms_norm_reference(x, weight, eps)
    return _rms_norm(x.contiguous(), weight.contiguous(), eps)[0]


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in plain torch."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, x + residual): the norm of a sum, and the sum itself for the residual path. `residual` like `x`."""
    if not is_compiled("fw_rms_norm_forward", x, residual, weight) or x.shape != residual.shape or weight.shape != x.shape[-1:]:
        return add_rms_norm_reference(x, residual, weight, eps)
    y, total, _ = _add_rms_norm(x.contiguous(), residual.contiguous(), weight.contiguous(), eps)
    return y, total


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in plain torch."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


# ---- forward
def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None, Tensor]:
    cols = x.shape[-1]
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    library = library_for("fw_rms_norm_forward", x=x, residual=residual, weight=weight)
    if library is None:
        total = None if residual is None else x + residual
        summed = (x if total is None else total).float()
        rstd = (summed.square().mean(-1) + eps).rsqrt()
        return (summed * rstd[..., None] * weight.float()).to(x.dtype), total, rstd
    y, total = torch.empty_like(x), None if residual is None else torch.empty_like(x)
    added, out = (None, None) if residual is None else (residual.data_ptr(), total.data_ptr())
    library.call(
        "fw_rms_norm_forward",
        *(x.data_ptr(), added, weight.data_ptr(), y.data_ptr(), out, rstd.data_ptr()),
        *(rstd.numel(), cols, eps, dtype_code(x.dtype), stream_of(x)),
    )
    return y, total, rstd


def _rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, _, rstd = _forward(x, None, weight, eps)
    return y, rstd


def _rstd_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


# ---- backward
def _backward(dy: Tensor, dsum: Tensor | None, summed: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    cols, rows = summed.shape[-1], rstd.numel()
    dy, dsum = dy.contiguous(), None if dsum is None else dsum.contiguous()
    library = library_for("fw_rms_norm_backward", dy=dy, dsum=dsum, x=summed, weight=weight, rstd=rstd)
    if library is None:
        s, d, factor = summed.float(), dy.float(), rstd[..., None]
        dx = d * weight.float() * factor - s * factor**3 * (d * weight.float() * s).mean(-1, keepdim=True)
        dx = dx if dsum is None else dx + dsum.float()
        return dx.to(summed.dtype), (d * s * factor).reshape(-1, cols).sum(0).to(weight.dtype)
    dx, dweight = torch.empty_like(summed), torch.empty(cols, dtype=torch.float32, device=dy.device)
    partial = torch.empty(max(1, min(rows, _partial_rows(dy.device))), cols, dtype=torch.float32, device=dy.device)
    library.call(
        "fw_rms_norm_backward",
        *(dy.data_ptr(), None if dsum is None else dsum.data_ptr(), summed.data_ptr(), weight.data_ptr(), rstd.data_ptr()),
        *(dx.data_ptr(), dweight.data_ptr(), partial.data_ptr(), partial.shape[0], rows, cols, dtype_code(dy.dtype), stream_of(dy)),
    )
    return dx, dweight.to(weight.dtype)


@functools.lru_cache
def _partial_rows(device: torch.device) -> int:
    """Partial sums of the weight's gradient: some per multiprocessor, so that all of them are busy."""
    return 3 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


_rms_norm_backward = layer_op(
    "rms_norm_backward(Tensor dy, Tensor? dsum, Tensor summed, Tensor weight, Tensor rstd) -> (Tensor, Tensor)",
    _backward,
    lambda dy, dsum, summed, weight, rstd: (torch.empty_like(summed), torch.empty_like(weight)),
)


def _save(ctx, inputs: tuple, output: tuple) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _rms_norm_gradients(ctx, dy: Tensor | None, _: Tensor | None) -> tuple:
    if dy is None:
        return None, None, None
    return *_rms_norm_backward(dy, None, *ctx.saved_tensors), None


def _save_sum(ctx, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(output[1], inputs[2], output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _add_rms_norm_gradients(ctx, dy: Tensor | None, dsum: Tensor | None, _: Tensor | None) -> tuple:
    if dy is None:
        return dsum, dsum, None, None
    dx, dweight = _rms_norm_backward(dy, dsum, *ctx.saved_tensors)
    return dx, dx, dweight, None


_rms_norm = layer_op(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _rms_norm_forward,
    lambda x, weight, eps: (torch.empty_like(x), _rstd_like(x)),
    setup_context=_save,
    backward=_rms_norm_gradients,
)
_add_rms_norm = layer_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    _forward,
    lambda x, residual, weight, eps: (torch.empty_like(x), torch.empty_like(x), _rstd_like(x)),
    setup_context=_save_sum,
    backward=_add_rms_norm_gradients,
)
