"""A scratch file on a local disk for flat tensors that find no room in memory. Knows nothing of what they mean.

    store = Store("/mnt/nvme", device)
    extent = store.reserve("blocks.0/exp_avg", numel, torch.float32)    # a disk that is too small is told here, not in step 900
    extent.write(values).wait()
    extent.read(out).wait()                                             # zeros, where nothing was written yet

Threads move chunks through aligned memory of their own, so tensors may lie anywhere, on a GPU too, while the file is read and written past
the system's cache (O_DIRECT) where the file system takes that. The checksum of each chunk stays in memory; what is read must have it.

Unusual: the file has no name from its first moment on (O_TMPFILE). The system frees it when the process is gone, however that ended, so
there is nothing to clean up and nothing that two runs could share. `du` does not see it; `df` does, and `lsof +L1`.
"""

from __future__ import annotations

import concurrent.futures
import errno
import os
import queue
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from framework.config.errors import Problem, UserError
from framework.kernels.shard import copy_master_

CHUNK_BYTES = 1 << 23
"""What one thread moves at a time, and what a checksum covers."""
PAGE_BYTES = 4096
"""O_DIRECT wants offsets, lengths and addresses to be multiples of the disk's block, which is this or less."""
IO_THREADS = 4
STAGING_BYTES = IO_THREADS * CHUNK_BYTES
"""Host memory of a store's threads."""
SETTING = "offload.nvme_path"


def stored_bytes(nbytes: int) -> int:
    """What `nbytes` take on the disk."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class Pending:
    """Reads or writes under way."""

    def __init__(self, futures: Iterable[Future]) -> None:
        self._futures = list(futures)

    def __add__(self, other: Pending) -> Pending:
        return Pending([*self._futures, *other._futures])

    def wait(self) -> None:
        """Until all of it is done, also where some of it failed: nothing touches the tensors any more. Then raises what went wrong, each
        time."""
        concurrent.futures.wait(self._futures)
        for future in self._futures:
            future.result()


@dataclass(frozen=True)
class _Bounce:
    """What a chunk passes through."""

    memory: Tensor
    stream: torch.cuda.Stream | None


class Store:
    """One file without a name in `folder`, which must be there. `device`: where most tensors lie that are read into and written from.

    Raises UserError for a folder that is missing, cannot be written to or is full; so do `Extent.read` and `write` for a disk that fails
    later.
    """

    def __init__(self, folder: str | Path, device: torch.device) -> None:
        self.folder = Path(folder).expanduser()
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # lives as long as the store
        except OSError as error:
            raise unusable(self.folder, error) from error
        self._descriptor = _past_the_cache(self._file.fileno())
        self.is_direct = self._descriptor is not None
        """Whether reads and writes go past the system's cache."""
        weakref.finalize(self, _close, self._file, self._descriptor)
        if self._descriptor is None:
            self._descriptor = self._file.fileno()
        self.nbytes = self.bytes_read = self.bytes_written = 0
        self.changed = threading.Condition()
        """Guards the counts, and tells of extents that are no longer held."""
        self._threads = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="nvme")
        self._bounces: queue.SimpleQueue[_Bounce] = queue.SimpleQueue()
        memory = _aligned(STAGING_BYTES, pinned=device.type == "cuda")
        for start in range(0, STAGING_BYTES, CHUNK_BYTES):
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            self._bounces.put(_Bounce(memory[start : start + CHUNK_BYTES], stream))

    def reserve(self, name: str, numel: int, dtype: torch.dtype) -> Extent:
        """Room on the disk for [numel], which is taken at once. Raises UserError where there is none."""
        extent = Extent(self, name, self.nbytes, numel, dtype)
        wanted = stored_bytes(extent.nbytes)
        try:
            if wanted > shutil.disk_usage(self.folder).free:  # else the attempt would fill the disk for a while
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _allocate(self._file.fileno(), self.nbytes, wanted)
        except OSError as error:
            raise self.failed(f"in reserving {wanted:,} bytes for {name} beside {self.nbytes:,} that this rank has", error) from error
        self.nbytes += wanted
        return extent

    def submit(self, job: Callable[[_Bounce], None]) -> Future:
        return self._threads.submit(self._with_bounce, job)

    @torch.inference_mode()  # tensors that were made in a validation can be read into
    def _with_bounce(self, job: Callable[[_Bounce], None]) -> None:
        bounce = self._bounces.get()
        try:
            job(bounce)
        finally:
            self._bounces.put(bounce)

    def move(self, transfer: Callable[..., int], memory: memoryview, offset: int, what: str) -> None:
        """All of `memory` by `transfer` (os.preadv, os.pwritev), which may stop in between. Raises UserError where it fails."""
        rest, at = memory, offset
        while rest:
            try:
                count = transfer(self._descriptor, [rest], at)
            except OSError as error:
                raise self.failed(what, error) from error
            if count == 0:
                got = f"{self.folder}: the end of the file at byte {at:,} {what}"
                raise UserError(Problem(path=SETTING, got=got, expected="a disk that keeps what it took", fix="resume=auto"))
            rest, at = rest[count:], at + count
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)  # the cache has better uses
        with self.changed:
            if transfer is os.preadv:
                self.bytes_read += len(memory)
            else:
                self.bytes_written += len(memory)

    def failed(self, what: str, error: OSError) -> UserError:
        got = f"{self.folder}: {error.strerror or error} {what}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            got += f"; {shutil.disk_usage(self.folder).free:,} bytes are free"
            return UserError(Problem(path=SETTING, got=got, expected="a disk with room for what is offloaded", fix=f"{SETTING}=FOLDER"))
        return UserError(Problem(path=SETTING, got=got, expected="a disk that can be read and written", fix=f"{SETTING}=FOLDER"))


