"""NF4, the 4-bit format of QLoRA (arXiv:2305.14314): sixteen quantiles of a normal distribution, scaled by a block's largest magnitude.

Packed as bitsandbytes does, so that its checkpoints can be read: element 2i in the HIGH nibble of byte i (the int4 of `quantize.py` has it
in the low one). Quantising is done once, when weights are loaded, and in plain torch; dequantising is done in every forward.

Tolerance: the compiled result is the reference's bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from framework.kernels.library import KernelError, dtype_code, library_for, stream_of

TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@torch.no_grad()
def nf4_quantize(x: Tensor, *, block: int = 64) -> tuple[Tensor, Tensor]:
    """uint8 [(n + 1) // 2] and absmax [ceil(n / block)] fp32 of a tensor taken as flat. `block` is even."""
    _check_block(block)
    numel = x.numel()
    v = torch.nn.functional.pad(x.flatten().float(), (0, -numel % block)).view(-1, block)
    absmax = v.abs().amax(dim=1)
    table = torch.tensor(TABLE, device=x.device)
    between = (table[1:] + table[:-1]) / 2
    index = torch.bucketize(v / torch.where(absmax > 0, absmax, 1)[:, None], between).to(torch.uint8).flatten()[:numel]
    pairs = torch.nn.functional.pad(index, (0, numel % 2)).view(-1, 2)
    return (pairs[:, 0] << 4) | pairs[:, 1], absmax


def nf4_dequantize(
    q: Tensor, absmax: Tensor, numel: int, *, block: int = 64, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """[numel] in `dtype` (or `out`, of any shape): table[nibble] * absmax[i // block], rounded once."""
    _check_block(block)
    if (q.nbytes, absmax.numel()) != ((numel + 1) // 2, -(-numel // block)) or absmax.dtype != torch.float32:
        found = f"{q.nbytes} bytes and {absmax.numel()} scales in {absmax.dtype}"
        raise KernelError(f"got {found}, which do not fit {numel} elements in blocks of {block} with scales in torch.float32.")
    if out is not None and out.numel() != numel:
        raise KernelError(f"got out of {out.numel()} elements, expected {numel}.")
    out = torch.empty(numel, dtype=dtype, device=q.device) if out is None else out
    library = library_for("fw_nf4_dequantize", q=q, absmax=absmax, out=out)
    if library is None:
        return out.copy_(nf4_dequantize_reference(q, absmax, numel, block=block).view_as(out))
    library.call("fw_nf4_dequantize", q.data_ptr(), absmax.data_ptr(), numel, block, out.data_ptr(), dtype_code(out.dtype), stream_of(q))
    return out


@torch.no_grad()
def nf4_dequantize_reference(q: Tensor, absmax: Tensor, numel: int, *, block: int = 64) -> Tensor:
    """`nf4_dequantize` in plain torch, fp32."""
    index = torch.stack((q >> 4, q & 15), dim=-1).flatten()[:numel]
    return torch.tensor(TABLE, device=q.device)[index.long()] * absmax.repeat_interleave(block)[:numel]


def _check_block(block: int) -> None:
    if block < 2 or block % 2:
        raise KernelError(f"got block={block}, expected an even number: two elements share a byte.")
