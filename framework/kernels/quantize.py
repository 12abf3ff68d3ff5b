"""Symmetric block quantisation to 8 or 4 bits and back, with error feedback, and the step of a quantised reduce.

A tensor is taken as flat; every `block` elements (the last block may be shorter) share a scale, max|v| / 127 for 8 bits or / 7 for 4.
8 bits: int8 [n]. 4 bits: uint8 [(n + 1) // 2], two's complement nibbles, element 2i in the low one of byte i; block must be even.

Error feedback (1-bit Adam, arXiv:2102.02888): `error` [n] fp32 is added before, and what rounding left over is kept in it.

Unusual: a block with a NaN or an infinity gets scale NaN and zeros, so that NaN comes out of it at the other end, and its error stays as
it was. A block whose scale would be an fp32 denormal counts as zero.

Tolerance, compiled against reference: q and scales without error feedback bit for bit; sums and residuals within 1 ulp of their largest
term (a product and a sum are rounded once where the reference rounds twice), so that q may differ by 1 where a sum lies between two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from framework.kernels.library import KernelError, dtype_code, library_for, stream_of

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
LARGEST_FUSED_BLOCK = 4096
"""FW_LARGEST_FUSED_BLOCK: most elements per scale of a sum that is quantised again."""


def quantized_bytes(numel: int, bits: int) -> int:
    """Bytes that `numel` quantised elements take."""
    return numel if bits == 8 else (numel + 1) // 2


def quantize(
    x: Tensor, *, bits: int = 8, block: int = 64, error: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """q and scales of `x`, written to `out` if given; `error` is read and written."""
    _check_format(bits, block)
    q, scales = out or _empty(x.numel(), bits, block, x.device)
    _check_quantized(q, scales, x.numel(), bits, block)
    if error is not None and (error.dtype != torch.float32 or error.numel() != x.numel()):
        raise KernelError(f"got error [{error.numel()}] in {error.dtype}, expected [{x.numel()}] in torch.float32.")
    library = library_for("fw_quantize", x=x, q=q, scales=scales, error=error)
    if library is None:
        new_q, new_scales = quantize_reference(x, bits=bits, block=block, error=error)
        q.copy_(new_q)
        scales.copy_(new_scales)
        return q, scales
    residual = None if error is None else error.data_ptr()
    library.call(
        "fw_quantize", x.data_ptr(), dtype_code(x.dtype), x.numel(), bits, block, q.data_ptr(), scales.data_ptr(), residual, stream_of(x)
    )
    return q, scales


@torch.no_grad()
def quantize_reference(x: Tensor, *, bits: int = 8, block: int = 64, error: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`quantize` in plain torch."""
    _check_format(bits, block)
    numel, limit = x.numel(), 127 if bits == 8 else 7
    if numel == 0:
        return _empty(0, bits, block, x.device)
    values = x.flatten().float()
    if error is not None:
        values = values + error.flatten()
    v = torch.nn.functional.pad(values, (0, -numel % block)).view(-1, block)
    scales = v.abs().amax(dim=1) / limit
    broken = ~v.isfinite().all(dim=1)
    scales = torch.where(scales < SMALLEST_NORMAL, 0, scales)
    inverse = torch.where((scales > 0) & ~broken, 1 / scales, 0)
    q = torch.where(broken[:, None], 0, torch.round(v * inverse[:, None]))
    if error is not None:
        left = torch.where(broken[:, None].expand_as(v).flatten()[:numel], error.flatten(), (v - q * scales[:, None]).flatten()[:numel])
        error.copy_(left.view_as(error))
    scales = torch.where(broken, float("nan"), scales)
    q = q.to(torch.int8).flatten()[:numel]
    return (q if bits == 8 else _pack(q)), scales


