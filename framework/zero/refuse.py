"""What was done behind the engine's back, or went wrong in a step, and would otherwise train or save something else, silently.

Each function raises an error that says what happened and what to write instead, or returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from framework.zero import norm
from framework.zero.layout import INTEGERS
from framework.zero.norm import NonFiniteError
from framework.zero.unit import is_owned

if TYPE_CHECKING:
    from framework.zero.engine import ZeroEngine


def unfit_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    """Those of a module, by name, that no engine can have, or another one has."""
    for name, parameter in parameters.items():
        if not (parameter.is_floating_point() or parameter.dtype in INTEGERS):
            raise TypeError(
                f"{name} is of {parameter.dtype}; an engine's parameters are real floating-point or, frozen, integers: make it a buffer"
            )
        if is_owned(parameter):
            raise ValueError(
                f"{name} is in an engine already, which would take its gradients: build the model anew, or give this engine a deep copy "
                "that was made inside `with engine.gathered():`"
            )


def moved_or_thawed(engine: ZeroEngine) -> None:
    """Parameters that are no longer the engine's, or that it has no gradients for."""
    for buffer in engine.buffers:
        if buffer.moved:
            raise RuntimeError(
                f"{buffer.layout.slots[0].name} is no longer in the engine's memory: the module was moved or cast. Do that before the "
                "engine is made; its data type is PrecisionConfig.compute_dtype"
            )
        for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True):
            if parameter.requires_grad and not buffer.layout.requires_grad:
                raise RuntimeError(
                    f"{slot.name} was frozen when the engine was made and has neither a gradient nor optimizer state there: set "
                    "requires_grad before (freezing later is fine, and so is thawing what was frozen later)"
                )


def assigned_gradients(engine: ZeroEngine) -> None:
    """Gradients that somebody assigned to `p.grad`, where a step would pass over them, and a manual step that has not ended."""
    if engine.by_hand is not None:
        raise RuntimeError("engine.step() inside `with engine.manual():`, whose end reduces the gradients: leave it before")
    for buffer in engine.trained:
        for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True):
            if parameter.grad is not None:
                raise RuntimeError(
                    f"{slot.name}.grad was assigned by hand and would not be trained on: assign it inside `with engine.manual():`, or set "
                    "it to None"
                )


def torn_update(engine: ZeroEngine) -> None:
    """An update that an exception left in the middle."""
    if engine.updating:
        raise RuntimeError(
            f"an exception came in the middle of the update of step {engine.steps_done + 1}, so some parameters are new and some old: load "
            "a checkpoint (engine.load_state_dict)"
        )


def not_finite(engine: ZeroEngine, sums: norm.GlobalSums) -> None:
    """A step whose sums say that it must not be made; the engine is reset. Never returns."""
    number = engine.steps_done + 1
    if not bool(sums.same_order):
        engine.reset()
        raise RuntimeError(f"step {number}: {norm.NOT_THE_SAME_ORDER}; nothing was updated")
    if not (tokens := float(sums.tokens)) > 0:
        engine.reset()
        why = f"the micro-batches of all ranks have {tokens:g} tokens" if tokens else "no micro-batch of any rank had a trained token"
        raise ValueError(f"step {number}: {why}; nothing was updated")
    where = norm.where_not_finite(engine.trained, engine.world, engine.loss_sum)
    engine.reset()
    raise NonFiniteError(f"step {number}: {where}; parameters and optimizer are those of before this step")
