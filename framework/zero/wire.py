"""Compressed communication: what ranks send is smaller than what they compute with. Made of `Comm`'s exchanges, with its calls.

    gathers     int8   parameters as int8 in blocks of 64 with an fp32 scale each (qwZ of ZeRO++, arXiv:2306.10209)
    reductions  bf16   gradients are rounded to bf16 on the way and added in fp32
                int8   gradients as such blocks, added in fp32 (qgZ), over two groups also int8 inside and int4 across

What arrives is added in the order of the ranks, so that no result depends on timing. What a rank keeps for itself is rounded, too: all
have the same parameters, and no gradient depends on who sums it. A value that is not finite stays so: its block arrives as NaN. A group
of one sends nothing and rounds nothing.

[Note: what gathers send] At stage 3 alone. Stages 1 and 2 gather once a step, whatever the number of micro-batches, into the very buffer
that holds the rank's own parameters: little traffic would be saved, for weights as coarse as at stage 3 and masters apart from them.
Masters stay exact; the optimizer's kernel writes the blocks (`Blocks`) in the same pass, in place of the copy in the compute dtype. What
no such kernel writes (frozen parameters, parameters in host memory) is quantised when it is sent.

[Note: error feedback] What rounding left over of a gradient is added to the next one (1-bit Adam, arXiv:2102.02888), which takes 4 bytes
per trained parameter on every rank. It follows the loss scale, and is forgotten with a step whose gradients are: after an overflow or
`engine.reset()`. It is not saved: a checkpoint forgets it, in the run that goes on, too, so that this run and one that is resumed stay
the same bit for bit. What is left of a parameter that no rank uses in a step is sent, counted in the norm, and not applied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from framework.config.schema import ZeroConfig
from framework.kernels.cast import cast_
from framework.kernels.quantize import dequantize, dequantize_sum_quantize, quantize, quantized_bytes
from framework.zero.comm import Comm, Handle, put

BLOCK = 64
"""Elements that share a scale; divides `layout.ALIGN`, so that no block holds two parameters or lies on two ranks."""
TAGS = 4
"""Messages of one buffer that may be under way at a time: gather, its scales, and from `REDUCE_TAG` on reduction, its scales."""
REDUCE_TAG = 2


class Blocks(NamedTuple):
    """Values in int8 with their scales: [n], [n / BLOCK]."""

    q: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def zeros(numel: int, device: torch.device) -> Blocks:
        q = torch.zeros(numel, dtype=torch.int8, device=device)
        return Blocks(q, torch.zeros(numel // BLOCK, device=device))

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scales.nbytes

    def fill(self, values: torch.Tensor) -> None:
        quantize(values, block=BLOCK, out=self)

    def part(self, extent: slice) -> Blocks:
        """Of elements that begin with a block."""
        return Blocks(self.q[extent], self.scales[extent.start // BLOCK : -(-extent.stop // BLOCK)])


def check(zero: ZeroConfig, master_dtype: torch.dtype) -> None:
    """Raises ValueError for compression where nothing of the kind is sent, or of fp64, whose point is to be exact."""
    compressed = {"gather_compression": zero.gather_compression, "reduce_compression": zero.reduce_compression}
    for (name, value), least_stage in zip(compressed.items(), (3, 1), strict=True):
        if value != "none" and zero.stage < least_stage:
            raise ValueError(f"ZeroConfig.{name}: {value} needs ZeRO stage {least_stage} or higher; got stage {zero.stage}")
        if value != "none" and master_dtype is torch.float64:
            raise ValueError(f"ZeroConfig.{name}: got {value} with float64; expected none, or another precision")
    if zero.error_feedback and zero.reduce_compression != "int8":
        raise ValueError(f"ZeroConfig.error_feedback needs reduce_compression='int8'; got {zero.reduce_compression!r}")


def packed_bytes(numel: int, bits: int = 8) -> int:
    """Bytes of `numel` elements in whole blocks, with their scales."""
    return quantized_bytes(numel, bits) + 4 * (numel // BLOCK)


class Int8Gather:
    """`Comm.all_gather` of int8 blocks."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor | Blocks, tag: int) -> Handle:
        """Fill `out` [size * S] with what every rank's `shard` [S] is once quantised; `shard` may be this rank's part of `out`."""
        made = 0
        if isinstance(shard, torch.Tensor):
            mine = Blocks(*quantize(shard, block=BLOCK))
            made = mine.nbytes
        else:
            mine = shard
        received = Blocks.zeros(out.numel(), out.device)
        handles = [self._comm.all_gather(received.q, mine.q, tag), self._comm.all_gather(received.scales, mine.scales, tag + 1)]

        def finish() -> None:
            dequantize(*received, out.numel(), block=BLOCK, out=out)

        return Handle.joined(handles, finish, keep=(mine, received), room=made + received.nbytes)


