"""One flat buffer: the storage behind all parameters of a layout, and how it is gathered, released, filled with gradients and reduced.

Parameters are views of `full`; gathering and releasing only resizes the storage below them, so that nothing is copied in or
out and views that autograd saved see the refilled data. A parameter that is released, or of which other ranks hold newer parts, keeps its
shape and reads as NaN (integers: as all bits set, the bytes of a NaN): it can be printed, and a use that was not announced poisons the
loss, which the step refuses, instead of giving wrong numbers. All writes go through `alias`, which has a version counter of its own:
autograd does not take a gather for an in-place change of the parameters.

    full    compute dtype  [S * N]  the parameters; storage present or released (integers keep their own data type, here and in `shard`)
    shard   compute dtype  [S]      this rank's part: a slice of `full` where that is permanent, else a tensor of its own
                                    (`master`, where `blocks`, its int8 copy, are what is gathered: `wire.py`)
    master  fp32 (fp64)    [S]      `shard` itself where the compute dtype is the master dtype and both lie in the same memory
    grad_full              [S * N]  gradients as backward produces them, master dtype
    grad    master dtype   [S]      this rank's sum over micro-batches and ranks
"""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import nn

from framework.config.schema import ZeroConfig
from framework.zero import wire
from framework.zero.comm import Comm, Handle
from framework.zero.layout import Layout, Piece, Slot
from framework.zero.memory import MemoryMeter
from framework.zero.offload import HostMemory, wait
from framework.zero.policy import FULL, SHARDED, Policy


class GradPool:
    """Gradient buffers that blocks use in turn, each as large as the largest block's; the root has its own. At most two reductions are
    under way; the next one waits for the older.

    Gaps and padding must be zero: they are when a buffer is made, only parameters are written into it, and it is zeroed when a block with
    another layout takes it over.
    """

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self._block_numel = 0
        self._free: dict[int, list[tuple[torch.Tensor, tuple]]] = {}
        """By elements: (buffer, extents of the layout that it was last used for)."""
        self._in_use: dict[FlatBuffer, torch.Tensor] = {}
        self._reducing: list[FlatBuffer] = []

    def expect(self, buffer: FlatBuffer) -> None:
        """`buffer` is going to ask; called for all of them before the first asks."""
        if buffer.layout.unit:
            self._block_numel = max(self._block_numel, buffer.padded)

    def acquire(self, buffer: FlatBuffer) -> torch.Tensor:
        """Room for the gradients of `buffer` [S * N], with arbitrary values where its parameters lie."""
        numel = self._block_numel if buffer.layout.unit else buffer.padded
        free = self._free.setdefault(numel, [])
        if not free:
            self.finish(keep=1)
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
        self._free[flat.numel()].append((flat, buffer.extents))

    def started(self, buffer: FlatBuffer) -> None:
        """`buffer`'s reduction is under way."""
        self.finish(keep=1)
        self._reducing.append(buffer)

    def finish(self, keep: int = 0) -> None:
        """Wait for the reductions under way, oldest first, until `keep` of them are left."""
        while len(self._reducing) > keep:
            self._reducing.pop(0).finish_reduce()

    def drop(self) -> None:
        """Forget everything (after an exception)."""
        for flat in (*self._in_use.values(), *(flat for free in self._free.values() for flat, _ in free)):
            self._meter.add("reducing", -flat.nbytes)
        for forgotten in (self._reducing, self._in_use, self._free):
            forgotten.clear()


