"""What the optimizers have in common: ranges of a flat shard with settings of their own, the copies that are written besides, and the
master that is kept as a bf16 copy and 16 more bits.

[Note: bf16 copies] The bf16 copy of an fp32 master is the nearest bf16 number, ties away from zero, here and in the kernels. Casts round
ties to even, which a remainder of 16 bits has no room for; one rule for all makes training the same bits however the master is kept.

The optimizers (`adamw.py`, `lion.py`, `sgd.py`) change flat tensors in place, without autograd: they neither record a graph nor raise
version counters. `reference_step` is their plain-torch loop over ranges, `Arguments` what the compiled functions are called with.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.kernels.library import KernelError, dtype_code
from framework.kernels.quantize import quantize_reference, quantized_bytes
from framework.kernels.signatures import Copies, Range

LARGEST_FUSED_BLOCK = 4096
"""FW_LARGEST_FUSED_BLOCK: most elements per scale of a quantised copy."""
CHUNK = 1 << 22
"""Elements of a master that are taken apart or put together at once, which bounds the memory for it."""


@dataclass(frozen=True, kw_only=True)
class ShardRange:
    """Elements [start, stop) of a shard, and the settings that hold for them. The bias corrections are Adam's (`adam_range`)."""

    start: int
    stop: int
    lr: float
    weight_decay: float = 0.0
    bias_correction1: float = 1.0
    bias_correction2_sqrt: float = 1.0


def adam_range(start: int, stop: int, *, lr: float, weight_decay: float, step: int, betas: tuple[float, float]) -> ShardRange:
    """A range at this optimizer step, the first of which is 1."""
    return ShardRange(
        start=start,
        stop=stop,
        lr=lr,
        weight_decay=weight_decay,
        bias_correction1=1 - betas[0] ** step,
        bias_correction2_sqrt=math.sqrt(1 - betas[1] ** step),
    )


@dataclass(frozen=True, kw_only=True)
class ShardCopies:
    """What an optimizer writes besides the master.

    `data`: the copy in the compute dtype, elements of the ranges only. `quantized`, `scales`: the block-quantised copy (`quantize.py`),
    every block that holds an element of a range; elements from the last range's stop on count as zero.
    """

    data: Tensor | None = None
    quantized: Tensor | None = None
    scales: Tensor | None = None
    bits: int = 8
    block: int = 64


# ---- the master as copy and remainder
def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 copy and int16 remainder of an fp32 tensor, which `join_master` puts together again bit for bit (NaN: as the usual NaN).

    The copy is rounded to nearest, ties away from zero: with ties to even the remainder would not fit in 16 bits. See [Note: bf16 copies].
    """
    bits = torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32))
    copy = (bits + 0x8000) >> 16
    return copy.to(torch.int16).view(torch.bfloat16), (bits - (copy << 16)).to(torch.int16)


def join_master(copy: Tensor, remainder: Tensor | None) -> Tensor:
    """The fp32 tensor that `split_master` split; without `remainder`, the copy is all there is."""
    if remainder is None:
        return copy.float()
    return ((copy.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


def join_master_(out: Tensor, copy: Tensor, remainder: Tensor | None) -> Tensor:
    """`join_master` to `out` [n], each of them in whatever memory."""
    for at in _chunks(out):
        joined = copy[at] if remainder is None else join_master(copy[at].to(remainder.device), remainder[at])
        out[at].copy_(joined, non_blocking=joined.is_cuda and out.is_pinned())
    return out


def copy_master_(copy: Tensor, master: Tensor, remainder: Tensor | None = None) -> None:
    """Write `master` [n] to `copy` in another dtype or memory, and to `remainder` what a bf16 copy lacks. See [Note: bf16 copies]."""
    if copy.dtype != torch.bfloat16 or master.dtype != torch.float32:
        copy.copy_(master)
        return
    for at in _chunks(master):
        high, low = split_master(master[at])
        copy[at].copy_(high)
        if remainder is not None:
            remainder[at].copy_(low)


def _chunks(flat: Tensor) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, flat.numel(), CHUNK)]


# ---- both ways
def check(
    master: Tensor | None,
    remainder: Tensor | None,
    states: Sequence[Tensor],
    grad: Tensor,
    copies: ShardCopies | None,
    ranges: Sequence[ShardRange],
) -> None:
    """Raises KernelError for what neither the compiled function nor the reference can do."""
    numel = grad.numel()
    if master is not None and remainder is not None:
        raise KernelError("got both master and remainder, expected one: the fp32 master, or the low 16 bits of its bf16 copy.")
    if master is None and (copies is None or copies.data is None or copies.data.dtype != torch.bfloat16):
        raise KernelError("without master there must be copies.data, the bf16 copy that has its high 16 bits.")
    if master is None and remainder is None and copies.quantized is not None:
        raise KernelError("copies.quantized is made from the master or from bf16 copy and remainder, and there is neither.")
    if remainder is not None and remainder.dtype != torch.int16:
        raise KernelError(f"remainder is {remainder.dtype}, expected torch.int16.")
    precise = torch.float32 if master is None else master.dtype
    if precise not in (torch.float32, torch.float64) or [state.dtype for state in states] != [precise] * len(states):
        found = ", ".join(str(tensor.dtype) for tensor in (master, *states) if tensor is not None)
        raise KernelError(f"got master and state in {found}, expected all in torch.float32 or all in torch.float64.")
    whole = [tensor.numel() for tensor in (master, remainder, *states, None if copies is None else copies.data) if tensor is not None]
    if whole != [numel] * len(whole):
        raise KernelError(f"got tensors of {whole} elements and a gradient of {numel}, expected the same.")
    last = 0
    for one in ranges:
        if not last <= one.start <= one.stop <= numel:
            raise KernelError(f"range [{one.start}, {one.stop}) of a shard of {numel}: ranges ascend, do not overlap and lie within it.")
        last = one.stop
    if copies is not None and copies.quantized is not None:
        if copies.scales is None:
            raise KernelError("copies.quantized needs copies.scales.")
        if copies.bits not in (4, 8) or not 0 < copies.block <= LARGEST_FUSED_BLOCK or (copies.bits == 4 and copies.block % 2):
            raise KernelError(
                f"got bits={copies.bits}, block={copies.block}, expected 8 or 4 bits and a block of 1 to {LARGEST_FUSED_BLOCK} elements, "
                "an even number for 4 bits."
            )
        n_bytes, n_scales = quantized_bytes(last, copies.bits), -(-last // copies.block)
        if copies.quantized.element_size() != 1 or copies.quantized.numel() < n_bytes or copies.scales.numel() < n_scales:
            raise KernelError(f"copies.quantized and copies.scales are too small: expected {n_bytes} bytes and {n_scales} scales.")


def named_tensors(copies: ShardCopies | None) -> dict[str, Tensor | None]:
    """For `library_for`."""
    return {} if copies is None else {"copies.data": copies.data, "copies.quantized": copies.quantized, "copies.scales": copies.scales}


class Arguments:
    """ctypes structures for copies and ranges; they must live as long as the call."""

    def __init__(self, copies: ShardCopies | None, ranges: Sequence[ShardRange]) -> None:
        rows = [(one.start, one.stop, one.lr, one.weight_decay, one.bias_correction1, one.bias_correction2_sqrt) for one in ranges]
        self.ranges = (Range * len(rows))(*rows)
        self.copies = None
        if copies is not None:
            dtype = 0 if copies.data is None else dtype_code(copies.data.dtype)
            self._struct = Copies(address(copies.data), dtype, address(copies.quantized), address(copies.scales), copies.bits, copies.block)
            self.copies = ctypes.byref(self._struct)


def factor_address(grad_factor: Tensor | None) -> int | None:
    """The address of a gradient factor. Raises KernelError if it is not one fp32 element."""
    if grad_factor is not None and (grad_factor.dtype != torch.float32 or grad_factor.numel() != 1):
        raise KernelError(f"got grad_factor {list(grad_factor.shape)} in {grad_factor.dtype}, expected one element in torch.float32.")
    return address(grad_factor)


def address(tensor: Tensor | None) -> int | None:
    """A tensor's data pointer, or None."""
    return None if tensor is None else tensor.data_ptr()


