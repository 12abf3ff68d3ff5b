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
may be any pytree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from framework.zero import compat
from framework.zero.buffer import FlatBuffer
from framework.zero.policy import SHARDED

if TYPE_CHECKING:
    from framework.zero.engine import ZeroEngine


_MADE_BY = "_zero_made_by"


@dataclass
class _MadeBy:
    """Noted on an output: the unit whose backward begins with it, and the hook that says so."""

    unit: Unit
    handle: RemovableHandle


class Unit:
    """One module with its flat buffers."""

    def __init__(self, engine: ZeroEngine, name: str, module: nn.Module, buffers: list[FlatBuffer]) -> None:
        self.engine, self.name, self.module, self.buffers = engine, name, module, buffers
        self.trained = [buffer for buffer in buffers if buffer.layout.requires_grad]
        self._nodes = []
        self._hooks: list[Any] = []
        self.begin_pass()
        for buffer in self.trained:
            for index, parameter in enumerate(buffer.parameters):
                self._nodes.append(compat.accumulate_node(parameter))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._grad_hook(buffer, index)))
        if name:  # the engine enters the root itself: at its forward and at wrapped methods
            self._hooks.append(
                module.register_forward_pre_hook(lambda _, args, kwargs: self.enter(args, kwargs), with_kwargs=True, prepend=True)
            )
            self._hooks.append(module.register_forward_hook(lambda _, args, out: self.leave(out)))

    def begin_pass(self) -> None:
        """Forget the calls of the last forward and backward."""
        self.pending: int | None = None
        """Trained parameters whose gradient the running backward will still produce; None before it has begun."""
        self._calls = self._begun = self._inputs_left = 0

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    # -- parameters -----------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        for buffer in self.buffers:
            buffer.gather()

    def wait(self) -> None:
        for buffer in self.buffers:
            buffer.wait()

    def release(self) -> None:
        for buffer in self.buffers:
            buffer.release()

    @property
    def needs_gather(self) -> bool:
        return any(buffer.needs_gather for buffer in self.buffers)

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

    # -- forward --------------------------------------------------------------------------------------------------------------

    def enter(self, args: tuple, kwargs: dict) -> None:
        """Before the module's forward."""
        recompute = compat.backward_id() >= 0
        self.engine.prefetch.use(self, recompute=recompute)
        if recompute or not torch.is_grad_enabled():
            return
        self._calls += 1
        watched = {id(t): t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor) and t.requires_grad}
        self._inputs_left += len(watched)
        for tensor in watched.values():
            self._watch_input(tensor)

    def _watch_input(self, tensor: torch.Tensor) -> None:
        """Hook `tensor` so that this unit is done before the unit that made it begins: the one can be released before the other is
        gathered."""
        made_by = getattr(tensor, _MADE_BY, None)
        if made_by is not None:
            made_by.handle.remove()
        tensor.register_hook(self._input_done)
        if made_by is not None:
            made_by.handle = tensor.register_hook(made_by.unit._begin_backward)

    def leave(self, out: Any) -> Any:
        """After a block's forward; returns what replaces `out`, or None."""
        if compat.backward_id() >= 0:  # activation checkpointing recomputes: the parameters are about to be used
            return None
        replaced = self.watch_outputs(out)
        if not torch.is_grad_enabled() or (self.engine.policy.params_kept is SHARDED and not self.engine.prefetch.follows_itself(self)):
            self.release()
        return replaced

    def watch_outputs(self, out: Any) -> Any:
        """Hook the outputs, so that this unit's backward is seen to begin; returns what replaces `out`, or None."""
        if not torch.is_grad_enabled():
            return None
        leaves, spec = tree_flatten(out)
        replaced = False
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                self._check_leaf(leaf)
            elif leaf.requires_grad:
                if compat.is_view(leaf) and not self.permanent:
                    leaf = leaves[index] = leaf.clone()  # torch drops the hooks of a view that is later changed in place
                    replaced = True
                setattr(leaf, _MADE_BY, _MadeBy(self, leaf.register_hook(self._begin_backward)))
        return tree_unflatten(leaves, spec) if replaced else None

    def _check_leaf(self, leaf: Any) -> None:
        if not self.permanent and not isinstance(leaf, str | bytes | int | float | bool | type(None)) and hasattr(leaf, "__dict__"):
            if any(isinstance(value, torch.Tensor) and value.requires_grad for value in vars(leaf).values()):
                raise TypeError(
                    f"{self.name or 'the model'} returned a {type(leaf).__name__} that holds tensors and is no pytree, so their backward "
                    "cannot be seen: return tensors, tuples, lists or dicts, or register the class with "
                    "torch.utils._pytree.register_pytree_node"
                )

    # -- backward -------------------------------------------------------------------------------------------------------------

    def expect(self) -> None:
        """At the beginning of a backward: count the gradients that it will produce here."""
        self.pending = sum(compat.will_execute(node) for node in self._nodes)

    def _begin_backward(self, grad: torch.Tensor) -> None:
        self.engine.begin_backward()
        self._begun += 1
        self.engine.prefetch.use(self)

    def _grad_hook(self, buffer: FlatBuffer, index: int):
        def take(parameter: nn.Parameter) -> None:
            self.engine.begin_backward()
            buffer.take_grad(index)
            self.pending -= 1
            self._advance()

        return take

    def _input_done(self, grad: torch.Tensor) -> None:
        self.engine.begin_backward()
        self._inputs_left -= 1
        self._advance()

    def _advance(self) -> None:
        if self.pending:
            return
        self.engine.reduce_complete_units()
        # `_calls == 0`: a second backward through a kept graph; what it still needs is unknown, the end of backward releases.
        if self.name and self._calls and self._begun >= self._calls and self._inputs_left <= 0:
            self.release()
            self.engine.prefetch.ahead()
