"""What recomputed blocks keep for backward, their inputs, in host memory: copied there after their use, and back one block ahead of theirs.

    host = HostActivations(engine)
    with torch.autograd.graph.saved_tensors_hooks(host.pack, host.unpack):
        x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

The copies have a stream of their own. Compute waits for it by events only: before a tensor is freed whose copy is under way, and before
one is used that was fetched; device memory is allocated and freed on the stream that computes. On a CPU "device" the same copies are
made between separate allocations, so that order, waiting and bytes are what they are on a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

import torch

from framework import torch_private
from framework.zero.memory import MemoryMeter

if TYPE_CHECKING:
    from framework.zero.engine import ZeroEngine

KIND = "activations"


@dataclass(eq=False)
class Kept:
    """A tensor in host memory, for as long as the graph that needs it."""

    host: torch.Tensor
    before: ReferenceType[Kept] | None
    """What was packed before it, and is needed after it."""
    meter: MemoryMeter

    def __post_init__(self) -> None:
        self.meter.add(KIND, self.host.nbytes)

    def __del__(self) -> None:
        self.meter.add(KIND, -self.host.nbytes)


@dataclass
class _Copy:
    """A copy under way, and the tensor on the device that it reads or writes."""

    kept: Kept
    tensor: torch.Tensor
    done: torch.cuda.Event | None

    def wait(self) -> torch.Tensor:
        if self.done is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self.done)
        return self.tensor


class HostActivations:
    """`pack` and `unpack` for saved tensors of an engine's blocks. Parameters of the engine stay what they are."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._owned = {torch_private.storage_id(buffer.full) for buffer in engine.buffers}
        self._memory, self._host_memory = engine.memory, engine.host_memory
        self._stream = torch.cuda.Stream(engine.device) if engine.device.type == "cuda" else None
        self._last: ReferenceType[Kept] | None = None
        self._leaving: _Copy | None = None
        self._ahead: _Copy | None = None

    def pack(self, x: torch.Tensor) -> torch.Tensor | Kept:
        if not x.numel() or torch_private.storage_id(x) in self._owned:  # torch 2.12's `checkpoint` saves an empty tensor, too
            return x
        kept = Kept(torch.empty_like(x, device="cpu", pin_memory=self._stream is not None), self._last, self._host_memory)
        leaving = self._copy(kept, x, to_host=True)
        self._settle()
        self._leaving, self._last = leaving if self._stream is not None else None, ref(kept)
        return kept

    def unpack(self, kept: torch.Tensor | Kept) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        self._settle()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._memory.add(KIND, -ahead.tensor.nbytes)
            ahead.wait()
        x = ahead.tensor if ahead is not None and ahead.kept is kept else self._fetch(kept).wait()
        before = kept.before() if kept.before is not None else None
        if before is not None:
            self._ahead = self._fetch(before)
            self._memory.add(KIND, before.host.nbytes)
        return x

    def _settle(self) -> None:
        """Free the tensor that was packed last, once its copy is done."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None

    def _fetch(self, kept: Kept) -> _Copy:
        with torch.no_grad():
            return self._copy(kept, torch.empty_like(kept.host, device=self._device_of(kept)), to_host=False)

    def _copy(self, kept: Kept, x: torch.Tensor, *, to_host: bool) -> _Copy:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            target, source = (kept.host, x) if to_host else (x, kept.host)
            target.copy_(source, non_blocking=True)
            return _Copy(kept, x, None if self._stream is None else self._stream.record_event())

    def _device_of(self, kept: Kept) -> torch.device:
        return kept.host.device if self._stream is None else self._stream.device
