"""The engine's state as whole tensors, unit by unit: for export, for saving in one file, and for loading under any stage and world size.

Collectives: every rank calls these at the same time; whole tensors appear on rank 0 only, in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from framework.zero.buffer import FlatBuffer

if TYPE_CHECKING:
    from framework.zero.engine import ZeroEngine


def full_tensors(engine: ZeroEngine) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name, whole parameter) in layout order: trained ones from the fp32 masters, frozen ones in the compute dtype; a tied
    parameter once, under its first name. At most one unit is held at a time; ranks other than 0 get None."""
    for buffer in engine.buffers:
        source = buffer.master if buffer.layout.requires_grad else buffer.shard
        yield from _whole(engine, buffer, source)


def state_dict(engine: ZeroEngine) -> dict[str, Any]:
    """{"model": {name: tensor}, "optimizer": {name: {key: tensor}}, "param_groups": [options], "step": int} on rank 0, empty elsewhere."""
    model = dict(full_tensors(engine))
    states: dict[str, dict[str, Any]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    by_buffer: dict[int, list] = {}
    sharded = engine.sharded_optimizer
    for buffer, piece, state in sharded.state_pieces() if sharded else ():
        by_buffer.setdefault(id(buffer), []).append((piece, state))
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.numel() != piece.numel or value.dim() == 0:
                scalars.setdefault(piece.slot.name, {})[key] = value
    merged: dict[str, dict[str, Any]] = {}
    for found in engine.world.gather_objects(scalars):
        for name, values in found.items():
            merged.setdefault(name, {}).update(values)
    keys = sorted(
        set().union(*engine.world.gather_objects({k for b in by_buffer.values() for p, s in b for k, v in s.items() if _is_flat(v, p)}))
    )
    for buffer in (b for b in engine.buffers if b.layout.requires_grad):
        for key in keys:
            shard = torch.zeros_like(buffer.master)
            for piece, state in by_buffer.get(id(buffer), ()):
                if key in state:
                    shard[piece.shard_start : piece.shard_stop].copy_(state[key])
            for name, tensor in _whole(engine, buffer, shard):
                if tensor is not None and name in merged:
                    states.setdefault(name, {})[key] = tensor
    if engine.world.rank:
        return {}
    for name, values in merged.items():
        states.setdefault(name, {}).update(values)
    options = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups] if sharded else []
    return {"model": model, "optimizer": states, "param_groups": options, "step": engine.steps_done}


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
    sharded = engine.sharded_optimizer
    if sharded is None:
        return
    for _, _, piece, shard in sharded.pieces:
        saved = state["optimizer"].get(piece.slot.name)
        if saved is None:
            continue
        sharded.torch.state[shard] = {
            key: value.reshape(-1)[piece.start : piece.stop].to(shard.device, copy=True)
            if isinstance(value, torch.Tensor) and value.shape == piece.slot.shape and value.dim()
            else (value.clone() if isinstance(value, torch.Tensor) else value)
            for key, value in saved.items()
        }
    for group, options in zip(sharded.torch.param_groups, state["param_groups"], strict=True):
        group.update(options)
    engine.steps_done = state["step"]


def _is_flat(value: Any, piece: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == piece.numel


def _whole(engine: ZeroEngine, buffer: FlatBuffer, shard: torch.Tensor) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Gather `shard` [S] of every rank and yield the parameters' parts on rank 0."""
    full = torch.empty(buffer.padded, dtype=shard.dtype, device=shard.device)
    buffer.shard_comm.all_gather(full, shard, buffer.gather_tag).wait()
    for slot in buffer.layout.slots:
        yield slot.name, full[slot.offset : slot.stop].view(slot.shape).cpu() if engine.world.rank == 0 else None
