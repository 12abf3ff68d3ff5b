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

from framework.config.schema import MasterWeights, ZeroConfig
from framework.kernels.cast import cast_
from framework.kernels.quantize import dequantize, dequantize_sum_quantize, quantize, quantized_bytes
from framework.zero.comm import Comm, Handle, put
from framework.zero.grid import Place
from framework.zero.groups import Route
from framework.zero.layout import Layout
from framework.zero.policy import FULL, WORLD, Policy

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


def check(zero: ZeroConfig, master_dtype: torch.dtype, master_weights: MasterWeights) -> None:
    """Raises ValueError for compression where nothing of the kind is sent, or of fp64, whose point is to be exact."""
    compressed = {"gather_compression": zero.gather_compression, "reduce_compression": zero.reduce_compression}
    for (name, value), least_stage in zip(compressed.items(), (3, 1), strict=True):
        if value != "none" and zero.stage < least_stage:
            raise ValueError(f"ZeroConfig.{name}: {value} needs ZeRO stage {least_stage} or higher; got stage {zero.stage}")
        if value != "none" and master_dtype is torch.float64:
            raise ValueError(f"ZeroConfig.{name}: got {value} with float64; expected none, or another precision")
    if zero.gather_compression != "none" and (zero.secondary_shard_size or zero.shard_optimizer == "world"):
        raise ValueError("ZeroConfig.gather_compression is not for secondary_shard_size and shard_optimizer='world'")
    if zero.gather_compression != "none" and master_weights != "full":
        raise ValueError(f"ZeroConfig.gather_compression needs fp32 masters; got PrecisionConfig.master_weights={master_weights!r}")
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
        handle = self._comm.exchange(received, sent, tag)

        def finish() -> None:
            parts = received.view(self._comm.size, -1)
            total = parts[0].to(out.dtype)
            for part in parts[1:]:
                total.add_(part)
            put(out, total, add)

        return Handle.joined([handle], finish, keep=(), room=sent.nbytes + received.nbytes + out.nbytes)


class BlockReduce:
    """`Comm.reduce_scatter` of blocks of `bits` bits. `residual` [size * S] fp32: what rounding leaves over, None: it is lost."""

    def __init__(self, comm: Comm, residual: torch.Tensor | None = None, bits: int = 8) -> None:
        self._comm, self._residual, self._bits = comm, residual, bits

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int, *, add: bool) -> Handle:
        comm, bits = self._comm, self._bits
        sent = Blocks(*quantize(full, bits=bits, block=BLOCK, error=self._residual))
        received = Blocks(torch.empty_like(sent.q), torch.empty_like(sent.scales))
        handles = [comm.exchange(received.q, sent.q, tag), comm.exchange(received.scales, sent.scales, tag + 1)]

        def finish() -> None:
            parts = received.q.view(comm.size, -1), received.scales.view(comm.size, -1)
            total = dequantize_sum_quantize(*parts, out.numel(), bits=bits, block=BLOCK, again=False, sum_dtype=out.dtype)[2]
            put(out, total, add)

        return Handle.joined(handles, finish, keep=(sent, received), room=sent.nbytes + received.nbytes + out.nbytes)


class HierarchicalReduce:
    """`Comm.reduce_scatter` over groups of groups: int8 inside (the fast links), and of the sums int4 across.

    The rank that owns row `inner.rank * outer.size + outer.rank` of `full` [inner.size * outer.size * S] calls it with those two, so that
    what a peer inside adds up lies together. `residuals`: of both hops, [inner.size * outer.size * S] and [outer.size * S].
    """

    def __init__(self, inner: Comm, outer: Comm, residuals: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        inside, across = residuals or (None, None)
        self._inner, self._outer, self._parts = BlockReduce(inner, inside), BlockReduce(outer, across, bits=4), outer.size

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int, *, add: bool) -> Handle:
        """The hop across begins when the one inside has been waited for."""
        chunk = out.new_empty(self._parts * out.numel())
        first = self._inner.reduce_scatter(full, chunk, tag, add=False)
        handle = first.then(lambda: self._outer.reduce_scatter(chunk, out, tag, add=add))
        handle.room += chunk.nbytes
        return handle


def gatherer(zero: ZeroConfig, policy: Policy, route: Route, layout: Layout) -> Route | Int8Gather:
    """How parameters are gathered at stage 3; integers and those that compute in fp32 go as they are."""
    sends = policy.params_at_rest is not FULL and route.inside.size > 1 and layout.integer is None and not layout.fp32
    return Int8Gather(route.inside) if zero.gather_compression == "int8" and sends else route


Reducer = Comm | Bf16Reduce | BlockReduce | HierarchicalReduce


def reducer(zero: ZeroConfig, route: Route, numel: int, *, nested: bool, device: torch.device) -> tuple[Reducer, list[torch.Tensor]]:
    """How `numel` gradients are summed inside a shard group, and what that keeps from one time to the next. `nested`: the result is
    sharded over the groups, too; then int8 does both."""
    inside, across = route.inside, route.across
    if inside.size == 1 or zero.reduce_compression == "none":
        return inside, []
    if zero.reduce_compression == "bf16":
        return Bf16Reduce(inside), []
    hops = [numel, numel // inside.size] if nested else [numel]
    residuals = [torch.zeros(hop, device=device) for hop in hops if zero.error_feedback]
    if nested:
        return HierarchicalReduce(inside, across, tuple(residuals) or None), residuals
    return BlockReduce(inside, *residuals), residuals


def gather_room(zero: ZeroConfig, layout: Layout, place: Place, *, kept_in_blocks: bool) -> int:
    """Bytes that a gather under way holds besides its result: the blocks of all ranks, and its own where they are made for it."""
    if not gathers_in_blocks(zero, layout, place):
        return 0
    return packed_bytes(place.extents.padded) + (0 if kept_in_blocks else packed_bytes(place.extents.shard_numel))


def gathers_in_blocks(zero: ZeroConfig, layout: Layout, place: Place) -> bool:
    """Whether `gatherer` compresses."""
    sends = place.policy.params_at_rest is not FULL and place.grid.members > 1 and layout.integer is None and not layout.fp32
    return zero.gather_compression == "int8" and sends


def reduce_room(zero: ZeroConfig, place: Place, itemsize: int, *, messages: bool, adds: bool) -> int:
    """Bytes that a reduction under way holds besides its input and output. `itemsize`: of gradients."""
    if zero.reduce_compression == "none" or place.grid.members == 1:
        return itemsize * place.received_numel(messages=messages, adds=adds)
    extents = place.extents
    packed = packed_bytes if zero.reduce_compression == "int8" else lambda numel: 2 * numel
    room = 2 * packed(extents.padded) + itemsize * extents.chunk_numel  # what is sent, as much that is received, and the sum
    if place.in_parts and place.policy.grads is WORLD and zero.reduce_compression == "int8":
        return room + itemsize * extents.chunk_numel
    return max(room, itemsize * place.across_numel(messages=messages, adds=adds))


def residual_bytes(zero: ZeroConfig, place: Place) -> int:
    """Of error feedback."""
    if not zero.error_feedback or place.grid.members == 1:
        return 0
    nested = place.in_parts and place.policy.grads is WORLD
    return 4 * (place.extents.padded + (place.extents.chunk_numel if nested else 0))
