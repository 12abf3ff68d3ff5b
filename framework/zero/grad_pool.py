"""Room for gradients on their way from backward to their sum over ranks: a few buffers that all blocks use in turn.

Gaps and padding must be zero: they are when a buffer is made, only parameters are written into it, and it is zeroed when a block with
another layout takes it over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from framework.zero.memory import MemoryMeter

if TYPE_CHECKING:
    from framework.zero.buffer import FlatBuffer


class GradPool:
    """Each as large as the largest block's; the root has its own. Two reductions are under way at most; the next waits for the older."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self._block_numel = {False: 0, True: 0}
        """By `layout.fp32`."""
        self._free: dict[tuple[bool, int], list[tuple[torch.Tensor, tuple]]] = {}
        """By `layout.fp32` and elements: (buffer, extents of the layout that it was last used for)."""
        self._in_use: dict[FlatBuffer, torch.Tensor] = {}
        self._reducing: list[FlatBuffer] = []

    def expect(self, buffer: FlatBuffer) -> None:
        """`buffer` is going to ask; called for all of them before the first asks."""
        if buffer.layout.unit:
            self._block_numel[buffer.layout.fp32] = max(self._block_numel[buffer.layout.fp32], buffer.padded)

    def acquire(self, buffer: FlatBuffer) -> torch.Tensor:
        """Room for the gradients of `buffer` [S * N], with arbitrary values where its parameters lie."""
        numel = self._block_numel[buffer.layout.fp32] if buffer.layout.unit else buffer.padded
        free = self._free.setdefault((buffer.layout.fp32, numel), [])
        if not free:
            self._finish_all_but_one(buffer.layout.fp32)
        if free:
            flat, extents = free.pop()
        else:
            flat, extents = buffer.full.new_zeros(numel, dtype=buffer.master_dtype), buffer.extents
            self._meter.add("reducing", flat.nbytes)
        grads = flat[: buffer.padded]
        if extents != buffer.extents:
            grads.zero_()
        self._in_use[buffer] = flat
        return grads

    def release(self, buffer: FlatBuffer) -> None:
        flat = self._in_use.pop(buffer)
        self._free[buffer.layout.fp32, flat.numel()].append((flat, buffer.extents))

    def started(self, buffer: FlatBuffer) -> None:
        """`buffer`'s reduction is under way."""
        self._finish_all_but_one(buffer.layout.fp32)
        self._reducing.append(buffer)

    def _finish_all_but_one(self, fp32: bool) -> None:
        """Wait for the reductions of one kind, oldest first, until the newest is left."""
        for older in [buffer for buffer in self._reducing if buffer.layout.fp32 is fp32][:-1]:
            self._reducing.remove(older)
            older.finish_reduce()

    def finish(self) -> None:
        """Wait for the reductions under way."""
        while self._reducing:
            self._reducing.pop(0).finish_reduce()

    def drop(self) -> None:
        """Forget everything (after an exception)."""
        for flat in (*self._in_use.values(), *(flat for free in self._free.values() for flat, _ in free)):
            self._meter.add("reducing", -flat.nbytes)
        for forgotten in (self._reducing, self._in_use, self._free):
            forgotten.clear()
