"""AdamW, Lion and SGD over whole buffers by our own kernels: one pass reads the gradient, scales and clips it, updates state and master,
and writes the parameters in the compute dtype.

The torch optimizer stays what users see: `lr` is set in its groups, and its state holds the moments, which are views of one flat tensor
per buffer, from its first parameter to its last. Only its loop over parameters is replaced, where a compiled kernel does what it does.

Unusual: neighbours in a buffer that are of one group and were updated as often are updated as one range, across the gap between them: zeros
stay zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from framework import torch_private
from framework.kernels.adamw import adamw_
from framework.kernels.library import library_for
from framework.kernels.lion import lion_
from framework.kernels.sgd import sgd_
from framework.kernels.shard import ShardCopies, ShardRange, adam_range
from framework.zero.buffer import FlatBuffer, is_elsewhere
from framework.zero.layout import ALIGN, Piece
from framework.zero.lion import Lion
from framework.zero.offload import HostUpdates
from framework.zero.wire import BLOCK, Blocks

OTHER_ARITHMETIC = ("amsgrad", "maximize", "capturable", "differentiable")
"""Options of torch's optimizers that the kernels do not have."""

Call = tuple[Any, ...]
"""What all ranges of one call of a kernel have in common."""


class _AdamW:
    function, states = "fw_adamw", ("exp_avg", "exp_avg_sq")

    @staticmethod
    def call_of(group: dict[str, Any], step: int) -> Call:
        return tuple(group["betas"]), group["eps"]

    @staticmethod
    def range_of(group: dict[str, Any], step: int) -> ShardRange:
        return adam_range(0, 0, lr=float(group["lr"]), weight_decay=float(group["weight_decay"]), step=step, betas=group["betas"])

    @staticmethod
    def run(call: Call, master: torch.Tensor | None, states: Sequence[torch.Tensor], *gradient: Any, **options: Any) -> None:
        betas, eps = call
        adamw_(master, *states, *gradient, betas=betas, eps=eps, **options)


class _Lion:
    function, states = "fw_lion", ("exp_avg",)

    @staticmethod
    def call_of(group: dict[str, Any], step: int) -> Call:
        return (tuple(group["betas"]),)

    @staticmethod
    def range_of(group: dict[str, Any], step: int) -> ShardRange:
        return ShardRange(start=0, stop=0, lr=float(group["lr"]), weight_decay=float(group["weight_decay"]))

    @staticmethod
    def run(call: Call, master: torch.Tensor | None, states: Sequence[torch.Tensor], *gradient: Any, **options: Any) -> None:
        lion_(master, *states, *gradient, betas=call[0], **options)


class _Sgd(_Lion):
    function, states = "fw_sgd", ("momentum_buffer",)

    @staticmethod
    def call_of(group: dict[str, Any], step: int) -> Call:
        return group["momentum"], group["dampening"], group["nesterov"], step == 1  # in its first step the buffer is filled, not read

    @staticmethod
    def run(call: Call, master: torch.Tensor | None, states: Sequence[torch.Tensor], *gradient: Any, **options: Any) -> None:
        momentum, dampening, nesterov, first_step = call
        settings = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "first_step": first_step}
        sgd_(master, states[0] if momentum else None, *gradient, **settings, **options)


_RULES: dict[type[torch.optim.Optimizer], type[_AdamW | _Lion | _Sgd]] = {torch.optim.AdamW: _AdamW, Lion: _Lion, torch.optim.SGD: _Sgd}


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


