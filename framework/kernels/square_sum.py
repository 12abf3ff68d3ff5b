"""The sum of squares of a tensor in fp64: gradient norms, and with them the check for NaN and infinities.

torch.linalg.vector_norm adds up in the tensor's own precision on the CPU, and is off by half a percent at 64M fp32 elements.

Tolerance: 1e-12 relative, for the compiled function and the reference; no overflow. The compiled result is the same bits for any number of
threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from framework.kernels.library import dtype_code, library_for, stream_of

SCRATCH_NUMEL = 2048
"""FW_SQUARE_SUM_SCRATCH: doubles."""


def square_sum(x: Tensor, *, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """sum(x^2) as a tensor of one fp64 element on x's device (`out`, or a new one). Not finite if and only if something in x is not.

    `scratch`: [2048] fp64, to be used again from call to call; only the GPU needs it.
    """
    out = torch.empty((), dtype=torch.float64, device=x.device) if out is None else out
    library = library_for("fw_square_sum", x=x)
    if library is None:
        return out.copy_(square_sum_reference(x))
    if scratch is None and library.name != "cpu":
        scratch = torch.empty(SCRATCH_NUMEL, dtype=torch.float64, device=x.device)
    at, numel = (None, 0) if scratch is None else (scratch.data_ptr(), scratch.numel())
    library.call("fw_square_sum", x.data_ptr(), dtype_code(x.dtype), x.numel(), out.data_ptr(), at, numel, stream_of(x))
    return out


@torch.no_grad()
def square_sum_reference(x: Tensor) -> Tensor:
    """`square_sum` in plain torch; the norm converts as it goes and needs no copy of x."""
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()
