"""Using an engine by hand: other methods as entries, whole parameters to look at or change, and micro-batches in an order of one's own.

    engine.wrap_method(model, "generate")                        # an entry like `engine.module(...)`
    with engine.gathered(model.embed): ...                       # whole on every rank, in the data type that the model computes in
    with engine.gathered(model.embed, modify=True): ...          # what rank 0 changes holds on every rank
    with engine.manual() as step: ...                            # pipeline schedules; then `engine.step()`

[Note: manual steps] A schedule runs forward and backward of several micro-batches in any order (1F1B), or computes the gradients of inputs
first and those of weights later (zero-bubble, arXiv:2401.10241), where they are assigned to `p.grad` and no hook fires. So inside `manual`
blocks are gathered at their first use and stay, at every stage; gradients are added up whole, whoever made them; leaving reduces once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from framework import torch_private
from framework.zero import refuse
from framework.zero.buffer import FlatBuffer
from framework.zero.comm import Comm

if TYPE_CHECKING:
    from framework.zero.engine import ZeroEngine
    from framework.zero.unit import Unit

Chosen = nn.Module | nn.Parameter | Iterable[nn.Module | nn.Parameter]


def wrap_method(engine: ZeroEngine, module: nn.Module, name: str) -> None:
    """See `ZeroEngine.wrap_method`."""
    method: Callable = getattr(module, name)
    bound = inspect.ismethod(method) and method.__self__ is module
    function = method.__func__ if bound else wraps(method)(lambda _, *args, **kwargs: method(*args, **kwargs))
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        raise TypeError(f"{name} is asynchronous, and an engine's units run in one order: wrap what it awaits")

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not module:  # a deep copy, which is an ordinary module
            return function(self, *args, **kwargs)
        engine.enter(args, kwargs)
        out = None
        try:
            out = function(self, *args, **kwargs)
        finally:
            replaced = engine.leave(out)
        return out if replaced is None else replaced

    def generated(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if self is not module:
            return (yield from function(self, *args, **kwargs))
        engine.enter(args, kwargs)
        try:
            return (yield from function(self, *args, **kwargs))
        finally:
            engine.leave(None)

    entered = generated if inspect.isgeneratorfunction(method) else called
    setattr(module, name, MethodType(wraps(function)(entered), module))


@contextmanager
def gathered(engine: ZeroEngine, chosen: Chosen | None, modify: bool) -> Iterator[nn.Module]:
    """See `ZeroEngine.gathered`."""
    units, token = _owners(engine, chosen), object()
    buffers = [buffer for unit in units for buffer in unit.buffers]
    parameters = [(slot, p) for buffer in buffers for slot, p in zip(buffer.layout.slots, buffer.parameters, strict=True)]
    try:
        for unit in units:
            unit.keepers.add(token)
            unit.gather()
        for unit in units:
            unit.wait()
        versions = [torch_private.version(parameter) for _, parameter in parameters]
        before = [_own_part(buffer).clone() for buffer in buffers] if modify else []
        steps = engine.steps_done
        try:
            yield engine.module
        except BaseException:
            for buffer, values in zip(buffers, before, strict=modify):
                if buffer.permanent:  # others lose the changes with what they gathered
                    _own_part(buffer).copy_(values)
                buffer.publish(written=True)
            raise
        if modify and engine.steps_done != steps:
            raise RuntimeError("engine.step() inside engine.gathered(modify=True): both may have changed the same parameters")
        if modify:
            engine.wait_for_readers()
            for buffer, values in zip(buffers, before, strict=True):
                _adopt(buffer, values, engine.world)
            return
        changed = [slot.name for (slot, p), version in zip(parameters, versions, strict=True) if torch_private.version(p) != version]
        if changed:
            raise RuntimeError(
                f"{changed[0]} was changed inside engine.gathered(), and the change may be on this rank alone or lost: write "
                "engine.gathered(..., modify=True) to make it rank 0's on every rank"
            )
    finally:
        for unit in units:
            unit.keepers.discard(token)
            unit.release()


def _owners(engine: ZeroEngine, chosen: Chosen | None) -> list[Unit]:
    """The units that hold `chosen`, in the order of the engine. Raises ValueError for what is not the engine's."""
    if chosen is None:
        return engine.units
    wanted: set[int] = set()
    for item in [chosen] if isinstance(chosen, nn.Module | nn.Parameter) else chosen:
        wanted |= {id(p) for p in item.parameters()} if isinstance(item, nn.Module) else {id(item)}
    held = {id(p): unit for unit in engine.units for buffer in unit.buffers for p in buffer.parameters}
    if not wanted <= held.keys():
        raise ValueError("engine.gathered: got a parameter that is not one of the engine's module (was it made or replaced later?)")
    owners = {id(held[key]) for key in wanted}
    return [unit for unit in engine.units if id(unit) in owners]


def _own_part(buffer: FlatBuffer) -> torch.Tensor:
    """This rank's part of the gathered parameters [S]."""
    return buffer.alias[buffer.start : buffer.start + buffer.shard_numel]


@torch.no_grad()
def _adopt(buffer: FlatBuffer, before: torch.Tensor, world: Comm) -> None:
    """Make rank 0's gathered parameters those of every rank. A master changes only where its parameter differs from `before` [S]: in
    half precision it is finer than what can be seen of it."""
    for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True):
        view = buffer.view(slot).data
        if parameter.data_ptr() != view.data_ptr():  # `p.data = ...`
            if parameter.shape != slot.shape:
                raise ValueError(f"{slot.name}: got shape {tuple(parameter.shape)}, expected {tuple(slot.shape)}")
            view.copy_(parameter)
            parameter.data = view
    world.broadcast(buffer.alias)
    now, exact = _own_part(buffer), buffer.master is buffer.shard and not buffer.stored and buffer.gathers_exactly
    if not exact:
        with buffer.rewriting() as masters:
            differs = (now != before).to(masters.device)
            masters.copy_(torch.where(differs, now.to(masters.device, masters.dtype), masters))
    elif not buffer.permanent:
        buffer.shard.copy_(now)
    buffer.publish(written=exact)


class ManualStep:
    """What a schedule may ask for inside `engine.manual()`. See [Note: manual steps]."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine

    def gather(self) -> None:
        """All parameters now, not at their first use. Collective."""
        for unit in self._engine.units:
            unit.gather()
        for unit in self._engine.units:
            unit.wait()

    def release(self) -> None:
        """Free the gathered parameters of stage 3 until a forward or the backward of an output uses them.

        The gradients of weights alone begin at neither: those of linear layers need no parameters; for others (norms) `gather` first.
        """
        for unit in self._engine.units:
            if unit.keepers == {self}:
                for buffer in unit.buffers:
                    buffer.release()

    def collect(self) -> None:
        """Take what was assigned to `p.grad`, which is None again; leaving `manual` does it, too."""
        for buffer in self._engine.trained:
            for index in range(len(buffer.parameters)):
                buffer.take_grad(index, by_hand=True)


@contextmanager
def manual(engine: ZeroEngine) -> Iterator[ManualStep]:
    """See `ZeroEngine.manual`."""
    if engine.by_hand is not None:
        raise RuntimeError("engine.manual() inside engine.manual()")
    refuse.moved_or_thawed(engine)
    step = ManualStep(engine)
    try:
        engine.by_hand = step
        for unit in engine.units:
            unit.keepers.add(step)
        yield step
        step.collect()
        engine.reduce_all()
    except BaseException:
        engine.reset()
        raise
    finally:
        engine.by_hand = None
        for unit in engine.units:
            unit.keepers.discard(step)
            unit.release()