class FlatOptimizer:
    """The step of `optimizer` on `pieces`: (buffer, index of the slot, piece, the 1-D parameter that the optimizer holds)."""

    writes_shards = writes_blocks = True

    @staticmethod
    def takes(optimizer: torch.optim.Optimizer, buffers: list[FlatBuffer]) -> bool:
        """Whether the kernel does what `optimizer` does, here, or its reference has to: for masters that torch could not update, and for
        state on a disk. Raises KernelError under kernels=compiled if it alone is missing."""
        if any(map(_other_arithmetic, optimizer.param_groups)):
            return False
        held = [(buffer.state_device, buffer.master_dtype, buffer.compute_dtype) for buffer in buffers]
        on_disk, without_master = any(buffer.state_on_disk for buffer in buffers), any(buffer.master is None for buffer in buffers)
        return runs_on_buffers(type(optimizer), held, on_disk=on_disk, without_master=without_master)

    @staticmethod
    def states_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        """Names of the state with one value for each element, of an optimizer that a kernel runs."""
        has_state = any(group.get("momentum", True) for group in optimizer.param_groups)
        return _RULES[type(optimizer)].states if has_state else ()

    def __init__(
        self, optimizer: torch.optim.Optimizer, pieces: list[tuple[FlatBuffer, int, Piece, nn.Parameter]], updates: HostUpdates | None
    ) -> None:
        """`updates` makes those of buffers whose masters lie in host memory."""
        self._torch, self._updates, self._rule = optimizer, updates, _RULES[type(optimizer)]
        group_of = {id(shard): index for index, group in enumerate(optimizer.param_groups) for shard in group["params"]}
        self._shards: dict[FlatBuffer, list[_Shard]] = {}
        for buffer, slot, piece, parameter in pieces:
            self._shards.setdefault(buffer, []).append(_Shard(slot, piece, parameter, group_of[id(parameter)]))
        self._extents = {b: slice(s[0].piece.shard_start, s[-1].piece.shard_stop) for b, s in self._shards.items()}
        self._moments: dict[FlatBuffer, tuple[torch.Tensor, ...]] = {}
        self._counted: list[_Shard] = []
        """What the last step has updated."""
        self._runs: dict[FlatBuffer, tuple[list[tuple[int, int]], list[tuple[_Shard, int, int]]]] = {}

    def step(self, factor: torch.Tensor, is_used: list[bool], offsets: dict[int, int]) -> None:
        """Update with gradient = `buffer.grad` * `factor`; where `factor` is not finite, nothing changes but the counts of steps
        (`take_back_count`)."""
        factor = factor.float()
        self._counted.clear()
        settings: dict[tuple[int, int], ShardRange] = {}
        for buffer, shards in self._shards.items():
            used = [shard for shard in shards if is_used[offsets[id(buffer)] + shard.slot]]
            if not used:
                continue
            extent = self._extents[buffer]
            blocks = None if buffer.blocks is None else buffer.blocks.part(extent)
            update = partial(_update, self._rule, self._ranges(buffer, used, settings), blocks)
            if buffer.state_on_disk:
                update = partial(update, None)
            else:
                master, remainder = (None if kept is None else kept[extent] for kept in (buffer.master, buffer.remainder))
                update = partial(update, remainder, (master, *self._moments_of(buffer)))
            if buffer.master_on_host:
                self._updates.submit(buffer, extent, update, factor)
            else:
                copies = buffer.shard is not buffer.master and buffer.is_written_with_master
                update(buffer.grad[extent], buffer.shard[extent] if copies else None, factor)
        self._count(1)

    def check_options(self) -> None:
        """Raises RuntimeError for an option that was set since the beginning and that the kernel does not have."""
        for group in self._torch.param_groups:
            if option := _other_arithmetic(group):
                raise RuntimeError(f"{option} was set in a group of the optimizer after the engine was made: set it before")

    def _count(self, steps: int) -> None:
        """Bring torch's counters up to date with ours."""
        torch_private.add_to_each([shard.state["step"] for shard in self._counted], steps)

    def _ranges(self, buffer: FlatBuffer, used: list[_Shard], settings: dict[tuple[int, int], ShardRange]) -> dict[Call, list[ShardRange]]:
        """By call: what is updated, in order; counted from the beginning of the buffer's extent. `settings`: by group and step."""
        self._take_over(buffer, used)
        for shard in used:
            shard.steps += 1
        self._counted += used
        calls: dict[Call, list[ShardRange]] = {}
        for shard, start, stop in self._runs_of(buffer, used):
            group, key = self._torch.param_groups[shard.group], (shard.group, shard.steps)
            if key not in settings:
                settings[key] = self._rule.range_of(group, shard.steps)
            one = settings[key]
            corrections = {"bias_correction1": one.bias_correction1, "bias_correction2_sqrt": one.bias_correction2_sqrt}
            placed = ShardRange(start=start, stop=stop, lr=one.lr, weight_decay=one.weight_decay, **corrections)
            calls.setdefault(self._rule.call_of(group, shard.steps), []).append(placed)
        return calls

    def _runs_of(self, buffer: FlatBuffer, used: list[_Shard]) -> list[tuple[_Shard, int, int]]:
        """Neighbours of one group and step, each as (the first of them, where it starts, where the last one stops). They stay the same
        from step to step while the same parameters are used."""
        key = [(shard.slot, shard.steps - used[0].steps) for shard in used]
        if self._runs.get(buffer, (None,))[0] != key:
            runs: list[tuple[_Shard, int, int]] = []
            for shard in used:
                first, (start, stop) = shard, self._located(buffer, shard)
                if runs and (runs[-1][0].group, runs[-1][0].steps) == (shard.group, shard.steps) and start - runs[-1][2] < ALIGN:
                    first, start, _ = runs.pop()
                runs.append((first, start, stop))
            self._runs[buffer] = key, runs
        return self._runs[buffer][1]

    def _located(self, buffer: FlatBuffer, shard: _Shard) -> tuple[int, int]:
        """Where `shard` lies, counted from the beginning of the buffer's extent."""
        begin = self._extents[buffer].start
        return shard.piece.shard_start - begin, shard.piece.shard_stop - begin

    def take_back_count(self) -> None:
        """The last step was skipped on the device."""
        for shard in self._counted:
            shard.steps -= 1
        self._count(-1)
        self._counted.clear()

    def adopt_state(self, buffer: FlatBuffer) -> None:
        """Take over what was loaded into the torch optimizer's state, now: it would be there twice until the next step."""
        shards = self._shards.get(buffer, [])
        for shard in shards:
            shard.state = None
        self._take_over(buffer, [shard for shard in shards if shard.parameter in self._torch.state])

    def _moments_of(self, buffer: FlatBuffer) -> tuple[torch.Tensor, ...]:
        """Where they lie on the disk, stand-ins for them."""
        if buffer not in self._moments:
            extent, like = self._extents[buffer], {"dtype": buffer.master_dtype, "device": buffer.state_device}
            on_disk = bool(buffer.state_on_disk)
            self._moments[buffer] = tuple(
                buffer.master[extent] if on_disk else torch.zeros(extent.stop - extent.start, **like) for _ in self.states_of(self._torch)
            )
        return self._moments[buffer]

    def _take_over(self, buffer: FlatBuffer, shards: list[_Shard]) -> None:
        """Make the state of those `shards` that have none of ours, from what was loaded where something was."""
        foreign = [shard for shard in shards if shard.state is None or self._torch.state.get(shard.parameter) is not shard.state]
        if not foreign:
            return
        places = [slice(*self._located(buffer, shard)) for shard in foreign]
        loaded = [self._torch.state.get(shard.parameter) or {} for shard in foreign]
        moments = dict(zip(self.states_of(self._torch), self._moments_of(buffer), strict=True))
        for key in moments:
            with self._rewriting(buffer, key, any(key in state for state in loaded)) as values:
                for state, at in zip(loaded, places, strict=True) if values is not None else ():
                    if key not in state:
                        values[at].zero_()
                    elif not is_elsewhere(state[key]):  # else it is what lies there
                        values[at].copy_(state[key])
        for shard, state, at in zip(foreign, loaded, places, strict=True):
            shard.steps = int(state.get("step", bool(state)))  # torch's SGD does not count
            shard.state = {"step": torch.tensor(float(shard.steps))} | {key: flat[at] for key, flat in moments.items()}
            self._torch.state[shard.parameter] = shard.state

    @contextmanager
    def _rewriting(self, buffer: FlatBuffer, key: str, given: bool) -> Iterator[torch.Tensor | None]:
        """The moments of `buffer`'s extent, to be changed inside; None for zeros on the disk to which nothing is `given`."""
        if not buffer.state_on_disk:
            yield self._moments_of(buffer)[self.states_of(self._torch).index(key)]
        elif not given and not buffer.stored[key].is_written:
            yield None
        else:
            with buffer.rewriting(key) as values:
                yield values[self._extents[buffer]]


