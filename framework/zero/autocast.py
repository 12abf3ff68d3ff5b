"""Forward under `torch.autocast`: parameters stay fp32, and torch chooses the data type of each operation (`PrecisionConfig.autocast`).

For models that were written for it. Every entry of an engine (forward, wrapped methods) opens a context of its own, which ends with it;
backward is outside of all of them, as torch wants it.

Unusual: casts of weights are not cached, since a cache would keep a copy of every parameter that sharding has just released.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from framework.config.schema import PrecisionConfig


class Autocast:
    """The contexts of the entries that are under way; does nothing for `autocast: none`."""

    def __init__(self, precision: PrecisionConfig, device: torch.device) -> None:
        self._device_type = device.type
        self._dtype = None if precision.autocast == "none" else getattr(torch, precision.autocast)
        self._open: list[torch.autocast] = []

    def enter(self) -> None:
        if self._dtype is not None:
            context = torch.autocast(self._device_type, self._dtype, cache_enabled=False)
            context.__enter__()
            self._open.append(context)

    def leave(self) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def leave_all(self) -> None:
        """After an exception."""
        while self._open:
            self.leave()

    def off(self) -> AbstractContextManager:
        """A context without it, for a backward in the middle of an entry."""
        return torch.autocast(self._device_type, enabled=False) if self._open else nullcontext()
