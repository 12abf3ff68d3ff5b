"""One flat buffer: the storage behind all parameters of a layout, and how it is gathered, released, filled with gradients and reduced.

Parameters are views of `full`; gathering and releasing only resizes the storage below them, so that nothing is copied in or
out and views that autograd saved see the refilled data. A parameter that is released, or of which other ranks hold newer parts, keeps its
shape and reads as NaN (integers: as all bits set, the bytes of a NaN): it can be printed, and a use that was not announced poisons the
loss, which the step refuses, instead of giving wrong numbers. All writes go through `alias`, which has a version counter of its own:
autograd does not take a gather for an in-place change of the parameters.

    full    compute dtype  [P]  the parameters; storage present or released (integers keep their own data type, here and in `shard`)
    chunk   compute dtype  [C]  what this rank's group has of them on this rank (`grid.py`), where the policy keeps that beside `full`
    shard   compute dtype  [S]  this rank's part: a slice of `full` or `chunk` where that is permanent, else a tensor of its own (`master`,
                                where `blocks`, its int8 copy, are what is gathered: `wire.py`)
    master  fp32 (fp64)    [S]  `shard` itself where the compute dtype is the master dtype and both lie in the same place; None where it is
                                bf16 `shard` and int16 `remainder` [S], or `shard` alone (`PrecisionConfig.master_weights`)
    grad_full              [P]  gradients as backward produces them, master dtype
    grad_chunk             [C]  sums over micro-batches and the ranks of the group, where the policy keeps them so
    grad    master dtype   [S]  this rank's sum over micro-batches and all ranks, from its first reduction to the update: a slice of the two
                                above where the policy has them

What lies on a disk is an extent in `stored`; as a tensor it reads as NaN, too. `masters()` and `rewriting()` lead to its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import torch
from torch import nn

from framework.config.errors import UserError
from framework.config.schema import MasterWeights, ZeroConfig
from framework.kernels.shard import copy_master_, join_master_
from framework.zero import wire
from framework.zero.comm import Comm, Handle
from framework.zero.grad_pool import GradPool
from framework.zero.gradients import Gradients
from framework.zero.grid import Grid, extents_of
from framework.zero.groups import Groups, Route
from framework.zero.layout import Layout, Piece, Slot
from framework.zero.memory import MemoryMeter
from framework.zero.nvme import Extent, Pending
from framework.zero.offload import HostMemory, wait
from framework.zero.policy import FULL, GROUP, Policy


class FlatBuffer(Gradients):
    """The parameters of one layout on this rank."""

    def __init__(
        self,
        layout: Layout,
        policy: Policy,
        zero: ZeroConfig,
        grid: Grid,
        groups: Groups,
        *,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        device: torch.device,
        meter: MemoryMeter,
        pool: GradPool,
        tag: int,
        host: HostMemory,
        master_on_host: bool,
        master_weights: MasterWeights,
    ) -> None:
        self.layout, self.policy, self.meter, self.pool, self.gather_tag = layout, policy, meter, pool, tag
        compute_dtype = torch.float32 if layout.fp32 else layout.integer or compute_dtype
        master_dtype = layout.integer or master_dtype
        self.compute_dtype, self.master_dtype = compute_dtype, master_dtype
        self._extents = extents = extents_of(layout, policy, grid)
        self.shard_numel, self.padded, self.start = extents.shard_numel, extents.padded, extents.shard.start
        self.extents = (self.padded, tuple((slot.offset, slot.shape) for slot in layout.slots))
        self._in_parts = extents.shard != extents.chunk
        """Whether a group's chunk is cut into parts, one for each group."""
        self._gather_route = groups.route("gather", grid, across=self._in_parts)
        self._reduce_route = groups.route("reduce", grid, across=True) if layout.requires_grad else None
        self.permanent = policy.params_at_rest is FULL
        self._gatherer = wire.gatherer(zero, policy, self._gather_route, layout)
        self.parameters: list[nn.Parameter] = []
        self._views: list[torch.Tensor] = []
        self._unreadable: list[torch.Tensor] = []

        self.master_on_host = master_on_host
        """Whether masters and optimizer state lie in host memory or on the disk, and the host updates them (`offload.py`)."""
        params_at = "none" if self.permanent else host.config.params
        masters_at = host.config.optimizer if master_on_host else "none"
        self.shard_on_host = params_at == "cpu"
        self.stored: dict[str, Extent] = {}
        """What lies on the disk: `shard`, `master` and, by its names, optimizer state; [S] each."""
        self.updating: Future | None = None
        """The update that is under way on the host."""
        self.may_be_updating = False
        """The same on every rank, where `updating` is not: a rank that has no piece of what is updated has nothing to do."""

        self.full = torch.zeros(self.padded, dtype=compute_dtype, device=device)
        self._storage, self._full_bytes = self.full.untyped_storage(), self.full.nbytes
        self.alias = self.full.data
        self.present = True
        """Whether the storage of `full` is there."""
        self.stale = False
        """Whether other ranks' parts of `full` are older than their masters."""
        self._chunk: torch.Tensor | None = None
        """This group's chunk beside `full`: permanent, or from the end of forward until that of backward."""
        self._chunk_is_current = False
        self._keeps_chunk = self._in_parts and policy.params_at_rest is GROUP
        self.blocks: wire.Blocks | None = None
        """The parameters as they are gathered, where that is not how `shard` has them."""
        self._hold_parameters(host, params_at, masters_at)
        self._hold_masters(host, params_at, masters_at, master_weights)
        self._fetching: Pending | None = None
        """The read of `shard` from the disk into `full`, before it can be gathered."""
        self._gathering: Handle | None = None

        self._init_gradients(zero, device)

    def _hold_parameters(self, host: HostMemory, params_at: str, masters_at: str) -> None:
        """Make `shard`, and what else there is of the parameters between uses."""
        if self.permanent:
            self.shard = self.alias[self._extents.shard]
            self.meter.add("params", self._full_bytes)
        elif self._gatherer is not self._gather_route and self.layout.requires_grad and params_at == masters_at == "none":
            self.blocks = wire.Blocks.zeros(self.shard_numel, self.full.device)
            self.shard = torch.zeros(self.shard_numel, dtype=self.master_dtype, device=self.full.device)
            self.meter.add("params", self.blocks.nbytes)
            self.meter.add("master", self.shard.nbytes)
        else:
            held_numel = self._extents.numel(self.policy.params_at_rest)
            if params_at == "nvme":
                if self._keeps_chunk:
                    raise ValueError(
                        "shard_optimizer='world' keeps chunks of parameters in memory, so OffloadConfig(params='nvme') is not for it"
                    )
                self.stored["shard"] = host.on_disk("params", self._named("shard"), self.shard_numel, self.compute_dtype)
                held = _unreadable(self.compute_dtype, torch.device("cpu")).expand(self.shard_numel)
            elif self.shard_on_host:
                held = host.zeros("params", held_numel, self.compute_dtype)
            else:
                held = torch.zeros(held_numel, dtype=self.compute_dtype, device=self.full.device)
                self.meter.add("params", held.nbytes)
            self._chunk = held if self._keeps_chunk else None
            self.shard = held[self._part] if self._keeps_chunk else held
        if not self.permanent:
            self.meter.add("gathered", self._full_bytes)

    def _hold_masters(self, host: HostMemory, params_at: str, masters_at: str, master_weights: MasterWeights) -> None:
        """Make `master`, or `remainder`, where it is not `shard` itself."""
        compute_dtype, master_dtype = self.compute_dtype, self.master_dtype
        self.master: torch.Tensor | None = self.shard
        self.remainder: torch.Tensor | None = None
        if self.blocks is not None or not self.layout.requires_grad or (compute_dtype == master_dtype and masters_at == params_at):
            if params_at == "nvme":
                self.stored["master"] = self.stored["shard"]
        elif masters_at == "nvme":
            self.stored["master"] = host.on_disk("master", self._named("master"), self.shard_numel, master_dtype)
            self.master = _unreadable(master_dtype, torch.device("cpu")).expand(self.shard_numel)
        else:
            split = master_weights != "full" and compute_dtype is torch.bfloat16
            self.master = None
            if not split or master_weights == "remainder":
                dtype = torch.int16 if split else master_dtype
                if masters_at == "cpu":
                    kept = host.zeros("master", self.shard_numel, dtype)
                else:
                    kept = torch.zeros(self.shard_numel, dtype=dtype, device=self.full.device)
                    self.meter.add("master", kept.nbytes)
                self.master, self.remainder = (None, kept) if split else (kept, None)

    # -- parameters -----------------------------------------------------------------------------------------------------------

    def view(self, slot: Slot) -> torch.Tensor:
        """`slot`'s parameter as a view of `full`; its storage may be released later."""
        return self.full[slot.offset : slot.stop].view(slot.shape)

    def bind(self, parameters: list[nn.Parameter]) -> None:
        """Make `parameters`, one for each slot, views of `full` for as long as it is present and current."""
        self.parameters = parameters
        self._views = [self.view(slot) for slot in self.layout.slots]
        unreadable = _unreadable(self.compute_dtype, self.full.device)
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
    def owned(self) -> slice:
        """The part of `shard`, `master` and `grad` of which this rank is the only owner in the world."""
        return self._extents.owned

    @property
    def shard_comm(self) -> Comm:
        """The ranks whose shards, in the order of ranks, are the whole. Raises ValueError where shards lie in another order."""
        if self._in_parts:
            raise ValueError("the optimizer needs whole matrices, and shards over all ranks of what groups hold in chunks are not in order")
        return self._reduce_route.inside

    @property
    def _part(self) -> slice:
        """The shard, counted from the beginning of the chunk."""
        begin = self.start - self._extents.chunk.start
        return slice(begin, begin + self.shard_numel)

    @property
    def state_device(self) -> torch.device:
        """Where masters and optimizer state lie."""
        return torch.device("cpu") if self.master_on_host else self.full.device

    @property
    def is_written_with_master(self) -> bool:
        """Whether an update of masters brings `shard` up to date, too: not from the device into host memory or onto the disk."""
        return self.master_on_host or not (self.shard_on_host or "shard" in self.stored)

    @property
    def is_copied_to(self) -> bool:
        """Whether an update on the host reaches `shard` through a copy to the device."""
        return self.master_on_host and not self.shard_on_host and "shard" not in self.stored

    @property
    def shard_follows_on_disk(self) -> bool:
        """Whether `shard` lies on the disk and is another extent than the masters."""
        return "shard" in self.stored and self.stored["shard"] is not self.stored.get("master")

    @property
    def state_on_disk(self) -> list[Extent]:
        """Masters and optimizer state that an update reads and writes, in the order in which they were made."""
        on_disk = self.layout.requires_grad and "master" in self.stored
        return [extent for key, extent in self.stored.items() if key != "shard"] if on_disk else []

    def store_moments(self, host: HostMemory, names: Sequence[str]) -> None:
        """Make room for optimizer state beside masters that lie on the disk."""
        for name in names:
            self.stored[name] = host.on_disk("optimizer", self._named(name), self.shard_numel, self.master_dtype)

    def masters(self) -> torch.Tensor:
        """This rank's parameters as they are updated [S], in the master dtype; new in host memory where no tensor holds them. Frozen ones
        as they are."""
        if "master" in self.stored:
            return self.read_stored("master")
        if self.master is not None:
            return self.master
        return self.write_masters(0, torch.empty(self.shard_numel, dtype=self.master_dtype, device=self.state_device))

    def write_masters(self, start: int, out: torch.Tensor) -> torch.Tensor:
        """Write those from element `start` on to `out`, where they are parameter and remainder."""
        at = slice(start, start + out.numel())
        return join_master_(out, self.shard[at], None if self.remainder is None else self.remainder[at])

    def read_stored(self, key: str) -> torch.Tensor:
        """[S] in host memory."""
        out = torch.empty(self.shard_numel, dtype=self.stored[key].dtype)
        self.stored[key].read(out).wait()
        return out

    @contextmanager
    def rewriting(self, key: str = "master") -> Iterator[torch.Tensor]:
        """The masters [S] (of a frozen buffer the parameters), or optimizer state on the disk, to be changed inside. After masters,
        `publish` follows."""
        values = self.masters() if key == "master" else self.read_stored(key)
        yield values
        if key in self.stored:
            self.stored[key].write(values).wait()
        elif self.master is None:
            copy_master_(self.shard, values, self.remainder)

    @property
    def gathers_exactly(self) -> bool:
        """Whether what is gathered is what the shards hold, to the bit."""
        return self._gatherer is self._gather_route

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
        in_chunks = self._chunk is not None and self._chunk_is_current
        if "shard" in self.stored and not in_chunks:
            self._fetching = self.stored["shard"].read(self.alias[self._extents.shard])
            return  # all ranks must gather in the same order, and how long a disk takes is different on each
        held = self._chunk if in_chunks else self.shard if self.blocks is None else self.blocks
        if self.shard_on_host:
            at = self._extents.chunk if in_chunks else self._extents.shard
            held = self.alias[at].copy_(held, non_blocking=True)
        self._begin_gather(self._gather_route.inside if in_chunks else self._gatherer, held)

    def _begin_gather(self, way: Comm | Route | wire.Int8Gather, held: torch.Tensor | wire.Blocks) -> None:
        self._gathering = way.all_gather(self.alias, held, self.gather_tag)
        self.meter.add("gathering", self._gathering.room)

    def wait(self) -> None:
        if self._fetched():
            self._begin_gather(self._gatherer, self.alias[self._extents.shard])
        if self._gathering is None:
            return
        self._gathering.wait()
        self.meter.add("gathering", -self._gathering.room)
        self._gathering = None
        if self._keeps_chunk and not self._chunk_is_current:
            self._chunk.copy_(self.alias[self._extents.chunk], non_blocking=self.shard_on_host)
            self._chunk_is_current = True

    def gather_whole(self, shard: torch.Tensor) -> torch.Tensor:
        """The whole [P] of which every rank has a `shard` [S], a new tensor on the device."""
        whole = torch.empty(self.padded, dtype=shard.dtype, device=self.full.device)
        self._gather_route.all_gather(whole, shard.to(whole.device), self.gather_tag).wait()
        return whole

    def release(self, *, before_backward: bool = False) -> None:
        """Free the gathered parameters, as far as the policy says so for this moment: between uses, or before the block's backward."""
        if before_backward and self.policy.params_kept is FULL:
            return
        if not before_backward:
            self._drop_chunk()
        if self.permanent or not self.present:
            return
        if not self._fetched():  # what was fetched in vain need not be gathered
            self.wait()
        if before_backward and self._chunk is None and self._in_parts and self.policy.params_kept is GROUP:
            self._chunk, self._chunk_is_current = self.alias[self._extents.chunk].clone(), True
            self.meter.add("secondary", self._chunk.nbytes)
        self._point_at(self._unreadable)
        self._storage.resize_(0)
        self.meter.add("gathered", -self._full_bytes)
        self.present = False

    def _drop_chunk(self) -> None:
        """Free a chunk that is not kept between uses."""
        if self._chunk is not None and not self._keeps_chunk:
            self.meter.add("secondary", -self._chunk.nbytes)
            self._chunk = None

    def _fetched(self) -> bool:
        """Whether a read was under way, which now is done. Until it is, nobody may free what it fills: Ctrl-C here leaves it noted."""
        if self._fetching is None:
            return False
        self._fetching.wait()
        self._fetching = None
        return True

    def finish_update(self) -> None:
        """Wait for the update that is under way on the host."""
        if self.updating is not None:
            wait(self.updating)
            self.updating = None  # only now: one that failed, or was not waited for to its end, is never passed over
            self._free_grad()
        self.may_be_updating = False

    def forget_update(self) -> None:
        """Before masters are replaced: wait for the update that is under way, whatever becomes of it."""
        if self.updating is not None:
            self.updating.exception()
            self.updating = None
            self._free_grad()

    def publish(self, *, written: bool = False) -> None:
        """After the masters have changed: bring `shard` up to date, unless it was `written`, and mark what other ranks hold as stale."""
        self.wait()
        if self.blocks is not None and not written:
            self.blocks.fill(self.masters())
        elif self.master is not None and self.master is not self.shard and not written:
            if "shard" in self.stored:
                self.stored["shard"].write(self.masters()).wait()
            else:
                copy_master_(self.shard, self.masters())
        self.may_be_updating = self.master_on_host
        self._outdate()

    def _outdate(self) -> None:
        """Of `full`, only this rank's part is known to be current, and that only where `shard` is a slice of it."""
        self._drop_chunk()
        self._chunk_is_current = False
        self.stale = self.present and (self.padded > self.shard_numel or not self.permanent or self.updating is not None)
        if self.stale:
            self._point_at(self._unreadable)

    def reset(self) -> None:
        """After an exception: forget gradients and what is under way; the masters stay as they are. `GradPool.drop` follows."""
        with suppress(UserError):  # of a disk that failed; the next read says so again
            self._fetched()
        self._fetching = None
        if self._gathering is not None:
            self._gather_route.inside.abandon(self._gathering)
            self.meter.add("gathering", -self._gathering.room)
            self._gathering = None
        self._reset_gradients()
        self._outdate()
        self.release()

    def _named(self, what: str) -> str:
        return f"{self.layout.unit or 'the root'}'s {what}"


def _unreadable(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One NaN; of integers, its bytes."""
    value = torch.zeros((), dtype=dtype, device=device)
    return value.fill_(torch.nan) if dtype.is_floating_point else ~value


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether the 1-D `tensor` only stands for values that lie on the disk."""
    return tensor.stride() == (0,)
