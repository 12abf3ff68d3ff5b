"""Copying between fp32, bf16 and fp16. Large results are written past the cache, which saves reading them first.

Tolerance: bit for bit the reference's, but for the payload of NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from framework.kernels.library import KernelError, dtype_code, library_for, stream_of


def cast_(dst: Tensor, src: Tensor) -> Tensor:
    """Write `src` to `dst`, rounded to nearest even; returns `dst`. Same number of elements, both contiguous, shapes do not matter."""
    if dst.numel() != src.numel():
        raise KernelError(f"got {src.numel()} elements for {dst.numel()}.")
    library = library_for("fw_cast", src=src, dst=dst)
    if library is None:
        return cast_reference_(dst, src)
    library.call("fw_cast", src.data_ptr(), dtype_code(src.dtype), dst.data_ptr(), dtype_code(dst.dtype), src.numel(), stream_of(src))
    return dst


@torch.no_grad()
def cast_reference_(dst: Tensor, src: Tensor) -> Tensor:
    """`cast_` in plain torch."""
    return dst.copy_(src.view_as(dst))
