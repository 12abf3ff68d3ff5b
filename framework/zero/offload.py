"""Model state in host memory: optimizer steps by the CPU, in threads of their own, while the device begins with the next step.

`engine.step()` sees to the exact norm and clipping first, hands over one update per buffer, in the order of forward, and returns. A
buffer's next gather waits for its update, and for that alone: the CPU works on later blocks while the device computes earlier ones. Nothing
is delayed by a step; the numbers are those of a step without offloading.

    device  grad [S] ──▶ staging ──▶ kernel: master, moments ──▶ staging ──▶ shard [S]  device
                                     (host memory, permanent)

Unusual: two workers, so that one buffer is copied while the kernel, which uses all cores, works on another; in their turn, one at a time.
On a CPU "device" the same copies are made between separate allocations, so that order, waiting and bytes are what they are on a GPU.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

import torch

from framework.config.schema import OffloadConfig
from framework.kernels.shard import ShardRange
from framework.zero.memory import MemoryMeter
from framework.zero.policy import WORKERS

if TYPE_CHECKING:
    from framework.zero.buffer import FlatBuffer

Update = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], Sequence[ShardRange]]
"""(gradients [n], room for the parameters in the compute dtype [n] or None, factor on the gradients) -> what was updated."""


class HostMemory:
    """What of an engine's state lies in host memory: allocations for it, counted by `meter`."""

    def __init__(self, config: OffloadConfig, device: torch.device, meter: MemoryMeter) -> None:
        self.config, self.meter = config, meter
        self._pinned = device.type == "cuda"  # the device reads and writes it directly

    def zeros(self, kind: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel], counted as `kind`."""
        made = torch.zeros(numel, dtype=dtype, pin_memory=self._pinned)
        self.meter.add(kind, made.nbytes)
        return made


@dataclass(frozen=True)
class _Staging:
    """Host memory that a buffer passes through."""

    grad: torch.Tensor
    copy: torch.Tensor | None
    """Bytes."""
    stream: torch.cuda.Stream | None


class HostUpdates:
    """The updates under way. One object per engine; `buffers` are those whose masters lie in host memory."""

    def __init__(self, host: HostMemory, buffers: Sequence[FlatBuffer], device: torch.device) -> None:
        self._device, self._turn = device, Event()
        """`_turn`: set when the kernel has done the last update that was submitted."""
        self._turn.set()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="host-optimizer")
        self._staging: queue.SimpleQueue[_Staging] = queue.SimpleQueue()
        largest = max(buffer.shard_numel for buffer in buffers)
        copied = [buffer for buffer in buffers if buffer.shard is not buffer.master and not buffer.shard_on_host]
        for _ in range(min(WORKERS, len(buffers))):
            grad = host.zeros("staging", largest, buffers[0].master_dtype)
            copy = host.zeros("staging", max(b.shard_numel * b.compute_dtype.itemsize for b in copied), torch.uint8) if copied else None
            self._staging.put(_Staging(grad, copy, torch.cuda.Stream(device) if device.type == "cuda" else None))

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
            grad = staging.grad[:numel]
            if buffer.shard is buffer.master:
                copy = None
            elif buffer.shard_on_host:
                copy = buffer.shard[extent]
            else:
                copy = staging.copy[: numel * buffer.compute_dtype.itemsize].view(buffer.compute_dtype)
            with _on(staging.stream, ready):
                grad.copy_(buffer.grad[extent], non_blocking=True)
                if buffer.master is None and not buffer.shard_on_host:
                    copy.copy_(buffer.shard[extent], non_blocking=True)  # the update reads it, too
                factor = factor.to("cpu", copy=True)  # waits for the copy before it, too
            if not torch.isfinite(factor):
                return None
            turn.wait()
            updated = update(grad, copy, factor)
            next_turn.set()
            if copy is None or buffer.shard_on_host:
                return None
            with _on(staging.stream, None):
                shard = buffer.shard[extent]
                for part in updated:
                    shard[part.start : part.stop].copy_(copy[part.start : part.stop], non_blocking=True)
                done = None if staging.stream is None else staging.stream.record_event()
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


def _on(stream: torch.cuda.Stream | None, after: torch.cuda.Event | None) -> AbstractContextManager:
    """On `stream`, once `after` has happened."""
    if stream is None:
        return nullcontext()
    if after is not None:
        stream.wait_event(after)
    return torch.cuda.stream(stream)
