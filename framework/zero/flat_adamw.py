"""AdamW over whole buffers by our own kernel: one pass reads the gradient, scales and clips it, updates moments and master, and writes
the parameters in the compute dtype.

The torch optimizer stays what users see: `lr` is set in its groups, and its state holds the moments, which are views of one flat tensor
per buffer, from its first parameter to its last. Only its loop over parameters is replaced, where it is a plain `torch.optim.AdamW` and a
compiled kernel is there.

Unusual: neighbours in a buffer that have the same settings are updated as one range, across the gap between them: zeros stay zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from framework.kernels.adamw import adamw_
from framework.kernels.library import library_for
from framework.kernels.shard import ShardCopies, ShardRange, adam_range
from framework.zero.buffer import FlatBuffer
from framework.zero.layout import ALIGN, Piece
from framework.zero.offload import HostUpdates

OTHER_ARITHMETIC = ("amsgrad", "maximize", "capturable", "differentiable")
"""Options of torch's AdamW that the kernel does not have."""


@dataclass(eq=False)
class _Shard:
    """One piece of a parameter, and how often it was updated."""

    slot: int
    piece: Piece
    parameter: nn.Parameter
    group: int
    """Which of the optimizer's groups."""
    state: dict[str, Any] | None = None
    steps: int = 0


