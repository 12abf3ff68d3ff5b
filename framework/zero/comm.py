"""Communication of flat tensors over one process group: gather, reduce, exchange, sum. A group of one rank is an ordinary case.

On NCCL these are the collectives, straight on the buffers. On gloo they are point-to-point messages: gloo's own reduce-scatter sends as
much as an all-reduce, and its all-gather copies twice; exchanging the pieces into place is 1.5 to 3 times as fast, and
the pieces are added in rank order, so that the sum does not depend on timing. Every call returns at once; `wait()` makes the result
usable (on CUDA it lets the current stream wait, not the host).

Bytes that this rank sends are counted in `bytes_sent`.

[Note: after an exception] What is under way must end before anything else is sent or its memory freed: a message that nobody waits for
would be taken for a later one with its tag. Where the exception came on one rank only, the others never do their part; then this rank
gives up after `ABANDON_SECONDS`, and refuses to communicate from there on, as it does after an exception between the messages of one call.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from framework import torch_private

ABANDON_SECONDS = 10


class Handle:
    """A communication under way. It keeps the tensors alive that the transport reads and writes; `room`: bytes of those that it made."""

    def __init__(self, works: list[Any], finish: Callable[[], None] | None = None, keep: tuple = (), room: int = 0) -> None:
        self._works, self._finish, self._keep, self.room = works, finish, keep, room

    @staticmethod
    def joined(handles: list[Handle], finish: Callable[[], None], keep: tuple, room: int) -> Handle:
        """All of `handles`, which have nothing to finish themselves, as one; `finish` makes the result of what they bring."""
        works = [work for handle in handles for work in handle._works]
        return Handle(works, finish, (*(handle._keep for handle in handles), *keep), room)

    def wait(self) -> None:
        while self._works:
            self._works[-1].wait()
            self._works.pop()  # only now: what Ctrl-C interrupts is left to `abandon`
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._keep = ()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to wait for."""
        return not self._works and self._finish is None

    def abandon(self) -> None:
        """Wait without using the result. Raises RuntimeError where the other ranks do not do their part in `ABANDON_SECONDS`."""
        works, self._works = self._works, []
        for work in works:
            if not work.is_completed():  # gloo waits for a second message where a first one was waited for
                work.wait(timedelta(seconds=ABANDON_SECONDS))
        self._keep = ()

    def then(self, begin: Callable[[], Handle], stream: torch.cuda.Stream | None = None) -> Handle:
        """This, and what `begin` begins with its result. With a `stream` both are queued at once: it waits for the first in place of the
        current one. Without (on the CPU), the second begins when somebody waits for it, but at once where nothing is under way."""
        if self.is_done:
            return begin()
        if stream is None:
            return _InTurn(self, begin)
        keep = self._keep  # the allocator must not give it away before the current stream has waited, too
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self.wait()
            second = begin()
        second._keep += keep
        return second


class _InTurn(Handle):
    """Two communications, of which the second needs the result of the first."""

    def __init__(self, first: Handle, begin: Callable[[], Handle]) -> None:
        super().__init__([], room=first.room)
        self._under_way, self._begin = first, begin

    def wait(self) -> None:
        self._under_way.wait()
        begin, self._begin = self._begin, None
        if begin is not None:
            self._under_way = begin()
            self._under_way.wait()

    @property
    def is_done(self) -> bool:
        return self._begin is None and self._under_way.is_done

    def abandon(self) -> None:
        self._under_way.abandon()


class Traffic:
    """What the communicators of one engine have in common."""

    def __init__(self) -> None:
        self.comms: list[Comm] = []
        self.lost = False
        """Whether the ranks no longer agree on what was sent."""
        self.torn = False
        """Whether an exception came between the messages of one call."""

    @property
    def bytes_sent(self) -> int:
        return sum(comm.bytes_sent for comm in self.comms)

    @property
    def order(self) -> int:
        """Fingerprint of what was sent over each communicator in which order. Two communicators need not agree with each other."""
        fingerprint = 0
        for comm in self.comms:
            fingerprint = (fingerprint * 31 + comm.order) % 65521
        return fingerprint


def _whole_or_lost(send: Callable[..., Handle]) -> Callable[..., Handle]:
    """`send`, a method of `Comm`, after whose failure nobody knows which of its messages were sent."""

    @wraps(send)
    def guarded(self: Comm, *args: Any, **options: Any) -> Handle:
        try:
            return send(self, *args, **options)
        except BaseException:
            self.traffic.torn |= self.size > 1
            raise

    return guarded


