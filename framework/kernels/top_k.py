"""Top-k activation sparsity (Q-Sparse, arXiv:2407.10969): of each row only the k entries that are largest in absolute value remain.

Tolerance: none. Of entries that are equal in absolute value those with the lower index are kept, so exactly k remain. NaN counts as
largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from framework.kernels.layer_op import is_compiled, layer_op
from framework.kernels.library import KernelError, dtype_code, library_for, stream_of


def top_k(x: Tensor, k: int, *, straight_through: bool = False) -> Tensor:
    """`x` [..., cols] with all but the k largest |x| of each row 0; 1 <= k <= cols.

    The gradient passes where the output is not 0, or everywhere with `straight_through`, as in the paper: what is off still learns.
    """
    if not 1 <= k <= x.shape[-1]:
        raise KernelError(f"top_k: got k={k}, expected 1 to {x.shape[-1]}, the row's length.")
    if not is_compiled("fw_top_k", x):
        return top_k_reference(x, k, straight_through=straight_through)
    return _top_k(x.contiguous(), k, straight_through)


def top_k_reference(x: Tensor, k: int, *, straight_through: bool = False) -> Tensor:
    """`top_k` in plain torch."""
    y = torch.where(_kept(x, k), x, 0)
    return x + (y - x).detach() if straight_through else y


def _kept(x: Tensor, k: int) -> Tensor:
    """Which entries remain: a stable sort keeps the lower index first among equals."""
    order = torch.sort(x.detach().abs().nan_to_num(nan=float("inf")), dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, order, True)


def _forward(x: Tensor, k: int, straight_through: bool) -> Tensor:
    library = library_for("fw_top_k", x=x)
    if library is None:
        return torch.where(_kept(x, k), x, 0)
    y, cols = torch.empty_like(x), x.shape[-1]
    library.call("fw_top_k", x.data_ptr(), y.data_ptr(), x.numel() // cols, cols, k, dtype_code(x.dtype), stream_of(x))
    return y


def _save(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.straight_through = inputs[2]
    ctx.save_for_backward(*(() if ctx.straight_through else (output,)))


def _gradients(ctx, dy: Tensor) -> tuple:
    return (dy.clone() if ctx.straight_through else torch.where(ctx.saved_tensors[0] != 0, dy, 0)), None, None


_top_k = layer_op(
    "top_k(Tensor x, int k, bool straight_through) -> Tensor",
    _forward,
    lambda x, k, straight_through: torch.empty_like(x),
    setup_context=_save,
    backward=_gradients,
)
