"""The engine's state as whole tensors, unit by unit: for export, for saving in one file, and for loading under any stage and world size.

Collectives: every rank calls these at the same time; whole tensors appear on rank 0 only, in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from framework.zero.buffer import FlatBuffer
from framework.zero.eight_bit import dequantized, readable
from framework.zero.layout import Piece
from framework.zero.state_keys import kind_of, part

if TYPE_CHECKING:
    from framework.zero.engine import ZeroEngine


def full_tensors(engine: ZeroEngine, *, trained_only: bool = False) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name, whole parameter) in layout order: trained ones from the fp32 masters, frozen ones in the compute dtype; a tied
    parameter once, under its first name. At most one unit is held at a time; ranks other than 0 get None."""
    engine.check_last_step()
    for buffer in engine.trained if trained_only else engine.buffers:
        yield from _whole(engine, buffer, buffer.masters())


def state_dict(engine: ZeroEngine) -> dict[str, Any]:
    """{"model": {name: tensor}, "optimizer": {name: {key: tensor}}, "param_groups": [options], "step": int} on rank 0, empty elsewhere;
    for float16 also {"loss_scaler": its state}.

    Optimizer state with one value for each element has its parameter's shape ([1] for a 0-d one), and is fp32 where the optimizer keeps
    it in 8 bits; all else is kept as it is (a step count). What compression left over of gradients is forgotten, see `wire` [Note: error
    feedback].
    """
    model = dict(full_tensors(engine))
    for buffer in engine.trained:
        buffer.scale_residuals(0)
    scalars: dict[str, dict[str, Any]] = {}
    flat: dict[str, set[str]] = {}
    by_buffer: dict[int, list] = {}
    sharded = engine.sharded_optimizer
    for buffer, piece, state in sharded.state_pieces() if sharded else ():
        state = readable(state)
        by_buffer.setdefault(id(buffer), []).append((piece, state))
        for key, value in state.items():
            if isinstance(value, partial) or kind_of(key, value, piece.numel) == "element":
                flat.setdefault(piece.slot.name, set()).add(key)
            else:
                scalars.setdefault(piece.slot.name, {})[key] = value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
    states: dict[str, dict[str, Any]] = {}
    flat_keys: dict[str, set[str]] = {}
    for found, keys_of in engine.world.gather_objects((scalars, flat)):  # a rank knows of the parameters that it has pieces of
        for name, values in found.items():
            states.setdefault(name, {}).update(values)
        for name, keys in keys_of.items():
            flat_keys.setdefault(name, set()).update(keys)
    for buffer in engine.trained:
        for key in sorted(set().union(*(flat_keys.get(slot.name, ()) for slot in buffer.layout.slots))):
            on_disk, own = key in buffer.stored, {"dtype": buffer.master_dtype, "device": buffer.state_device}
            shard = buffer.read_stored(key) if on_disk else torch.zeros(buffer.shard_numel, **own)
            for piece, state in by_buffer.get(id(buffer), ()):
                if key in state and not on_disk:
                    shard[piece.shard_start : piece.shard_stop].copy_(state[key]() if isinstance(state[key], partial) else state[key])
            for name, tensor in _whole(engine, buffer, shard):
                if tensor is not None and key in flat_keys.get(name, ()):
                    states.setdefault(name, {})[key] = tensor if tensor.dim() else tensor.view(1)
    if engine.world.rank:
        return {}
    scaling = {} if engine.scaler is None else {"loss_scaler": engine.scaler.state_dict()}
    options = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups] if sharded else []
    return {"model": model, "optimizer": states, "param_groups": options, "step": engine.steps_done} | scaling


def load_state_dict(engine: ZeroEngine, state: dict[str, Any]) -> None:
    """Take what `state_dict` gave, on every rank, under any stage and world size.

    Raises KeyError for missing or unexpected parameters and other shapes, ValueError for another number of groups, before anything changes.
    """
    shapes = {slot.name: slot.shape for buffer in engine.buffers for slot in buffer.layout.slots}
    missing, unexpected = shapes.keys() - state["model"].keys(), state["model"].keys() - shapes.keys()
    if missing or unexpected:
        raise KeyError(f"state does not fit the model: missing {sorted(missing)[:5]}, unexpected {sorted(unexpected)[:5]}")
    for name, shape in shapes.items():
        if (got := state["model"][name].shape) != shape:
            raise KeyError(f"{name}: got shape {tuple(got)}, expected {tuple(shape)}")
    if engine.sharded_optimizer is not None and len(state["param_groups"]) != (groups := len(engine.optimizer.param_groups)):
        raise ValueError(f"the optimizer has {groups} groups, those of another one were saved: {len(state['param_groups'])}")
    for buffer in engine.trained:
        buffer.forget_update()
    for buffer in engine.buffers:
        with buffer.rewriting() as target:
            for piece in buffer.pieces:
                whole = state["model"][piece.slot.name].reshape(-1)
                target[piece.shard_start : piece.shard_stop].copy_(whole[piece.start : piece.stop])
        buffer.publish()
        buffer.scale_residuals(0)

    def of_piece(piece: Piece) -> dict[str, Any] | None:
        saved = state["optimizer"].get(piece.slot.name)
        return None if saved is None else {key: part(key, value, piece) for key, value in saved.items()}

    if engine.sharded_optimizer is not None:
        load_optimizer(engine, state["param_groups"], of_piece)
    engine.steps_done = state["step"]
    if engine.scaler is not None and "loss_scaler" in state:
        engine.scaler.load_state_dict(state["loss_scaler"])


def load_optimizer(engine: ZeroEngine, groups: list[dict[str, Any]], of_piece: Callable[[Piece], dict[str, Any] | None]) -> None:
    """Set the options of the optimizer's groups, and its state to `of_piece(piece)`: None where a parameter has none yet, else tensors with
    one value for each element of the piece, tensors with one value, and numbers. The tensors are the engine's from then on; those of one
    buffer are in memory at a time."""
    sharded = engine.sharded_optimizer
    sharded.torch.state.clear()
    for group, options in zip(sharded.torch.param_groups, groups, strict=True):
        group.update(options)
    on_device = {id(shard) for group in sharded.torch.param_groups if _steps_on_device(group) for shard in group["params"]}
    for buffer, pieces in groupby(sharded.pieces, key=lambda entry: entry[0]):
        for _, _, piece, shard in pieces:
            if (loaded := of_piece(piece)) is None:
                continue
            scalar_device = shard.device if id(shard) in on_device else torch.device("cpu")

            def placed(
                key: str, value: Any, piece: Piece = piece, shard: torch.Tensor = shard, device: torch.device = scalar_device
            ) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                if kind_of(key, value, piece.numel) == "number":
                    return value.to(device, copy=True)
                return value.to(shard.device, shard.dtype if value.is_floating_point() else value.dtype)

            loaded = loaded if sharded.keeps_8_bits else dequantized(loaded)
            sharded.torch.state[shard] = {key: placed(key, value) for key, value in loaded.items()}
        sharded.adopt_state(buffer)
    engine.count_optimizer_state()


def _steps_on_device(group: dict[str, Any]) -> bool:
    """Whether torch keeps step counts of this group beside the parameters; it keeps others on the CPU."""
    return bool(group.get("fused") or group.get("capturable"))


def _whole(engine: ZeroEngine, buffer: FlatBuffer, shard: torch.Tensor) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Gather `shard` [S] of every rank and yield the parameters' parts on rank 0."""
    full = buffer.gather_whole(shard)
    for slot in buffer.layout.slots:
        yield slot.name, full[slot.offset : slot.stop].view(slot.shape).cpu() if engine.world.rank == 0 else None