def runs_on_buffers(
    kind: type[torch.optim.Optimizer],
    held: Iterable[tuple[torch.device | str, torch.dtype, torch.dtype]],
    *,
    on_disk: bool,
    without_master: bool,
) -> bool:
    """What `FlatOptimizer.takes` says of an optimizer of this `kind`. `held`: of each buffer the device of its masters, their data type
    and that of its parameters; `on_disk`, `without_master`: whether any has its state there, or parameters for masters."""
    if kind not in _RULES:
        return False
    if on_disk:
        return all(master_dtype is torch.float32 for _, master_dtype, _ in held)
    compiled = [
        library_for(_RULES[kind].function, *(torch.empty(0, dtype=dtype, device=device) for dtype in dtypes)) is not None
        for device, *dtypes in held
    ]
    return all(compiled) or without_master


def _update(
    rule: type[_AdamW | _Lion | _Sgd],
    calls: dict[Call, list[ShardRange]],
    blocks: Blocks | None,
    remainder: torch.Tensor | None,
    state: Sequence[torch.Tensor | None],
    grad: torch.Tensor,
    copy: torch.Tensor | None,
    factor: torch.Tensor,
) -> list[ShardRange]:
    """All ranges of a buffer's extent ([n] each). `state`: master and moments; `copy`: the parameters in the compute dtype, of which
    `remainder` makes masters where there is no master; `blocks`: quantised. Returns what was updated."""
    master, *moments = state
    copies = None
    if blocks is not None:
        copies = ShardCopies(quantized=blocks.q, scales=blocks.scales, block=BLOCK)
    elif copy is not None:
        copies = ShardCopies(data=copy)
    for call, ranges in calls.items():
        rule.run(call, master, moments, grad, ranges, grad_factor=factor, copies=copies, remainder=remainder)
    return [one for ranges in calls.values() for one in ranges]


def _other_arithmetic(group: dict[str, Any]) -> str | None:
    """An option of `group` that the kernel does not have."""
    if isinstance(group["lr"], torch.Tensor):
        return "an lr that is a tensor"
    return next((option for option in OTHER_ARITHMETIC if group.get(option)), None)
