"""A unit at work: its hooks gather parameters before they are needed, pass gradients on, and release.

What happens when, for one unit (a repeated block or the root):

    forward pre-hook   gather, wait; count the gradient-requiring inputs of this call
    forward hook       release (policy), and hook every gradient-requiring output
    output's grad      = the unit's backward begins: gather, wait
    parameter's grad   move it into the flat buffer, count down; at zero the unit's gradients are complete -> the engine may reduce
    inputs' grads      = nothing of this call is left to compute
    release            when the gradients are complete AND every call's inputs have their gradients

[Note: two conditions to release] A countdown of trained parameters alone frees a frozen weight (LoRA's base) while the gradient of the
unit's input still needs it; the inputs alone never fire where they need no gradient. Complete gradients start the reduction, both together
release. Where neither can be relied upon, the end of backward sweeps.

Inputs and outputs are watched by tensor hooks, not by identity autograd functions: a block may modify its inputs in place, and outputs
may be any pytree. The hook of a tensor fires when its whole gradient is there, so an input that several blocks get (an encoder's output, a
parameter of the root) is passed to each as a view of its own.

[Note: calls] The hooks keep a call in memory for as long as its graph lives. A forward whose loss was thrown away is thus forgotten,
and does not keep the parameters gathered in the next backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from framework import torch_private
from framework.zero.buffer import FlatBuffer

if TYPE_CHECKING:
    from framework.zero.engine import ZeroEngine


NOT_WHOLE = "no rank holds its whole parameters now"
_MADE_BY, _WATCHED, _OWNED = "_zero_made_by", "_zero_watched", "_zero_owned"


@dataclass(eq=False)
class _Call:
    """One forward of a unit whose backward is to come. See [Note: calls]."""

    inputs_left: int = 0
    """Inputs whose gradient is not there yet."""
    begun: bool = False
    """Whether its backward has begun."""


@dataclass
class _MadeBy:
    """Noted on an output: how the backward of the call that made it begins, and the hook that says so."""

    begin: partial
    handle: RemovableHandle


class _Hook:
    """A hook for a unit's module, and for no other that comes to have it."""

    def __init__(self, unit: Unit, call: Callable) -> None:
        self.unit, self.call = unit, call

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        return self.call(*args) if module is self.unit.module else None

    def __deepcopy__(self, memo: dict) -> Callable:
        if not self.unit.readable:
            raise RuntimeError(f"copy.deepcopy of {self.unit.title}: {NOT_WHOLE}. Copy it inside `with engine.gathered():`, on every rank")
        return no_hook

    def __reduce__(self) -> str:
        raise RuntimeError(
            f"{self.unit.title} cannot be pickled (torch.save, spawning): its parameters lie in an engine. Save engine.state_dict(), "
            "or a copy.deepcopy of it that was made inside `with engine.gathered():`, on every rank"
        )


def is_owned(parameter: nn.Parameter) -> bool:
    """Whether a unit has it. The mark of one that was unpickled is that of another."""
    return getattr(parameter, _OWNED, None) == id(parameter)


def no_hook(*_: Any) -> None:
    """What the deep copy of a unit, an ordinary module, has in the place of the unit's hooks."""