class Bf16Reduce:
    """`Comm.reduce_scatter` of gradients rounded to bf16."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int, *, add: bool) -> Handle:
        sent = cast_(full.new_empty(full.numel(), dtype=torch.bfloat16), full)
        received = torch.empty_like(sent)
        handle = self._comm.all_to_all(received, sent, tag)

        def finish() -> None:
            parts = received.view(self._comm.size, -1)
            total = parts[0].to(out.dtype)
            for part in parts[1:]:
                total.add_(part)
            put(out, total, add)

        return Handle.joined([handle], finish, keep=(), room=sent.nbytes + received.nbytes + out.nbytes)


class Int8Reduce:
    """`Comm.reduce_scatter` of int8 blocks. `residual` [size * S] fp32: what rounding leaves over, None: it is lost."""

    def __init__(self, comm: Comm, residual: torch.Tensor | None = None) -> None:
        self._comm, self._residual = comm, residual

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int, *, add: bool) -> Handle:
        sent = Blocks(*quantize(full, block=BLOCK, error=self._residual))
        received, handles = _exchange(self._comm, sent, tag)
        room = sent.nbytes + received.nbytes + out.nbytes  # the sum, which is made when all is there
        return Handle.joined(handles, lambda: put(out, _sum(received, self._comm.size, out), add), keep=(sent, received), room=room)


class HierarchicalReduce:
    """`Comm.reduce_scatter` over groups of groups: int8 inside (the fast links), and of the sums int4 across.

    The rank that owns row `outer.rank * inner.size + inner.rank` of `full` [outer.size * inner.size * S] calls it with those two. A rank
    sends no more across than the int4 sums of its own part of the rows. `residuals`: for both hops, [size * S] and [outer.size * S].
    """

    def __init__(self, inner: Comm, outer: Comm, residuals: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        self._inner, self._outer = inner, outer
        self._residual, self._outer_residual = residuals or (None, None)

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int, *, add: bool) -> Handle:
        """The hop across begins when the one inside has been waited for."""
        made = Blocks(*quantize(full, block=BLOCK, error=self._residual))
        sent = Blocks(*(self._rows_by_inner_rank(part) for part in made))
        received, handles = _exchange(self._inner, sent, tag)

        def finish() -> None:
            parts = received.q.view(self._inner.size, -1), received.scales.view(self._inner.size, -1)
            numel = out.numel() * self._outer.size
            partial = dequantize_sum_quantize(*parts, numel, block=BLOCK, again=False, sum_dtype=torch.float32)[2]
            across = Blocks(*quantize(partial, bits=4, block=BLOCK, error=self._outer_residual))
            arrived, hop = _exchange(self._outer, across, tag)
            for handle in hop:
                handle.wait()
            put(out, _sum(arrived, self._outer.size, out, bits=4), add)

        return Handle.joined(handles, finish, keep=(sent, received), room=sent.nbytes + received.nbytes)

    def _rows_by_inner_rank(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows`, which lie by outer rank and then by inner rank, the other way round: what one peer inside gets lies together."""
        return rows.view(self._outer.size, self._inner.size, -1).transpose(0, 1).contiguous().view(-1)


def gatherer(zero: ZeroConfig, comm: Comm, integer: torch.dtype | None) -> Comm | Int8Gather:
    """How parameters are gathered; those that are an `integer` go as they are."""
    return Int8Gather(comm) if zero.gather_compression == "int8" and comm.size > 1 and integer is None else comm


def reducer(zero: ZeroConfig, comm: Comm, numel: int, device: torch.device) -> tuple[Comm | Bf16Reduce | Int8Reduce, list[torch.Tensor]]:
    """How `numel` gradients are summed, and what that keeps from one time to the next."""
    if comm.size == 1 or zero.reduce_compression == "none":
        return comm, []
    if zero.reduce_compression == "bf16":
        return Bf16Reduce(comm), []
    residuals = [torch.zeros(numel, device=device)] if zero.error_feedback else []
    return Int8Reduce(comm, *residuals), residuals


def _exchange(comm: Comm, sent: Blocks, tag: int) -> tuple[Blocks, list[Handle]]:
    received = Blocks(torch.empty_like(sent.q), torch.empty_like(sent.scales))
    return received, [comm.all_to_all(received.q, sent.q, tag), comm.all_to_all(received.scales, sent.scales, tag + 1)]


def _sum(received: Blocks, parts: int, like: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """Of `parts` ranks' values, in their order."""
    q, scales = received.q.view(parts, -1), received.scales.view(parts, -1)
    return dequantize_sum_quantize(q, scales, like.numel(), bits=bits, block=BLOCK, again=False, sum_dtype=like.dtype)[2]