class Extent:
    """Room for a flat tensor [numel] on the disk. Calls from several threads are for the caller to order, but for `hold`."""

    def __init__(self, store: Store, name: str, offset: int, numel: int, dtype: torch.dtype) -> None:
        self.name, self.numel, self.dtype, self.nbytes = name, numel, dtype, numel * dtype.itemsize
        self._store, self._offset, self._held = store, offset, 0
        self._checksums: list[int | None] = [None] * -(-self.nbytes // CHUNK_BYTES)
        """Of each chunk; None: never written."""

    @property
    def is_written(self) -> bool:
        return any(checksum is not None for checksum in self._checksums)

    def read(self, out: Tensor, start: int = 0) -> Pending:
        """Fill `out` [n], of this data type, with the elements from `start` on."""
        assert out.dtype is self.dtype and 0 <= start <= start + out.numel() <= self.numel
        return self._split(self._read_chunk, out, start)

    def write(self, values: Tensor) -> Pending:
        """Store `values` [numel], cast to this data type. Waits as long as somebody holds what is there."""
        assert values.shape == (self.numel,)
        with self._store.changed:
            self._store.changed.wait_for(lambda: not self._held)
        return self._split(self._write_chunk, values, 0)

    def hold(self) -> None:
        """Let nobody overwrite it until `let_go`."""
        with self._store.changed:
            self._held += 1

    def let_go(self) -> None:
        with self._store.changed:
            self._held -= 1
            self._store.changed.notify_all()

    def _split(self, move: Callable[..., None], tensor: Tensor, start: int) -> Pending:
        """A job for each chunk that has elements of `tensor`, which begins at element `start`."""
        per_chunk, stop = CHUNK_BYTES // self.dtype.itemsize, start + tensor.numel()
        ready = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
        futures = []
        for number in range(start // per_chunk, -(-stop // per_chunk)):
            low, high = max(start, number * per_chunk), min(stop, (number + 1) * per_chunk)
            part = tensor[low - start : high - start]
            futures.append(self._store.submit(_Job(move, number, part, low - number * per_chunk, ready)))
        return Pending(futures)

    def _read_chunk(self, number: int, out: Tensor, low: int, bounce: _Bounce, ready: torch.cuda.Event | None) -> None:
        if self._checksums[number] is None:
            with on_stream(bounce.stream, ready):
                out.zero_()
        else:
            raw, offset = self._chunk(number, bounce)
            self._store.move(os.preadv, _raw(bounce, stored_bytes(len(raw))), offset, f"in reading {self.name}")
            if xxh3_64_intdigest(raw) != self._checksums[number]:
                got = f"{self._store.folder}: other bytes of {self.name} than were written, at {offset:,} to {offset + len(raw):,}"
                raise UserError(Problem(path=SETTING, got=got, expected="a disk that keeps what it took", fix="resume=auto"))
            chunk = bounce.memory[: len(raw)].view(self.dtype)
            with on_stream(bounce.stream, ready):
                out.copy_(chunk[low : low + out.numel()], non_blocking=True)
        if bounce.stream is not None:
            bounce.stream.synchronize()

    def _write_chunk(self, number: int, values: Tensor, low: int, bounce: _Bounce, ready: torch.cuda.Event | None) -> None:
        raw, offset = self._chunk(number, bounce)
        with on_stream(bounce.stream, ready):
            room = bounce.memory[: len(raw)].view(self.dtype)
            if room.dtype == values.dtype:
                room.copy_(values, non_blocking=True)
            else:
                copy_master_(room, values)
        if bounce.stream is not None:
            bounce.stream.synchronize()
        checksum = xxh3_64_intdigest(raw)
        self._store.move(os.pwritev, _raw(bounce, stored_bytes(len(raw))), offset, f"in writing {self.name}")
        self._checksums[number] = checksum

    def _chunk(self, number: int, bounce: _Bounce) -> tuple[memoryview, int]:
        """(where its bytes pass through, where it lies in the file)."""
        start = number * CHUNK_BYTES
        return _raw(bounce, min(CHUNK_BYTES, self.nbytes - start)), self._offset + start


@dataclass(frozen=True)
class _Job:
    """Moves one part of a tensor: a chunk, or some of it."""

    move: Callable[..., None]
    number: int
    part: Tensor
    low: int
    """Where in the chunk the part begins."""
    ready: torch.cuda.Event | None

    def __call__(self, bounce: _Bounce) -> None:
        self.move(self.number, self.part, self.low, bounce, self.ready)


def on_stream(stream: torch.cuda.Stream | None, after: torch.cuda.Event | None) -> AbstractContextManager:
    """On `stream`, once `after` has happened."""
    if stream is None:
        return nullcontext()
    if after is not None:
        stream.wait_event(after)
    return torch.cuda.stream(stream)


def takes_direct_io(folder: str | Path) -> bool:
    """Whether reads and writes of a store there go past the system's cache. Raises UserError for a folder that cannot be used."""
    try:
        with tempfile.TemporaryFile(dir=Path(folder).expanduser(), buffering=0) as file:
            direct = _past_the_cache(file.fileno())
    except OSError as error:
        raise unusable(Path(folder), error) from error
    if direct is not None:
        os.close(direct)
    return direct is not None


def unusable(folder: Path, error: OSError) -> UserError:
    got = f"{folder}, which cannot be used ({error.strerror or error})"
    return UserError(Problem(path=SETTING, got=got, expected="a folder on a local disk that can be written to", fix=f"{SETTING}=FOLDER"))


def _past_the_cache(descriptor: int) -> int | None:
    """The same file for direct reads and writes; None where the system or the file system does not have them."""
    if not hasattr(os, "O_DIRECT"):
        return None
    direct = None
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        os.pwritev(direct, [_raw_of(_aligned(PAGE_BYTES, pinned=False))], 0)  # some take the flag and refuse what follows
        return direct
    except OSError:
        if direct is not None:
            os.close(direct)
        return None


def _allocate(descriptor: int, offset: int, nbytes: int) -> None:
    if not nbytes:  # of a block whose parameters are all empty
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, offset, nbytes)
    else:
        os.ftruncate(descriptor, offset + nbytes)


def _aligned(nbytes: int, *, pinned: bool) -> Tensor:
    """[nbytes] whose address is a multiple of PAGE_BYTES."""
    if pinned:  # in whole pages already; some more would double what the allocator takes
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    memory = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + nbytes]


def _raw(bounce: _Bounce, nbytes: int) -> memoryview:
    return _raw_of(bounce.memory[:nbytes])


def _raw_of(memory: Tensor) -> memoryview:
    return memoryview(memory.numpy())


def _close(file: object, direct: int | None) -> None:
    file.close()
    if direct is not None:
        os.close(direct)
