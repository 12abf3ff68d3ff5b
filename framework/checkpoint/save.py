"""Writing a checkpoint: every rank its own part of the flat masters and optimizer state, rank 0 the index.

    save(engine, step_folder(run_dir, step), run={...})      collective

What a rank writes follows from its place alone, so nothing is planned together. The ranks meet when all have written: then rank 0 gives the
folder its name, or, if one of them could not write, removes what there is, and all raise the same SaveError. The format is described in
README.md.

Unusual: state that is replicated over ranks is written in equal shares, so that every element is written once under any ZeRO stage.
"""

from __future__ import annotations

import base64
import json
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework.checkpoint.folder import INDEX, finish, partial_folder
from framework.disk import sync
from framework.models.safetensors_io import StreamWriter
from framework.zero import ZeroEngine
from framework.zero.buffer import FlatBuffer
from framework.zero.layout import ALIGN

FORMAT, VERSION = "framework checkpoint", 1
CHUNK_BYTES = 1 << 22
"""A checksum covers so many bytes; a reader of a few elements reads and checks whole chunks."""
MASTER = "master"


class SaveError(RuntimeError):
    """A checkpoint could not be written; earlier ones are as they were."""


def save(engine: ZeroEngine, folder: Path, *, run: dict[str, Any]) -> int:
    """Write what `engine` trains to the new `folder`; the bytes that this rank wrote come back. Collective.

    `run`: what else is needed to go on, as JSON. Raises SaveError on every rank where one could not write, with the first reason.
    """
    engine.check_last_step()
    partial, is_first = partial_folder(folder), engine.world.rank == 0
    token = engine.world.gather_objects(uuid.uuid4().hex)[0]
    _together(engine, lambda: _begin(partial) if is_first else None)
    try:
        nbytes = _together(engine, lambda: _write(engine, partial, token, run))
        _together(engine, lambda: finish(folder) if is_first else None)
    except BaseException:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return nbytes


def _together(engine: ZeroEngine, action: Callable[[], Any]) -> Any:
    """`action()`, with a SaveError on all ranks where it failed on one."""
    result, cause = None, None
    try:
        result = action()
    except Exception as error:  # whatever it is, the other ranks must not wait
        cause = error
    errors = engine.world.gather_objects(None if cause is None else _named(engine, cause))
    if errors := [found for found in errors if found is not None]:
        raise SaveError(errors[0]) from cause
    return result


def _named(engine: ZeroEngine, error: Exception) -> str:
    return f"rank {engine.world.rank}: {error if isinstance(error, OSError) else f'{type(error).__name__}: {error}'}"


def _begin(partial: Path) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _write(engine: ZeroEngine, folder: Path, token: str, run: dict[str, Any]) -> int:
    nbytes = _write_rank(engine, folder, token)
    if engine.world.rank == 0:
        _write_json(folder / INDEX, _index(engine, token, run))
    return nbytes


def _index(engine: ZeroEngine, token: str, run: dict[str, Any]) -> dict[str, Any]:
    groups = engine.optimizer.param_groups if engine.sharded_optimizer is not None else []
    return {
        "format": FORMAT,
        "version": VERSION,
        "save": token,
        "step": engine.steps_done,
        "world_size": engine.world.size,
        "buffers": [
            {
                "unit": buffer.layout.unit,
                "total": buffer.layout.total,
                "parameters": [
                    {"name": slot.name, "shape": list(slot.shape), "offset": slot.offset, "aliases": list(slot.aliases)}
                    for slot in buffer.layout.slots
                ],
            }
            for buffer in engine.trained
        ],
        "param_groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "run": run,
    }