def dequantize(
    q: Tensor,
    scales: Tensor,
    numel: int,
    *,
    bits: int = 8,
    block: int = 64,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """q * scale, [numel] in `dtype`; with `out` written there, or added to it (in fp32, rounded once)."""
    _check_format(bits, block)
    _check_quantized(q, scales, numel, bits, block)
    if out is not None and out.numel() != numel:
        raise KernelError(f"got out of {out.numel()} elements, expected {numel}.")
    if add and out is None:
        raise KernelError("add=True needs out, the tensor to add to.")
    out = torch.empty(numel, dtype=dtype, device=q.device) if out is None else out
    library = library_for("fw_dequantize", q=q, scales=scales, out=out)
    if library is None:
        value = dequantize_reference(q, scales, numel, bits=bits, block=block).view_as(out)
        return out.copy_(out.float() + value if add else value)
    library.call(
        "fw_dequantize", q.data_ptr(), bits, scales.data_ptr(), numel, block, out.data_ptr(), dtype_code(out.dtype), add, stream_of(q)
    )
    return out


@torch.no_grad()
def dequantize_reference(q: Tensor, scales: Tensor, numel: int, *, bits: int = 8, block: int = 64) -> Tensor:
    """`dequantize` in plain torch, fp32."""
    values = (q if bits == 8 else _unpack(q, numel)).float()
    return values * scales.repeat_interleave(block)[:numel]


def dequantize_sum_quantize(
    q: Tensor, scales: Tensor, numel: int, *, bits: int = 8, block: int = 64, again: bool = True, sum_dtype: torch.dtype | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Sum over the first dimension of q [parts, bytes] and scales [parts, blocks]: quantised `again`, and in `sum_dtype` if that is given.

    Returns (q, scales, sum) with None for what was not asked for. The sum is in fp32, the first part first.
    """
    _check_format(bits, block)
    parts = q.shape[0]
    _check_quantized(q[0], scales[0], numel, bits, block)
    if again and block > LARGEST_FUSED_BLOCK:
        raise KernelError(f"got block={block}, expected at most {LARGEST_FUSED_BLOCK} elements where a sum is quantised again.")
    library = library_for("fw_dequantize_sum_quantize", q=q, scales=scales)
    if library is None:
        return dequantize_sum_quantize_reference(q, scales, numel, bits=bits, block=block, again=again, sum_dtype=sum_dtype)
    q_out, scales_out = _empty(numel, bits, block, q.device) if again else (None, None)
    total = None if sum_dtype is None else torch.empty(numel, dtype=sum_dtype, device=q.device)
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in (q_out, scales_out, total)]
    code = 0 if total is None else dtype_code(total.dtype)
    stream = stream_of(q)
    library.call("fw_dequantize_sum_quantize", q.data_ptr(), scales.data_ptr(), parts, numel, bits, block, *addresses, code, stream)
    return q_out, scales_out, total


@torch.no_grad()
def dequantize_sum_quantize_reference(
    q: Tensor, scales: Tensor, numel: int, *, bits: int = 8, block: int = 64, again: bool = True, sum_dtype: torch.dtype | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`dequantize_sum_quantize` in plain torch."""
    total = dequantize_reference(q[0], scales[0], numel, bits=bits, block=block)
    for part in range(1, q.shape[0]):
        total += dequantize_reference(q[part], scales[part], numel, bits=bits, block=block)
    q_out, scales_out = quantize_reference(total, bits=bits, block=block) if again else (None, None)
    return q_out, scales_out, None if sum_dtype is None else total.to(sum_dtype)


def _empty(numel: int, bits: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    dtype = torch.int8 if bits == 8 else torch.uint8
    q = torch.empty(quantized_bytes(numel, bits), dtype=dtype, device=device)
    return q, torch.empty(-(-numel // block), dtype=torch.float32, device=device)


def _pack(q: Tensor) -> Tensor:
    pairs = torch.nn.functional.pad(q, (0, q.numel() % 2)).view(-1, 2)
    return ((pairs[:, 0] & 15) | (pairs[:, 1] << 4)).view(torch.uint8)


def _unpack(packed: Tensor, numel: int) -> Tensor:
    signed = packed.view(torch.int8)
    return torch.stack(((signed << 4) >> 4, signed >> 4), dim=-1).flatten()[:numel]


def _check_format(bits: int, block: int) -> None:
    if bits not in (4, 8) or block < 1 or (bits == 4 and block % 2):
        raise KernelError(f"got bits={bits}, block={block}, expected 8 or 4 bits and a block of at least 1, an even number for 4 bits.")


def _check_quantized(q: Tensor, scales: Tensor, numel: int, bits: int, block: int) -> None:
    wanted = quantized_bytes(numel, bits), -(-numel // block)
    if (q.nbytes, scales.numel()) != wanted or scales.dtype != torch.float32:
        found = f"{q.nbytes} quantised bytes and {scales.numel()} scales in {scales.dtype}"
        raise KernelError(f"got {found} for {numel} elements, expected {wanted[0]} and {wanted[1]} in torch.float32.")
