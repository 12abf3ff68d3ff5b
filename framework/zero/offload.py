"""Model state in host memory or on a disk: optimizer steps by the CPU, in threads of their own, while the device begins with the next step.

`engine.step()` sees to the exact norm and clipping first, hands over one update per buffer, in the order of forward, and returns. A
buffer's next gather waits for its update, and for that alone: the CPU works on later blocks while the device computes earlier ones. Nothing
is delayed by a step; the numbers are those of a step without offloading.

    device  grad [S] ──▶ staging ──▶ kernel: master, moments ──▶ staging ──▶ shard [S]  device
                                     (host memory, permanent, or read from the disk into staging and written back)

Unusual: several workers, so that one buffer is copied or read while the kernel, which uses all cores, works on another; the kernel takes
them in their turn, one at a time.
On a CPU "device" the same copies are made between separate allocations, so that order, waiting and bytes are what they are on a GPU.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

import torch

from framework.config.schema import OffloadConfig
from framework.kernels.shard import ShardRange
from framework.zero.memory import MemoryMeter
from framework.zero.nvme import STAGING_BYTES, Extent, Pending, Store, on_stream, stored_bytes
from framework.zero.policy import workers

if TYPE_CHECKING:
    from framework.zero.buffer import FlatBuffer

Update = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], Sequence[ShardRange]]
"""(gradients [n], room for the parameters in the compute dtype [n] or None, factor on the gradients) -> what was updated. Where state lies
on a disk, before them all: master and moments [n each]."""


class HostMemory:
    """What of an engine's state lies in host memory or on the disk: allocations for it, counted by `meter` and `disk_meter`."""

    def __init__(self, config: OffloadConfig, device: torch.device, meter: MemoryMeter, disk_meter: MemoryMeter) -> None:
        self.config, self.meter, self.disk_meter = config, meter, disk_meter
        self._pinned = device.type == "cuda"  # the device reads and writes it directly
        self.store: Store | None = None
        if "nvme" in (config.optimizer, config.params):
            if config.nvme_path is None:
                raise ValueError("OffloadConfig(nvme_path=None): nvme needs a folder on a local disk")
            self.store = Store(config.nvme_path, device)
            meter.add("staging", STAGING_BYTES)

    def zeros(self, kind: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel], counted as `kind`."""
        made = torch.zeros(numel, dtype=dtype, pin_memory=self._pinned)
        self.meter.add(kind, made.nbytes)
        return made

    def on_disk(self, kind: str, name: str, numel: int, dtype: torch.dtype) -> Extent:
        """[numel] zeros, counted as `kind`. Raises UserError where the disk has no room."""
        extent = self.store.reserve(name, numel, dtype)
        self.disk_meter.add(kind, stored_bytes(extent.nbytes))
        return extent


@dataclass(frozen=True)
class _Staging:
    """Host memory that a buffer passes through."""

    grad: torch.Tensor
    copy: torch.Tensor | None
    """Bytes."""
    state: list[torch.Tensor]
    """Room for master and moments that come from the disk."""
    stream: torch.cuda.Stream | None


class HostUpdates:
    """The updates under way. One object per engine; `buffers` are those whose masters lie in host memory."""

    def __init__(self, host: HostMemory, buffers: Sequence[FlatBuffer], device: torch.device, moments: int) -> None:
        """`moments`: how many values of state an element has."""
        self._device, self._turn = device, Event()
        """`_turn`: set when the kernel has done the last update that was submitted."""
        self._turn.set()
        count = workers(host.config)
        self._workers = ThreadPoolExecutor(count, thread_name_prefix="host-optimizer")
        self._staging: queue.SimpleQueue[_Staging] = queue.SimpleQueue()
        largest = max(buffer.shard_numel for buffer in buffers)
        copied = [buffer for buffer in buffers if buffer.is_copied_to]
        on_disk = 1 + moments if host.config.optimizer == "nvme" else 0
        for _ in range(min(count, len(buffers))):
            grad = host.zeros("staging", largest, buffers[0].master_dtype)
            copy = host.zeros("staging", max(b.shard_numel * b.compute_dtype.itemsize for b in copied), torch.uint8) if copied else None
            state = [host.zeros("staging", largest, buffers[0].master_dtype) for _ in range(on_disk)]
            self._staging.put(_Staging(grad, copy, state, torch.cuda.Stream(device) if device.type == "cuda" else None))

    def submit(self, buffer: FlatBuffer, extent: slice, update: Update, factor: torch.Tensor) -> None:
        """Let `update` work on `extent` of `buffer`; `buffer.finish_update()` waits for it."""
        ready = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
        mine, self._turn = self._turn, Event()
        run = partial(self._run, buffer, extent, update, factor)
        buffer.updating = self._workers.submit(run, ready=ready, turn=mine, next_turn=self._turn)

    @torch.no_grad()
    def _run(
        self,
        buffer: FlatBuffer,
        extent: slice,
        update: Update,
        factor: torch.Tensor,
        *,
        ready: torch.cuda.Event | None,
        turn: Event,
        next_turn: Event,
    ) -> torch.cuda.Event | None:
        """In a worker. Returns what the device has to wait for before it uses the shard."""
        staging, numel = self._staging.get(), extent.stop - extent.start
        try:
            stored = buffer.state_on_disk
            state = [room[: buffer.shard_numel] for room in staging.state]
            reading = sum((one.read(room) for one, room in zip(stored, state, strict=True)), Pending([]))
            grad = staging.grad[:numel]
            if buffer.is_copied_to:
                copy = staging.copy[: numel * buffer.compute_dtype.itemsize].view(buffer.compute_dtype)
            else:
                copy = buffer.shard[extent] if buffer.shard_on_host and buffer.shard is not buffer.master else None
            with on_stream(staging.stream, ready):
                grad.copy_(buffer.grad[extent], non_blocking=True)
                if buffer.master is None and not buffer.shard_on_host:
                    copy.copy_(buffer.shard[extent], non_blocking=True)  # the update reads it, too
                factor = factor.to("cpu", copy=True)  # waits for the copy before it, too
            reading.wait()
            if not torch.isfinite(factor):
                return None
            if state:
                update = partial(update, [room[extent] for room in state])
            turn.wait()
            updated = update(grad, copy, factor)
            next_turn.set()
            writing = sum((one.write(room) for one, room in zip(stored, state, strict=True)), Pending([]))
            if buffer.shard_follows_on_disk:
                writing += buffer.stored["shard"].write(state[0] if state else buffer.master)
            done = None
            if buffer.is_copied_to:
                with on_stream(staging.stream, None):
                    shard = buffer.shard[extent]
                    for part in updated:
                        shard[part.start : part.stop].copy_(copy[part.start : part.stop], non_blocking=True)
                    done = None if staging.stream is None else staging.stream.record_event()
            writing.wait()
            if done is not None:
                done.synchronize()  # the staging is free again only then
            return done
        finally:
            next_turn.set()
            self._staging.put(staging)


def wait(updating: Future) -> None:
    """Until an update is done and the current stream may use what it wrote. Raises what the worker raised."""
    done = updating.result()
    if done is not None:
        torch.cuda.current_stream().wait_event(done)