# ---- one rank
def _write_rank(engine: ZeroEngine, folder: Path, token: str) -> int:
    """rank_N.safetensors with the flat tensors, rank_N.json with what they are and their checksums."""
    rank = engine.world.rank
    pieces = _state_by_buffer(engine)
    extents = {number: _extent(buffer) for number, buffer in enumerate(engine.trained)}
    flat_keys = {number: sorted({key for _, flat, _ in pieces[number] for key in flat}) for number in extents}
    shapes = {
        f"{number}/{key}": ((stop - start,), engine.trained[number].master_dtype)
        for number, (start, stop) in extents.items()
        for key in (MASTER, *flat_keys[number])
        if start < stop
    }
    writer = StreamWriter(folder / f"rank_{rank}.safetensors", shapes)
    described: dict[str, dict[str, Any]] = {}
    for name in shapes:
        number, key = int(name.split("/")[0]), name.split("/")[1]
        start, stop = extents[number]
        tensor = _flat(engine.trained[number], key, start, stop, pieces[number])
        described[name] = {"start": start, "stop": stop, "crc32": list(_checksums(writer.write(name, tensor)))}
    writer.close(durably=True)
    _write_json(
        folder / f"rank_{rank}.json",
        {
            "save": token,
            "file_bytes": writer.file_bytes,
            "chunk_bytes": CHUNK_BYTES,
            "tensors": described,
            "optimizer": _optimizer_of_parameters(pieces),
            "random": _random_state(engine.device),
        },
    )
    return writer.file_bytes


def _extent(buffer: FlatBuffer) -> tuple[int, int]:
    """What this rank writes of the flat space: its shard, or its share of a shard that several ranks have."""
    replicas = buffer.replicate_comm
    share = -(-buffer.shard_numel // (replicas.size * ALIGN)) * ALIGN
    start = buffer.start + replicas.rank * share
    stop = min(start + share, buffer.start + buffer.shard_numel, buffer.layout.total)
    return min(start, stop), stop


def _state_by_buffer(engine: ZeroEngine) -> list[list[tuple[Any, dict[str, Tensor], dict[str, Any]]]]:
    """Of each trained buffer: (piece, its optimizer state with one value per element, the rest of it)."""
    found: dict[int, list] = {id(buffer): [] for buffer in engine.trained}
    for buffer, piece, state in engine.sharded_optimizer.state_pieces() if engine.sharded_optimizer else ():
        flat = {
            key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == piece.numel
        }
        found[id(buffer)].append((piece, flat, {key: value for key, value in state.items() if key not in flat}))
    return [found[id(buffer)] for buffer in engine.trained]


def _flat(buffer: FlatBuffer, key: str, start: int, stop: int, pieces: list[tuple[Any, dict[str, Tensor], dict[str, Any]]]) -> Tensor:
    """[stop - start] elements of the flat space; zeros where no parameter has a value."""
    if key == MASTER:
        return buffer.master[start - buffer.start : stop - buffer.start]
    out = torch.zeros(stop - start, dtype=buffer.master_dtype)
    for piece, flat, _ in pieces:
        begin = buffer.start + piece.shard_start
        low, high = max(start, begin), min(stop, begin + piece.numel)
        if key in flat and low < high:
            out[low - start : high - start] = flat[key][low - begin : high - begin]
    return out


def _optimizer_of_parameters(pieces: list[list[tuple[Any, dict[str, Tensor], dict[str, Any]]]]) -> dict[str, dict[str, Any]]:
    """By parameter: the names of its flat state, and its other state as numbers (a step count)."""
    found = {}
    for of_buffer in pieces:
        for piece, flat, rest in of_buffer:
            if flat or rest:
                found[piece.slot.name] = {"flat": sorted(flat), "scalars": {key: _scalar(key, value) for key, value in rest.items()}}
    return found


def _scalar(key: str, value: Any) -> Any:
    """A number as it is; a tensor with one value as its value and dtype."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.dim() == 0:
        return {"value": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, float | int | bool | None):
        return value
    raise TypeError(f"the optimizer's state {key!r} is a {type(value).__name__}: only numbers and one value per element can be saved")


def _random_state(device: torch.device) -> dict[str, str]:
    """torch's generators of this rank."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def _checksums(data: memoryview) -> Iterator[int]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield zlib.crc32(data[start : start + CHUNK_BYTES])


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content) + "\n")
    sync(file)
