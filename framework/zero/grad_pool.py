"""Room for gradients on their way from backward to their sum over ranks: a few buffers that all blocks use in turn.

Gaps and padding must be zero: they are made so for the first block with a layout, and only parameters are written into the buffer. All of
it is given back between steps.
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
        self._free: dict[tuple[bool, int], list[Room]] = {}
        """By `layout.fp32` and elements."""
        self._in_use: dict[FlatBuffer, Room] = {}
        self._reducing: list[FlatBuffer] = []

    def expect(self, buffer: FlatBuffer) -> None:
        """`buffer` is going to ask; called for all of them before the first asks."""
        if buffer.layout.unit:
            self._block_numel[buffer.layout.fp32] = max(self._block_numel[buffer.layout.fp32], buffer.padded)

    def acquire(self, buffer: FlatBuffer) -> Room:
        """Room for the gradients of `buffer`, with arbitrary values where its parameters lie."""
        numel = self._block_numel[buffer.layout.fp32] if buffer.layout.unit else buffer.padded
        free = self._free.setdefault((buffer.layout.fp32, numel), [])
        if not free:
            self._finish_all_but_one(buffer.layout.fp32)
        if free:
            room = free.pop()
        else:
            room = Room(buffer.full.new_empty(numel, dtype=buffer.master_dtype))
            self._meter.add("reducing", room.flat.nbytes)
        room.lay_out(buffer)
        self._in_use[buffer] = room
        return room

    def release(self, buffer: FlatBuffer) -> None:
        room = self._in_use.pop(buffer)
        self._free[buffer.layout.fp32, room.flat.numel()].append(room)

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

    def give_back(self) -> None:
        """Free what nobody uses."""
        for free in self._free.values():
            self._meter.add("reducing", -sum(room.flat.nbytes for room in free))
            free.clear()

    def drop(self) -> None:
        """Forget everything (after an exception)."""
        self.give_back()
        self._meter.add("reducing", -sum(room.flat.nbytes for room in self._in_use.values()))
        for forgotten in (self._reducing, self._in_use):
            forgotten.clear()


class Room:
    """Gradients of a whole layout: `flat`, or the beginning of it, and views of it for the parameters."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._slots: tuple | None = None

    def lay_out(self, buffer: FlatBuffer) -> None:
        """For `buffer` from now on; nothing is to be done where the last one was like it."""
        if self._slots == buffer.extents:
            return
        self._slots = buffer.extents
        self.grads = self.flat[: buffer.padded]
        slots = buffer.layout.slots
        self.views = [self.grads[slot.offset : slot.stop].view(slot.shape) for slot in slots]
        for begin, end in zip([0, *(slot.stop for slot in slots)], [*(slot.offset for slot in slots), buffer.padded], strict=True):
            self.grads[begin:end].zero_()