class FlatAdamW:
    """The step of `optimizer` on `pieces`: (buffer, index of the slot, piece, the 1-D parameter that the optimizer holds)."""

    @staticmethod
    def takes(optimizer: torch.optim.Optimizer, buffers: list[FlatBuffer]) -> bool:
        """Whether the kernel does what `optimizer` does, here. Raises KernelError under kernels=compiled if it alone is missing."""
        plain = type(optimizer) is torch.optim.AdamW and not any(map(_other_arithmetic, optimizer.param_groups))
        copies = (buffer.master.new_empty(0, dtype=buffer.compute_dtype) for buffer in buffers)
        return plain and all(library_for("fw_adamw", buffer.master, copy) is not None for buffer, copy in zip(buffers, copies, strict=True))

    def __init__(
        self, optimizer: torch.optim.Optimizer, pieces: list[tuple[FlatBuffer, int, Piece, nn.Parameter]], updates: HostUpdates | None
    ) -> None:
        """`updates` makes those of buffers whose masters lie in host memory."""
        self._torch, self._updates = optimizer, updates
        group_of = {id(shard): index for index, group in enumerate(optimizer.param_groups) for shard in group["params"]}
        self._shards: dict[FlatBuffer, list[_Shard]] = {}
        for buffer, slot, piece, parameter in pieces:
            self._shards.setdefault(buffer, []).append(_Shard(slot, piece, parameter, group_of[id(parameter)]))
        self._extents = {b: slice(s[0].piece.shard_start, s[-1].piece.shard_stop) for b, s in self._shards.items()}
        self._moments: dict[FlatBuffer, tuple[torch.Tensor, torch.Tensor]] = {}
        self._counted: list[_Shard] = []
        """What the last step has updated."""

    def step(self, factor: torch.Tensor, is_used: list[bool], offsets: dict[int, int]) -> None:
        """Update with gradient = `buffer.grad` * `factor`; where `factor` is not finite, nothing changes but the counts of steps
        (`take_back_count`). Raises RuntimeError for an option that was set since and that the kernel does not have."""
        factor = factor.float()
        self._counted.clear()
        for group in self._torch.param_groups:
            if option := _other_arithmetic(group):
                raise RuntimeError(f"{option} was set in a group of the optimizer after the engine was made: set it before")
        for buffer, shards in self._shards.items():
            used = [shard for shard in shards if is_used[offsets[id(buffer)] + shard.slot]]
            if not used:
                continue
            extent = self._extents[buffer]
            update = partial(_update, buffer.master[extent], self._moments_of(buffer), self._ranges(buffer, used))
            if buffer.master_on_host:
                self._updates.submit(buffer, extent, update, factor)
            else:
                copies = buffer.shard is not buffer.master and buffer.is_written_with_master
                update(buffer.grad[extent], buffer.shard[extent] if copies else None, factor)

    def _ranges(self, buffer: FlatBuffer, used: list[_Shard]) -> dict[tuple[tuple[float, float], float], list[ShardRange]]:
        """By (betas, eps): what is updated, in order, neighbours as one; counted from the beginning of the buffer's extent."""
        settings: dict[tuple[int, int], ShardRange] = {}
        calls: dict[tuple[tuple[float, float], float], list[ShardRange]] = {}
        for shard in used:
            self._count(buffer, shard)
            group, key = self._torch.param_groups[shard.group], (shard.group, shard.steps)
            if key not in settings:
                options = {"lr": float(group["lr"]), "weight_decay": float(group["weight_decay"]), "betas": group["betas"]}
                settings[key] = adam_range(0, 0, step=shard.steps, **options)
            ranges = calls.setdefault((tuple(group["betas"]), group["eps"]), [])
            start, stop = self._located(buffer, shard)
            if ranges and _same(ranges[-1], settings[key]) and start - ranges[-1].stop < ALIGN:
                start = ranges.pop().start
            one = settings[key]
            corrections = {"bias_correction1": one.bias_correction1, "bias_correction2_sqrt": one.bias_correction2_sqrt}
            ranges.append(ShardRange(start=start, stop=stop, lr=one.lr, weight_decay=one.weight_decay, **corrections))
        return calls

    def _located(self, buffer: FlatBuffer, shard: _Shard) -> tuple[int, int]:
        """Where `shard` lies, counted from the beginning of the buffer's extent."""
        begin = self._extents[buffer].start
        return shard.piece.shard_start - begin, shard.piece.shard_stop - begin

    def take_back_count(self) -> None:
        """The last step was skipped on the device."""
        for shard in self._counted:
            shard.steps -= 1
            shard.state["step"].fill_(shard.steps)
        self._counted.clear()

    def adopt_state(self) -> None:
        """Take over what was loaded into the torch optimizer's state, now: it would be there twice until the next step."""
        for buffer, shards in self._shards.items():
            for shard in shards:
                if shard.parameter in self._torch.state:
                    self._take_over(buffer, shard)
                else:
                    shard.state = None

    def _moments_of(self, buffer: FlatBuffer) -> tuple[torch.Tensor, torch.Tensor]:
        if buffer not in self._moments:
            master = buffer.master[self._extents[buffer]]
            self._moments[buffer] = (torch.zeros_like(master), torch.zeros_like(master))
        return self._moments[buffer]

    def _count(self, buffer: FlatBuffer, shard: _Shard) -> None:
        """One step more for `shard`, whose state is made, or taken over where it was loaded."""
        self._take_over(buffer, shard)
        self._counted.append(shard)
        shard.steps += 1
        shard.state["step"].fill_(shard.steps)

    def _take_over(self, buffer: FlatBuffer, shard: _Shard) -> None:
        if shard.state is None or self._torch.state.get(shard.parameter) is not shard.state:
            at = slice(*self._located(buffer, shard))
            moments = {key: flat[at] for key, flat in zip(("exp_avg", "exp_avg_sq"), self._moments_of(buffer), strict=True)}
            loaded = self._torch.state.get(shard.parameter) or {}
            for key, moment in moments.items():
                moment.copy_(loaded[key]) if key in loaded else moment.zero_()
            shard.steps = int(loaded.get("step", 0))
            shard.state = {"step": torch.tensor(float(shard.steps)), **moments}
            self._torch.state[shard.parameter] = shard.state


def _update(
    master: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    calls: dict[tuple[tuple[float, float], float], list[ShardRange]],
    grad: torch.Tensor,
    copy: torch.Tensor | None,
    factor: torch.Tensor,
) -> list[ShardRange]:
    """All ranges of a buffer's extent ([n] each); `copy`: the parameters in the compute dtype. Returns what was updated."""
    copies = None if copy is None else ShardCopies(data=copy)
    for (betas, eps), ranges in calls.items():
        adamw_(master, *moments, grad, ranges, betas=betas, eps=eps, grad_factor=factor, copies=copies)
    return [one for ranges in calls.values() for one in ranges]


def _other_arithmetic(group: dict[str, Any]) -> str | None:
    """An option of `group` that the kernel does not have."""
    if isinstance(group["lr"], torch.Tensor):
        return "an lr that is a tensor"
    return next((option for option in OTHER_ARITHMETIC if group.get(option)), None)


def _same(one: ShardRange, other: ShardRange) -> bool:
    """Whether two ranges have the same settings."""
    return (one.lr, one.weight_decay, one.bias_correction1, one.bias_correction2_sqrt) == (
        other.lr,
        other.weight_decay,
        other.bias_correction1,
        other.bias_correction2_sqrt,
    )
