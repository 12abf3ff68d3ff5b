"""Filling the shards: from a reader of byte ranges, from the module as it is, or by seeded random initialisation.

In every case the values are the same for each ZeRO stage and world size, and no rank holds more than one whole unit at a time; with a
reader it holds only its own ranges.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn

from framework.progress import progress
from framework.zero.buffer import FlatBuffer
from framework.zero.comm import Comm

Read = Callable[[str, int, int], torch.Tensor]
"""`read(name, start, stop)`: elements [start, stop) of the flattened parameter `name`, in any floating dtype, or in its own if it is
of integers."""


def fill_from_reader(buffers: list[FlatBuffer], read: Read, show: bool) -> None:
    """Read exactly this rank's pieces. Raises TypeError where a parameter of integers is not given as what it is."""
    for buffer in progress(buffers, "loading weights", unit="blocks", show=show):
        with buffer.rewriting() as target:
            for piece in buffer.pieces:
                _put(target[piece.shard_start : piece.shard_stop], read(piece.slot.name, piece.start, piece.stop), piece.slot.name)
        buffer.publish()


def _put(target: torch.Tensor, values: torch.Tensor, name: str) -> None:
    if not target.is_floating_point() and values.dtype != target.dtype:
        raise TypeError(f"read({name!r}) gave {values.dtype}, expected {target.dtype}, since a cast would change integers")
    target.copy_(values)


def fill_from_module(buffer: FlatBuffer, parameters: list[nn.Parameter], world: Comm) -> None:
    """Take rank 0's values of real `parameters`."""
    full = torch.zeros(buffer.padded, dtype=buffer.master_dtype, device=buffer.full.device)
    for slot, parameter in zip(buffer.layout.slots, parameters, strict=True):
        full[slot.offset : slot.stop].copy_(parameter.detach().reshape(-1))
    world.broadcast(full)
    _keep_shard(buffer, full)


def fill_by_reset(module: nn.Module, buffers: list[FlatBuffer], seed: int) -> None:
    """Let each submodule initialise its own parameters (`reset_parameters`), seeded by (seed, its name). One call per unit.

    Raises TypeError naming a module that has parameters and cannot initialise them.
    """
    names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    mine = {id(p) for buffer in buffers for p in buffer.parameters}
    fulls = []
    for buffer in buffers:
        full = torch.zeros(buffer.padded, dtype=buffer.master_dtype, device=buffer.full.device)
        for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True):
            parameter.data = full[slot.offset : slot.stop].view(slot.shape)
        fulls.append(full)
    devices = [buffers[0].full.device] if buffers[0].full.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for name, submodule in module.named_modules():
            own = [p for p in submodule.parameters(recurse=False) if id(p) in mine]
            if not own:
                continue
            reset = getattr(submodule, "reset_parameters", None) or getattr(submodule, "_reset_parameters", None)
            if reset is None:
                raise TypeError(
                    f"{name or 'the model'} ({type(submodule).__name__}) owns {names[id(own[0])]} on the meta device and has no "
                    "reset_parameters(): give it one, or give the engine a `read` function for the weights"
                )
            elsewhere = {p: p.data for p in submodule.parameters(recurse=False) if id(p) not in mine and not p.is_meta}
            for tied in elsewhere:  # owned by another unit, which has filled it: this call gets something else to write to
                tied.data = torch.empty_like(tied, memory_format=torch.contiguous_format)
            torch.manual_seed(_seed_of(seed, name))
            with torch.no_grad():
                reset()
            for tied, data in elsewhere.items():
                tied.data = data
    for buffer, full in zip(buffers, fulls, strict=True):
        buffer.bind(buffer.parameters)
        _keep_shard(buffer, full)


def place_module_buffers(module: nn.Module, device: torch.device, world: Comm) -> None:
    """Move the module's own buffers (not parameters) to the device, with rank 0's values."""
    for module_name, submodule in module.named_modules():
        for name, value in submodule.named_buffers(recurse=False):
            if value.is_meta and device.type != "meta":
                raise TypeError(
                    f"buffer {module_name}.{name} is on the meta device and cannot be filled: compute it in forward, or build the "
                    "module with real buffers"
                )
            moved = value.to(device).contiguous()
            if device.type != "meta":
                world.broadcast(moved)
            submodule._buffers[name] = moved


def _keep_shard(buffer: FlatBuffer, full: torch.Tensor) -> None:
    with buffer.rewriting() as target:
        target.copy_(full[buffer.start : buffer.start + buffer.shard_numel])
    buffer.publish()


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") % (2**63)