class Unit:
    """One module with its flat buffers."""

    def __init__(self, engine: ZeroEngine, name: str, module: nn.Module, buffers: list[FlatBuffer]) -> None:
        self.engine, self.name, self.module, self.buffers = engine, name, module, buffers
        self.trained = [buffer for buffer in buffers if buffer.layout.requires_grad]
        self.keepers: set[object] = set()
        """Who wants the parameters to stay gathered (`by_hand.py`)."""
        self._nodes = []
        self._hooks: list[Any] = []
        self.end_pass()
        for parameter in self._parameters():
            setattr(parameter, _OWNED, id(parameter))
        for buffer in self.trained:
            for index, parameter in enumerate(buffer.parameters):
                self._nodes.append(torch_private.accumulate_node(parameter))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._grad_hook(buffer, index)))
        if name:  # the engine enters the root itself: at its forward and at wrapped methods
            self._hooks.append(module.register_forward_pre_hook(self.only_mine(self.enter), with_kwargs=True, prepend=True))
            self._hooks.append(module.register_forward_hook(self.only_mine(lambda args, out: self.leave(out))))
        self._hooks.append(module.register_state_dict_pre_hook(self.only_mine(self._before_state_dict)))
        self._hooks.append(module.register_load_state_dict_pre_hook(self.only_mine(self._before_load_state_dict)))

    def only_mine(self, hook: Callable) -> Callable:
        """`hook` for this unit's module and not for copies of it."""
        return _Hook(self, hook)

    @property
    def title(self) -> str:
        """In messages."""
        return self.name or "the model"

    def end_pass(self) -> None:
        """Forget the calls of the last forward and backward."""
        self.pending: int | None = None
        """Trained parameters whose gradient the running backward will still produce; None before it has begun."""
        self._calls: WeakSet[_Call] = WeakSet()
        self._open: list[_Call] = []
        """Calls whose forward has not ended."""

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters():
            delattr(parameter, _OWNED)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(buffer.parameters for buffer in self.buffers)

    # -- parameters -----------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        for buffer in self.buffers:
            buffer.gather()

    def wait(self) -> None:
        for buffer in self.buffers:
            buffer.wait()

    def release(self, *, before_backward: bool = False) -> None:
        if self.keepers:
            return
        for buffer in self.buffers:
            buffer.release(before_backward=before_backward)

    @property
    def readable(self) -> bool:
        """Whether this rank holds the whole, current parameters."""
        return all(buffer.readable for buffer in self.buffers)

    @property
    def needs_gather(self) -> bool:
        return any(buffer.needs_gather for buffer in self.buffers)

    @property
    def is_updating(self) -> bool:
        """Whether hosts may be updating it: the update of the last step has not been waited for."""
        return any(buffer.may_be_updating for buffer in self.buffers)

    @property
    def gather_bytes(self) -> int:
        """Memory that a gather would take, in bytes."""
        return sum(buffer.gather_bytes for buffer in self.buffers)

    @property
    def held_bytes(self) -> int:
        """Memory that a release would free, in bytes."""
        return sum(buffer.held_bytes for buffer in self.buffers)

    @property
    def permanent(self) -> bool:
        """Whether the parameters are never released."""
        return all(buffer.permanent for buffer in self.buffers)

    def _before_state_dict(self, *_: Any) -> None:
        if not self.engine.names_only and not self.readable:
            raise RuntimeError(
                f"state_dict() of {self.title}: {NOT_WHOLE}. Use dict(engine.full_tensors()) or engine.state_dict(), on every rank, or "
                "call it inside `with engine.gathered():`"
            )

    def _before_load_state_dict(self, *_: Any) -> None:
        raise RuntimeError(
            f"load_state_dict() of {self.title} would not reach the engine's masters: load before the engine is made, or use "
            "engine.load_state_dict"
        )

    # -- forward --------------------------------------------------------------------------------------------------------------

    def enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Before the module's forward; returns what replaces its arguments, or None."""
        recompute = torch_private.backward_id() >= 0
        self.engine.prefetch.use(self, recompute=recompute)
        if recompute:
            return None
        call = _Call()
        self._open.append(call)
        if not self.name or not torch.is_grad_enabled():  # the root is released by the end of backward
            return None
        views: dict[int, torch.Tensor] = {}

        def of_its_own(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad or not (value.is_leaf or hasattr(value, _WATCHED)):
                return value
            if id(value) not in views:
                views[id(value)] = value.view_as(value)
            return views[id(value)]

        args, kwargs = tuple(map(of_its_own, args)), {name: of_its_own(value) for name, value in kwargs.items()}
        inputs = {id(t): t for t in torch_private.tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor) and t.requires_grad}
        call.inputs_left = len(inputs)
        for tensor in inputs.values():
            if not tensor.is_leaf:  # a leaf inside a list or dict would keep its hook for ever: the end of backward releases
                self._watch_input(tensor, call)
        return args, kwargs

    def _watch_input(self, tensor: torch.Tensor, call: _Call) -> None:
        """Hook `tensor` so that this call is done before the one that made it begins: the one unit can be released before the other is
        gathered."""
        setattr(tensor, _WATCHED, True)
        made_by = getattr(tensor, _MADE_BY, None)
        if made_by is not None:
            made_by.handle.remove()
        tensor.register_hook(partial(self._input_done, call))
        if made_by is not None:
            made_by.handle = tensor.register_hook(made_by.begin)

    def leave(self, out: Any) -> Any:
        """After a block's forward; returns what replaces `out`, or None."""
        if torch_private.backward_id() >= 0:  # activation checkpointing recomputes: the parameters are about to be used
            return None
        replaced = self.watch_outputs(out)
        if not torch.is_grad_enabled() or not self.engine.prefetch.follows_itself(self):
            self.release(before_backward=torch.is_grad_enabled())
        return replaced

    def watch_outputs(self, out: Any) -> Any:
        """Hook the outputs, so that this unit's backward is seen to begin; returns what replaces `out`, or None."""
        begin = partial(self._begin_backward, call := self._open.pop() if self._open else _Call())
        if not torch.is_grad_enabled():
            return None
        leaves, spec = torch_private.tree_flatten(out)
        replaced = False
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                self._check_leaf(leaf)
            elif leaf.requires_grad:
                if torch_private.is_view(leaf) and not self.permanent:
                    leaf = leaves[index] = leaf.clone()  # torch drops the hooks of a view that is later changed in place
                    replaced = True
                setattr(leaf, _MADE_BY, _MadeBy(begin, leaf.register_hook(begin)))
                self._calls.add(call)
        return torch_private.tree_unflatten(leaves, spec) if replaced else None

    def _check_leaf(self, leaf: Any) -> None:
        if not self.permanent and not isinstance(leaf, str | bytes | int | float | bool | type(None)) and hasattr(leaf, "__dict__"):
            if any(isinstance(value, torch.Tensor) and value.requires_grad for value in vars(leaf).values()):
                raise TypeError(
                    f"{self.title} returned a {type(leaf).__name__} that holds tensors and is no pytree, so their backward "
                    "cannot be seen: return tensors, tuples, lists or dicts, or register the class with "
                    "torch.utils._pytree.register_pytree_node"
                )

    # -- backward -------------------------------------------------------------------------------------------------------------

    def expect(self) -> None:
        """At the beginning of a backward: count the gradients that it will produce here."""
        self.pending = sum(torch_private.will_execute(node) for node in self._nodes)

    def _begin_backward(self, call: _Call, grad: torch.Tensor) -> None:
        self.engine.begin_backward()
        call.begun = True
        if call not in self._calls:  # of a backward before, whose graph was kept: what it needs now is unknown, the end releases
            call.inputs_left = sys.maxsize
            self._calls.add(call)
        self.engine.prefetch.use(self)

    def _grad_hook(self, buffer: FlatBuffer, index: int):
        def take(parameter: nn.Parameter) -> None:
            self.engine.begin_backward()
            buffer.take_grad(index, by_hand=self.engine.by_hand is not None)
            self.pending -= 1
            if not self.pending:
                self._advance()

        return take

    def _input_done(self, call: _Call, grad: torch.Tensor) -> None:
        self.engine.begin_backward()
        call.inputs_left -= 1
        self._advance()

    def _advance(self) -> None:
        if self.pending:
            return
        self.engine.reduce_complete_units()
        if self.name and self._calls and all(call.begun and call.inputs_left <= 0 for call in self._calls):
            self.release()
            self.engine.prefetch.ahead()