class Comm:
    """One process group; `group=None` stands for this rank alone."""

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic | None = None) -> None:
        self.group = group
        self.traffic = traffic or Traffic()
        self.traffic.comms.append(self)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.bytes_sent = 0
        self.order = 0
        """Fingerprint of the gathers and reductions until now, where nothing but their order says which belong together
        (below 2**16: its square is exact in fp64, see `norm`)."""
        self.messages = group is not None and dist.get_backend(group) == "gloo"

    @_whole_or_lost
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: int) -> Handle:
        """Fill `out` [size * S] with every rank's `shard` [S]; `shard` may be this rank's part of `out`.

        `tag` tells gathers apart that are under way at the same time.
        """
        numel = shard.numel()
        if self.size == 1:
            if out.data_ptr() != shard.data_ptr():
                out.copy_(shard)
            return Handle([])
        self._begin((self.size - 1) * numel * shard.element_size(), tag)
        if not self.messages:
            return Handle([torch_private.all_gather_single(out, shard, group=self.group, async_op=True)], keep=(out, shard))
        mine = out[self.rank * numel : (self.rank + 1) * numel]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        works = []
        for peer in self._peers():
            works.append(dist.irecv(out[peer * numel : (peer + 1) * numel], group=self.group, group_src=peer, tag=tag))
        for peer in self._peers():
            works.append(dist.isend(shard, group=self.group, group_dst=peer, tag=tag))
        return Handle(works, keep=(out, shard))

    @_whole_or_lost
    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, tag: int, *, add: bool) -> Handle:
        """Sum `full` [size * S] over the ranks and leave this rank's part in `out` [S], added to it where `add` is set.

        `out` may be this rank's part of `full` (then `add` must not be set). `full` must not change before `wait()`.
        """
        numel = out.numel()
        mine = full[self.rank * numel : (self.rank + 1) * numel]
        if self.size == 1:
            put(out, mine, add)
            return Handle([])
        self._begin((self.size - 1) * numel * full.element_size(), tag)
        if not self.messages:
            target = torch.empty_like(out) if add else out
            work = torch_private.reduce_scatter_single(target, full, group=self.group, async_op=True)
            return Handle([work], finish=(lambda: put(out, target, True)) if add else None, keep=(full, target), room=target.nbytes * add)
        is_free = not add and out.data_ptr() != mine.data_ptr()  # so that a message may come straight into `out`
        received = [*[out] * is_free, *full.new_empty(self.size - 1 - is_free, numel)]  # of the peers in rank order, [S] each
        works = [dist.irecv(received[row], group=self.group, group_src=peer, tag=tag) for row, peer in enumerate(sorted(self._peers()))]
        for peer in self._peers():
            works.append(dist.isend(full[peer * numel : (peer + 1) * numel], group=self.group, group_dst=peer, tag=tag))

        def finish() -> None:
            parts = [*received[: self.rank], mine, *received[self.rank :]]  # rank order: every run adds in the same order
            total = torch.add(parts[0], parts[1], out=received[0])
            for part in parts[2:]:
                total.add_(part)
            put(out, total, add)

        return Handle(works, finish, keep=(full, *received), room=sum(part.nbytes for part in received[is_free:]))

    @_whole_or_lost
    def exchange(self, received: torch.Tensor, sent: torch.Tensor, tag: int) -> Handle:
        """Row r of `sent` [size * S] goes to rank r; row r of `received` [size * S] is what rank r sent here."""
        numel = sent.numel() // self.size
        if self.size == 1:
            received.copy_(sent)
            return Handle([])
        self._begin((self.size - 1) * numel * sent.element_size(), tag)
        if not self.messages:
            return Handle([dist.all_to_all_single(received, sent, group=self.group, async_op=True)], keep=(received, sent))
        rows_in, rows_out = received.view(self.size, numel), sent.view(self.size, numel)
        rows_in[self.rank].copy_(rows_out[self.rank])
        works = [dist.irecv(rows_in[peer], group=self.group, group_src=peer, tag=tag) for peer in self._peers()]
        works += [dist.isend(rows_out[peer], group=self.group, group_dst=peer, tag=tag) for peer in self._peers()]
        return Handle(works, keep=(received, sent))

    @_whole_or_lost
    def all_reduce(self, tensor: torch.Tensor) -> Handle:
        """Sum `tensor` over the ranks, in place."""
        if self.size == 1:
            return Handle([])
        self._begin(2 * (self.size - 1) * tensor.numel() * tensor.element_size() // self.size)
        return Handle([dist.all_reduce(tensor, group=self.group, async_op=True)], keep=(tensor,))

    @_whole_or_lost
    def all_to_all(self, out: torch.Tensor, given: torch.Tensor, out_numels: list[int], given_numels: list[int]) -> Handle:
        """Send `given`, cut into `given_numels` elements for each rank, and fill `out` with what comes: `out_numels` from each rank."""
        if self.size == 1:
            out.copy_(given)
            return Handle([])
        self._begin((given.numel() - given_numels[self.rank]) * given.element_size())
        return Handle([dist.all_to_all_single(out, given, out_numels, given_numels, group=self.group, async_op=True)], keep=(out, given))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's `tensor` to every rank, in place."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def abandon(self, handle: Handle) -> None:
        """Let `handle` end although its result is not wanted. See [Note: after an exception]."""
        try:
            if not self.traffic.lost:
                handle.abandon()
        except RuntimeError:
            self.traffic.lost = True

    def received_bytes(self, shard_bytes: int, *, in_place: bool, add: bool) -> int:
        """Memory that a reduce-scatter needs besides its input and output, in bytes. See `received_shards`."""
        return received_shards(self.size, messages=self.messages, in_place=in_place, add=add) * shard_bytes

    def _begin(self, nbytes: int, tag: int = 0) -> None:
        if self.traffic.lost or self.traffic.torn:
            raise RuntimeError("an exception on some of the ranks left them at different points of the step: start all of them again")
        self.bytes_sent += nbytes
        if not self.messages:
            self.order = (self.order * 31 + tag + 1) % 65521

    def _peers(self) -> list[int]:
        """The other ranks, beginning with the next one, so that not all send to rank 0 first."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


def received_shards(size: int, *, messages: bool, in_place: bool, add: bool) -> int:
    """How many shards of `size` ranks a reduce-scatter keeps besides input and output: what peers send, where sums are made of messages,
    but for one that comes straight into an output that holds nothing yet; else a sum that is to be added."""
    if size == 1:
        return 0
    return size - 1 - (not in_place and not add) if messages else int(add)


def put(out: torch.Tensor, value: torch.Tensor, add: bool) -> None:
    if add:
        out.add_(value)
    elif out.data_ptr() != value.data_ptr():
        out.copy_(value)
