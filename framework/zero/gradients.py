"""The gradients of a flat buffer: from the parameters into room that blocks share, summed over ranks and micro-batches, to the update.

`buffer.py` says what the tensors are; this half of `FlatBuffer` stands in a file of its own. Where a sum over all ranks is made in two
hops, the second one waits for the first.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from torch import nn

from framework.config.schema import ZeroConfig
from framework.zero import wire
from framework.zero.comm import Handle
from framework.zero.grad_pool import GradPool, Room
from framework.zero.grid import Extents
from framework.zero.groups import Route
from framework.zero.layout import Layout
from framework.zero.memory import MemoryMeter
from framework.zero.policy import FULL, GROUP, WORLD, Policy


class Gradients:
    """What `FlatBuffer` inherits."""

    if TYPE_CHECKING:  # of the other half
        layout: Layout
        policy: Policy
        meter: MemoryMeter
        pool: GradPool
        parameters: list[nn.Parameter]
        full: torch.Tensor
        master_dtype: torch.dtype
        padded: int
        readable: bool
        gather_tag: int
        updating: Future | None
        _extents: Extents
        _in_parts: bool
        _part: slice
        _reduce_route: Route

        def finish_update(self) -> None: ...

    def _init_gradients(self, zero: ZeroConfig, device: torch.device) -> None:
        self._grad: torch.Tensor | None = None
        self.grad_full: torch.Tensor | None = None
        self._grad_chunk: torch.Tensor | None = None
        self._grad_views: list[torch.Tensor] = []
        """Of `grad_full`, in the shapes of the parameters."""
        self.written: set[int] = set()
        """Slots that hold a gradient in `grad_full`."""
        self.used: set[int] = set()
        """Slots that got a gradient on this rank in the current step."""
        self._summed = False
        """Whether `grad_chunk` or `grad` holds sums of this step, to which those of the next micro-batch are added."""
        self._reduced = False
        """Whether `grad` holds sums of this step that were made in place, over all ranks."""
        self._carry: torch.Tensor | None = None
        self._reducing: Handle | None = None
        self._received_bytes = 0
        self.residuals: list[torch.Tensor] = []
        """What compression left over of earlier gradients, see `wire` [Note: error feedback]."""
        if self.layout.requires_grad:
            nested = self._in_parts and self.policy.grads is WORLD
            self._reducer, self.residuals = wire.reducer(zero, self._reduce_route, self.padded, nested=nested, device=device)
            self._sums_all = isinstance(self._reducer, wire.HierarchicalReduce)
            """Whether it sums over the groups, too."""
            self.meter.add("residual", sum(residual.nbytes for residual in self.residuals))
            if self.policy.grads is FULL:
                room = Room(torch.zeros(self.padded, dtype=self.master_dtype, device=device))
                room.lay_out(self)
                self.grad_full, self._grad_views = room.grads, room.views
                self._grad = self.grad_full[self._extents.shard]
                self.meter.add("grads", self.grad_full.nbytes)
            else:
                self.pool.expect(self)

    @property
    def grad(self) -> torch.Tensor:
        """[S]; zeros where nothing was reduced since the last step. One of its own exists from the first reduction of a step until the
        update has read it."""
        if self._grad is None:
            self._make_grad().zero_()
        return self._grad

    def _make_grad(self) -> torch.Tensor:
        """Room for what stays of the gradients between micro-batches."""
        held = self.full.new_empty(self._extents.numel(self.policy.grads), dtype=self.master_dtype)
        self.meter.add("grads", held.nbytes)
        self._grad_chunk = held if self.policy.grads is GROUP else None
        self._grad = held[self._part] if self.policy.grads is GROUP else held
        return held

    def _free_grad(self) -> None:
        if self.policy.grads is not FULL and self._grad is not None:
            self.meter.add("grads", -(self._grad if self._grad_chunk is None else self._grad_chunk).nbytes)
            self._grad = self._grad_chunk = None

    def take_grad(self, index: int, *, by_hand: bool) -> None:
        """Move the gradient that backward left in parameter `index` into the flat buffer; None there means that a kernel wrote nothing.
        `by_hand`: in a manual step, where the parameters may be released by then."""
        parameter = self.parameters[index]
        grad = parameter.grad
        if grad is None:
            return
        if not by_hand and not self.readable:
            slot = self.layout.slots[index]
            raise RuntimeError(
                f"{slot.name} was used outside of the forward of {self.layout.unit or 'the model'}, where its values are not there: "
                "use it in that forward, or make the method that uses it an entry with engine.wrap_method(...)"
            )
        self._make_room()
        if grad.is_sparse:
            grad = grad.to_dense()
        target = self._grad_views[index]
        target.add_(grad) if index in self.written else target.copy_(grad)
        self.written.add(index)
        self.used.add(index)
        parameter.grad = None

    def _forget_grad_full(self) -> None:
        self.grad_full, self._grad_views = None, []

    def _make_room(self) -> None:
        """For gradients in `grad_full`. Sums of this step that were made in place are set aside: they must not be added up twice."""
        self.finish_update()  # of a buffer that this step has not gathered: the update reads the gradients
        if self.grad_full is None:
            room = self.pool.acquire(self)
            self.grad_full, self._grad_views = room.grads, room.views
        if self._reduced and self._carry is None:
            self._carry = self.grad.clone()
            self.meter.add("reducing", self._carry.nbytes)
            self._summed = False

    def reduce(self, *, last: bool) -> None:
        """Begin to sum the gradients over the ranks, as far as the policy says so for this micro-batch: the `last` one of a step, or
        another. A parameter without a gradient counts as zero, so that every rank takes part whatever its control flow was."""
        placement = self.policy.grads
        if placement is FULL and not last:
            return
        self._make_room()
        for index, slot in enumerate(self.layout.slots):
            if index not in self.written:
                self.grad_full[slot.offset : slot.stop].zero_()
        self.written.clear()
        self.pool.started(self)
        if self._grad is None:
            self._make_grad()
        tag, add = self.gather_tag + wire.REDUCE_TAG, self._summed and placement is not FULL
        if placement is WORLD and self._in_parts and not self._sums_all:
            chunk = self.grad_full[self._extents.chunk]
            self._started(chunk, self._reducer.reduce_scatter(self.grad_full, chunk, tag, add=False), add=add)
        else:
            chunk = self.grad_full[self._extents.chunk] if placement is FULL else self._grad if placement is WORLD else self._grad_chunk
            handle = self._reducer.reduce_scatter(self.grad_full, chunk, tag, add=add)
            self._started(chunk, handle, between_groups=last and not self._sums_all)
        self._summed = True

    def reduce_leftovers(self) -> None:
        """Begin what the last micro-batch of the step would have done, where none was said to be it."""
        if self.policy.grads is FULL:
            self.reduce(last=True)
        elif self._sums_in_place and self._grad_chunk is not None:
            self.pool.started(self)
            self._started(self._grad_chunk, Handle([]))

    @property
    def _sums_in_place(self) -> bool:
        """Whether the sum over all ranks overwrites what was summed up until then, so that it can be made once a step only."""
        return self.policy.grads is FULL or (self.policy.grads is GROUP and self._reduce_route.across.size > 1)

    def _started(self, chunk: torch.Tensor, handle: Handle, *, between_groups: bool = True, add: bool = False) -> None:
        """The sum over the group is under way, to `chunk` [C]; that over the groups follows."""
        across, received = self._reduce_route.across, handle.room
        if between_groups and across.size > 1:
            if self._in_parts:
                received = max(received, across.received_bytes(self._grad.nbytes, in_place=self.policy.grads is not WORLD, add=add))
                tag = self.gather_tag + wire.REDUCE_TAG
                handle = handle.then(lambda: across.reduce_scatter(chunk, self._grad, tag, add=add), self._reduce_route.stream)
            else:
                handle = handle.then(lambda: across.all_reduce(chunk), self._reduce_route.stream)
        self._reducing, self._received_bytes = handle, received
        self.meter.add("reducing", received)
        self._reduced = between_groups and self._sums_in_place

    def finish_reduce(self) -> None:
        self._reducing.wait()
        self._reducing = None
        self.meter.add("reducing", -self._received_bytes)
        self._received_bytes = 0
        if self._carry is not None and self._reduced:
            self.grad.add_(self._carry)
            self.meter.add("reducing", -self._carry.nbytes)
            self._carry = None
        if self.policy.grads is not FULL and self.grad_full is not None:
            self.pool.release(self)
            self._forget_grad_full()

    def end_step(self) -> None:
        """The gradients are used up, or will be when the host has updated."""
        self._summed = self._reduced = False
        self.used.clear()
        if self.updating is None:
            self._free_grad()

    def scale_residuals(self, factor: torch.Tensor | float) -> None:
        """Gradients are `factor` times as large from now on; 0: what was left over is forgotten."""
        for residual in self.residuals:
            residual.mul_(factor)

    def _reset_gradients(self) -> None:
        if self._reducing is not None:
            self._reduce_route.inside.abandon(self._reducing)
            self._reducing = None
        self.scale_residuals(0)
        self.meter.add("reducing", -self._received_bytes)
        self._received_bytes = 0
        if self._carry is not None:
            self.meter.add("reducing", -self._carry.nbytes)
            self._carry = None
        if self.policy.grads is not FULL:
            self._forget_grad_full()
        self._free_grad()
        self.written.clear()
        self.used.clear()
        self._summed = self._reduced = False
        for parameter in self.parameters:
            parameter.grad = None
