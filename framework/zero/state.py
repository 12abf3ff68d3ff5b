"""The engine's state as whole tensors, unit by unit: for export, for saving in one file, and for loading under any stage and world size.

Collectives: every rank calls these at the same time; whole tensors appear on rank 0 only, in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from framework.zero.buffer import FlatBuffer
from framework.zero.layout import Piece

if TYPE_CHECKING:
    from framework.zero.engine import ZeroEngine


def full_tensors(engine: ZeroEngine, *, trained_only: bool = False) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name, whole parameter) in layout order: trained ones from the fp32 masters, frozen ones in the compute dtype; a tied
    parameter once, under its first name. At most one unit is held at a time; ranks other than 0 get None."""
    engine.check_last_step()
    for buffer in engine.trained if trained_only else engine.buffers:
        source = buffer.master if buffer.layout.requires_grad else buffer.shard
        yield from _whole(engine, buffer, source)


def state_dict(engine: ZeroEngine) -> dict[str, Any]:
    """{"model": {name: tensor}, "optimizer": {name: {key: tensor}}, "param_groups": [options], "step": int} on rank 0, empty elsewhere;
    for float16 also {"loss_scaler": its state}.

    Optimizer state with one value for each element has its parameter's shape ([1] for a 0-d one); all else is kept as it is (a step count).
    What compression left over of gradients is forgotten, see `wire` [Note: error feedback].
    """
    model = dict(full_tensors(engine))
    for buffer in engine.trained:
        buffer.scale_residuals(0)
    scalars: dict[str, dict[str, Any]] = {}
    flat: dict[str, set[str]] = {}
    by_buffer: dict[int, list] = {}
    sharded = engine.sharded_optimizer
    for buffer, piece, state in sharded.state_pieces() if sharded else ():
        by_buffer.setdefault(id(buffer), []).append((piece, state))
        for key, value in state.items():
            if _is_flat(value, piece):
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
            shard = torch.zeros_like(buffer.master)
            for piece, state in by_buffer.get(id(buffer), ()):
                if key in state:
                    shard[piece.shard_start : piece.shard_stop].copy_(state[key])
            for name, tensor in _whole(engine, buffer, shard):
                if tensor is not None and key in flat_keys.get(name, ()):
                    states.setdefault(name, {})[key] = tensor if tensor.dim() else tensor.view(1)
    if engine.world.rank:
        return {}
    scaling = {} if engine.scaler is None else {"loss_scaler": engine.scaler.state_dict()}
    options = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups] if sharded else []
    return {"model": model, "optimizer": states, "param_groups": options, "step": engine.steps_done} | scaling


def load_state_dict(engine: ZeroEngine, state: dict[str, Any]) -> None:
    """Take what `state_dict` gave, on every rank, under any stage and world size. Raises KeyError for missing or unexpected parameters."""
    expected = {slot.name for buffer in engine.buffers for slot in buffer.layout.slots}
    missing, unexpected = expected - state["model"].keys(), state["model"].keys() - expected
    if missing or unexpected:
        raise KeyError(f"state does not fit the model: missing {sorted(missing)[:5]}, unexpected {sorted(unexpected)[:5]}")
    for buffer in engine.buffers:
        target = buffer.master if buffer.layout.requires_grad else buffer.shard
        for piece in buffer.pieces:
            whole = state["model"][piece.slot.name]
            if whole.shape != piece.slot.shape:
                raise KeyError(f"{piece.slot.name}: got shape {tuple(whole.shape)}, expected {tuple(piece.slot.shape)}")
            target[piece.shard_start : piece.shard_stop].copy_(whole.reshape(-1)[piece.start : piece.stop])
        buffer.publish()
        buffer.scale_residuals(0)

    def of_piece(piece: Piece) -> dict[str, Any] | None:
        saved = state["optimizer"].get(piece.slot.name)
        return None if saved is None else {key: _part(value, piece) for key, value in saved.items()}

    if engine.sharded_optimizer is not None:
        load_optimizer(engine, state["param_groups"], of_piece)
    engine.steps_done = state["step"]
    if engine.scaler is not None and "loss_scaler" in state:
        engine.scaler.load_state_dict(state["loss_scaler"])


def load_optimizer(engine: ZeroEngine, groups: list[dict[str, Any]], of_piece: Callable[[Piece], dict[str, Any] | None]) -> None:
    """Set the options of the optimizer's groups, and its state to `of_piece(piece)`: None where a parameter has none yet, else tensors with
    one value for each element of the piece, tensors with one value, and numbers. The tensors are the engine's from then on."""
    sharded = engine.sharded_optimizer
    sharded.torch.state.clear()
    for group, options in zip(sharded.torch.param_groups, groups, strict=True):
        group.update(options)
    on_device = {id(shard) for group in sharded.torch.param_groups if _steps_on_device(group) for shard in group["params"]}
    for _, _, piece, shard in sharded.pieces:
        if (loaded := of_piece(piece)) is None:
            continue
        scalar_device = shard.device if id(shard) in on_device else torch.device("cpu")
        sharded.torch.state[shard] = {
            key: (value.to(shard.device, shard.dtype) if _is_flat(value, piece) else value.to(scalar_device, copy=True))
            if isinstance(value, torch.Tensor)
            else value
            for key, value in loaded.items()
        }
    sharded.adopt_state()


def _part(value: Any, piece: Piece) -> Any:
    """Of one saved value of a parameter's optimizer state, a copy of what belongs to `piece`."""
    if isinstance(value, torch.Tensor) and value.dim() and value.numel() == piece.slot.numel:
        return value.reshape(-1)[piece.start : piece.stop].clone()
    return value


def _steps_on_device(group: dict[str, Any]) -> bool:
    """Whether torch keeps step counts of this group beside the parameters; it keeps others on the CPU."""
    return bool(group.get("fused") or group.get("capturable"))


def _is_flat(value: Any, piece: Piece) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == piece.numel


def _whole(engine: ZeroEngine, buffer: FlatBuffer, shard: torch.Tensor) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Gather `shard` [S] of every rank and yield the parameters' parts on rank 0."""
    full = torch.empty(buffer.padded, dtype=shard.dtype, device=buffer.full.device)
    buffer.shard_comm.all_gather(full, shard.to(full.device), buffer.gather_tag).wait()
    for slot in buffer.layout.slots:
        yield slot.name, full[slot.offset : slot.stop].view(slot.shape).cpu() if engine.world.rank == 0 else None
