"""SwiGLU's elementwise part (arXiv:2002.05202): silu(gate) * up.

Only gate and up are kept for the backward pass, which makes silu again: eager torch keeps silu(gate), too, a third more memory.

Tolerance against fp64 on the same inputs: half a unit in the last place of the dtype plus 1e-6 of |y|, of |dy up| for the gradient of
gate, of |dy gate| for that of up. The reference rounds silu(gate) to the dtype before it multiplies, and is up to 2 units off.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.kernels.layer_op import is_compiled, layer_op
from framework.kernels.library import dtype_code, library_for, stream_of


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate / (1 + exp(-gate)) * up; `up` like `gate`, any shape."""
    if not is_compiled("fw_swiglu_forward", gate, up) or gate.shape != up.shape:
        return swiglu_reference(gate, up)
    return _swiglu(gate.contiguous(), up.contiguous())


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` in plain torch."""
    return F.silu(gate) * up


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    library = library_for("fw_swiglu_forward", gate=gate, up=up)
    if library is None:
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)
    y = torch.empty_like(gate)
    library.call("fw_swiglu_forward", gate.data_ptr(), up.data_ptr(), y.data_ptr(), gate.numel(), dtype_code(gate.dtype), stream_of(gate))
    return y


def _backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dy = dy.contiguous()
    library = library_for("fw_swiglu_backward", dy=dy, gate=gate, up=up)
    if library is None:
        d, g = dy.float(), gate.float()
        s = g.sigmoid()
        return (d * up.float() * (s + g * s * (1 - s))).to(gate.dtype), (d * g * s).to(up.dtype)
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    addresses = (tensor.data_ptr() for tensor in (dy, gate, up, dgate, dup))
    library.call("fw_swiglu_backward", *addresses, gate.numel(), dtype_code(gate.dtype), stream_of(gate))
    return dgate, dup


_swiglu_backward = layer_op(
    "swiglu_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    _backward,
    lambda dy, gate, up: (torch.empty_like(gate), torch.empty_like(up)),
)
_swiglu = layer_op(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    _forward,
    lambda gate, up: torch.empty_like(gate),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    backward=lambda ctx, dy: _swiglu_backward(dy, *ctx.saved_tensors),
)