def reference_step(
    update: Callable[[ShardRange, Tensor, Tensor, list[Tensor]], Tensor],
    *,
    master: Tensor | None,
    remainder: Tensor | None,
    states: Sequence[Tensor],
    grad: Tensor,
    ranges: Sequence[ShardRange],
    copies: ShardCopies | None,
    grad_factor: Tensor | None,
) -> None:
    """`update(range, p, g, states)` returns the new parameters and changes its states, all of one range and in the master's dtype.

    A factor that is not finite leaves everything as it was; nothing waits for the device.
    """
    goes_on = None if grad_factor is None else torch.isfinite(grad_factor)

    def put(target: Tensor, value: Tensor) -> None:
        target.copy_(value if goes_on is None else torch.where(goes_on, value.to(target.dtype), target))

    for one in ranges:
        at = slice(one.start, one.stop)
        low = None if remainder is None else remainder[at]
        p = join_master(copies.data[at], low) if master is None else master[at].clone()
        g = grad[at].to(p.dtype) if grad_factor is None else grad[at].to(p.dtype) * grad_factor
        new_states = [state[at].clone() for state in states]
        p = update(one, p, g, new_states)
        for state, new_state in zip(states, new_states, strict=True):
            put(state[at], new_state)
        if master is None:
            copy, new_low = split_master(p)
            put(copies.data[at], copy)
            if low is not None:
                put(low, new_low)
        else:
            put(master[at], p)
            if copies is not None and copies.data is not None:
                is_split = copies.data.dtype == torch.bfloat16 and p.dtype == torch.float32
                put(copies.data[at], split_master(p)[0] if is_split else p)
    if copies is not None and copies.quantized is not None and ranges:
        _quantize_touched(master, remainder, copies, ranges, put)


def _quantize_touched(
    master: Tensor | None, remainder: Tensor | None, copies: ShardCopies, ranges: Sequence[ShardRange], put: Callable
) -> None:
    stop = ranges[-1].stop
    whole = master[:stop] if master is not None else join_master(copies.data[:stop], remainder[:stop])
    q, scales = quantize_reference(whole, bits=copies.bits, block=copies.block)
    per_byte = 8 // copies.bits
    for one in ranges:
        if one.start == one.stop:
            continue
        first, last = one.start // copies.block, -(-one.stop // copies.block)  # blocks
        begin, end = first * copies.block // per_byte, min(last * copies.block // per_byte, q.numel())
        put(copies.quantized.view(q.dtype)[begin:end], q[begin:end])
        put(copies.scales[first:last], scales[first:last])