class FlatBuffer:
    """The parameters of one layout on this rank."""

    def __init__(
        self,
        layout: Layout,
        policy: Policy,
        zero: ZeroConfig,
        shard_comm: Comm,
        replicate_comm: Comm,
        *,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        device: torch.device,
        meter: MemoryMeter,
        pool: GradPool,
        tag: int,
        host: HostMemory,
        master_on_host: bool,
    ) -> None:
        self.layout, self.policy, self.meter, self.pool, self.gather_tag = layout, policy, meter, pool, tag
        self.shard_comm, self.replicate_comm = shard_comm, replicate_comm
        compute_dtype, master_dtype = layout.integer or compute_dtype, layout.integer or master_dtype
        self.compute_dtype, self.master_dtype = compute_dtype, master_dtype
        self.shard_numel = layout.shard_numel(shard_comm.size)
        self.padded = layout.padded(shard_comm.size)
        self.extents = (self.padded, tuple((slot.offset, slot.numel) for slot in layout.slots))
        self.start = shard_comm.rank * self.shard_numel
        self.permanent = policy.params_at_rest is FULL
        self._gatherer = wire.gatherer(zero, shard_comm, layout.integer)
        self.parameters: list[nn.Parameter] = []
        self._views: list[torch.Tensor] = []
        self._unreadable: list[torch.Tensor] = []

        self.master_on_host = master_on_host
        """Whether masters and optimizer state lie in host memory (`offload.py`)."""
        self.shard_on_host = host.config.params != "none" and not self.permanent
        self.updating: Future | None = None
        """The update that is under way on the host."""

        self.full = torch.zeros(self.padded, dtype=compute_dtype, device=device)
        self._storage, self._full_bytes = self.full.untyped_storage(), self.full.nbytes
        self.alias = self.full.data
        self.present = True
        """Whether the storage of `full` is there."""
        self.stale = False
        """Whether other ranks' parts of `full` are older than their masters."""
        self.blocks: wire.Blocks | None = None
        """The parameters as they are gathered, where that is not how `shard` has them."""
        if self.permanent:
            self.shard = self.alias[self.start : self.start + self.shard_numel]
            meter.add("params", self._full_bytes)
        elif self._gatherer is not shard_comm and layout.requires_grad and not (master_on_host or self.shard_on_host):
            self.blocks = wire.Blocks.zeros(self.shard_numel, device)
            self.shard = torch.zeros(self.shard_numel, dtype=master_dtype, device=device)
            meter.add("params", self.blocks.nbytes)
            meter.add("master", self.shard.nbytes)
        else:
            if self.shard_on_host:
                self.shard = host.zeros("params", self.shard_numel, compute_dtype)
            else:
                self.shard = torch.zeros(self.shard_numel, dtype=compute_dtype, device=device)
                meter.add("params", self.shard.nbytes)
        if not self.permanent:
            meter.add("gathered", self._full_bytes)
        self.master = self.shard
        if layout.requires_grad and self.blocks is None and (compute_dtype != master_dtype or master_on_host != self.shard_on_host):
            if master_on_host:
                self.master = host.zeros("master", self.shard_numel, master_dtype)
            else:
                self.master = torch.zeros(self.shard_numel, dtype=master_dtype, device=device)
                meter.add("master", self.master.nbytes)
        self._gathering: Handle | None = None

        self.grad: torch.Tensor | None = None
        self.grad_full: torch.Tensor | None = None
        self.written: set[int] = set()
        """Slots that hold a gradient in `grad_full`."""
        self.used: set[int] = set()
        """Slots that got a gradient on this rank in the current step."""
        self._reduced = False
        """Whether `grad` holds sums of this step already."""
        self._carry: torch.Tensor | None = None
        self._reducing: Handle | None = None
        self.residuals: list[torch.Tensor] = []
        """What compression left over of earlier gradients, see `wire` [Note: error feedback]."""
        if layout.requires_grad:
            self._reducer, self.residuals = wire.reducer(zero, shard_comm, self.padded, device)
            meter.add("residual", sum(residual.nbytes for residual in self.residuals))
            if policy.grads is FULL:
                self.grad_full = torch.zeros(self.padded, dtype=master_dtype, device=device)
                self.grad = self.grad_full[self.start : self.start + self.shard_numel]
                meter.add("grads", self.grad_full.nbytes)
            else:
                self.grad = torch.zeros(self.shard_numel, dtype=master_dtype, device=device)
                meter.add("grads", self.grad.nbytes)
                pool.expect(self)

    # -- parameters -----------------------------------------------------------------------------------------------------------

    def view(self, slot: Slot) -> torch.Tensor:
        """`slot`'s parameter as a view of `full`; its storage may be released later."""
        return self.full[slot.offset : slot.stop].view(slot.shape)

    def bind(self, parameters: list[nn.Parameter]) -> None:
        """Make `parameters`, one for each slot, views of `full` for as long as it is present and current."""
        self.parameters = parameters
        self._views = [self.view(slot) for slot in self.layout.slots]
        empty = torch.zeros((), dtype=self.compute_dtype, device=self.full.device)
        unreadable = empty.fill_(torch.nan) if self.layout.integer is None else ~empty
        self._unreadable = [unreadable.expand(slot.shape) for slot in self.layout.slots]
        self._point_at(self._views if self.readable else self._unreadable)

    def _point_at(self, tensors: list[torch.Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

    @property
    def pieces(self) -> list[Piece]:
        """The parts of parameters that this rank owns, located in `shard`, `master` and `grad`."""
        return self.layout.pieces(self.start, self.start + self.shard_numel)

    @property
    def is_written_with_master(self) -> bool:
        """Whether a kernel that updates masters can write `shard`, too: not from the device into host memory."""
        return self.master_on_host or not self.shard_on_host

    @property
    def readable(self) -> bool:
        """Whether the parameters are whole and current, or will be after `wait`."""
        return self.present and not self.stale

    @property
    def moved(self) -> bool:
        """Whether parameters were moved out of the buffer, as `module.to(...)` does."""
        return self.readable and self.parameters[0].data_ptr() != self._views[0].data_ptr()

    @property
    def needs_gather(self) -> bool:
        return self._gathering is None and not self.readable

    @property
    def gather_bytes(self) -> int:
        """Memory that a gather would take, in bytes."""
        return 0 if self.present else self._full_bytes

    @property
    def held_bytes(self) -> int:
        """Memory that a release would free, in bytes."""
        return self._full_bytes if self.present and not self.permanent else 0

    def gather(self) -> None:
        """Begin to make all parameters current and present."""
        if not self.needs_gather:
            return
        if not self.present:
            self._storage.resize_(self._full_bytes)
            self.meter.add("gathered", self._full_bytes)
            self.present = True
        self.finish_update()
        self.stale = False
        self._point_at(self._views)
        shard = self.shard if self.blocks is None else self.blocks
        if self.shard_on_host:
            shard = self.alias[self.start : self.start + self.shard_numel]
            shard.copy_(self.shard, non_blocking=True)
        self._gathering = self._gatherer.all_gather(self.alias, shard, self.gather_tag)
        self.meter.add("gathering", self._gathering.room)

    def wait(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self.meter.add("gathering", -self._gathering.room)
            self._gathering = None

    def release(self) -> None:
        """Free the gathered parameters where the policy keeps them sharded."""
        if self.permanent or not self.present:
            return
        self.wait()
        self._point_at(self._unreadable)
        self._storage.resize_(0)
        self.meter.add("gathered", -self._full_bytes)
        self.present = False

    def finish_update(self) -> None:
        """Wait for the update that is under way on the host."""
        if self.updating is not None:
            updating, self.updating = self.updating, None
            wait(updating)

    def publish(self, *, written: bool = False) -> None:
        """After the masters have changed: bring `shard` up to date, unless it was `written`, and mark what other ranks hold as stale."""
        self.wait()
        if self.master is not self.shard and not written:
            self.shard.copy_(self.master)
        if self.blocks is not None and not written:
            self.blocks.fill(self.master)
        self._outdate()

    def _outdate(self) -> None:
        """Of `full`, only this rank's part is known to be current, and that only where `shard` is a slice of it."""
        self.stale = self.present and (self.shard_comm.size > 1 or not self.permanent or self.updating is not None)
        if self.stale:
            self._point_at(self._unreadable)

    # -- gradients ------------------------------------------------------------------------------------------------------------

    def take_grad(self, index: int) -> None:
        """Move the gradient that backward left in parameter `index` into the flat buffer; None there means that a kernel wrote nothing."""
        parameter = self.parameters[index]
        if parameter.grad is None:
            return
        slot = self.layout.slots[index]
        if not self.readable:
            raise RuntimeError(
                f"{slot.name} was used outside of the forward of {self.layout.unit or 'the model'}, where its values are not there: "
                "use it in that forward, or make the method that uses it an entry with engine.wrap_method(...)"
            )
        self._make_room()
        grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        target = self.grad_full[slot.offset : slot.stop].view(slot.shape)
        target.add_(grad) if index in self.written else target.copy_(grad)
        self.written.add(index)
        self.used.add(index)
        parameter.grad = None

    def _make_room(self) -> None:
        """For gradients in `grad_full`. Sums of this step that were made in place are set aside: they must not be added up twice."""
        if self.grad_full is None:
            self.grad_full = self.pool.acquire(self)
        if self._reduced and self.policy.grads is FULL and self._carry is None:
            self._carry = self.grad.clone()
            self.meter.add("reducing", self._carry.nbytes)

    def reduce(self) -> None:
        """Begin to sum this step's gradients over the ranks. A parameter without a gradient counts as zero, so that every rank
        takes part whatever its control flow was."""
        self.finish_update()  # of a buffer that this step did not use: the update reads the gradients
        self._make_room()
        for index, slot in enumerate(self.layout.slots):
            if index not in self.written:
                self.grad_full[slot.offset : slot.stop].zero_()
        self.written.clear()
        self.pool.started(self)
        in_place = self.policy.grads is FULL
        tag = self.gather_tag + wire.REDUCE_TAG
        self._reducing = self._reducer.reduce_scatter(self.grad_full, self.grad, tag, add=self._reduced and not in_place)
        self.meter.add("reducing", self._reducing.room)
        if self.replicate_comm.size > 1:
            self._reducing.wait()
            self.meter.add("reducing", -self._reducing.room)
            self._reducing = self.replicate_comm.all_reduce(self.grad)
        self._reduced = True

    def finish_reduce(self) -> None:
        self._reducing.wait()
        self.meter.add("reducing", -self._reducing.room)
        self._reducing = None
        if self._carry is not None:
            self.grad.add_(self._carry)
            self.meter.add("reducing", -self._carry.nbytes)
            self._carry = None
        if self.policy.grads is SHARDED:
            self.pool.release(self)
            self.grad_full = None

    def end_step(self) -> None:
        """The gradients are used up."""
        self._reduced = False
        self.used.clear()

    def scale_residuals(self, factor: torch.Tensor | float) -> None:
        """Gradients are `factor` times as large from now on; 0: what was left over is forgotten."""
        for residual in self.residuals:
            residual.mul_(factor)

    def reset(self) -> None:
        """After an exception: forget gradients and what is under way; the masters stay as they are. `GradPool.drop` follows."""
        comm = self.shard_comm if self.shard_comm.size > 1 else self.replicate_comm
        for handle, kind in ((self._gathering, "gathering"), (self._reducing, "reducing")):
            if handle is not None:
                comm.abandon(handle)
                self.meter.add(kind, -handle.room)
        self._gathering = self._reducing = None
        self.scale_residuals(0)
        if self._carry is not None:
            self.meter.add("reducing", -self._carry.nbytes)
            self._carry = None
        if self.policy.grads is SHARDED:
            self.grad_full = None
        self.written.clear()
        self.used.clear()
        self._reduced = False
        for parameter in self.parameters:
            parameter.grad = None
        self._outdate()
        self.release()
