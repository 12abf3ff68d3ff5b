"""Reading a checkpoint: any element range of any parameter's master or optimizer state, from whatever ranks have written it.

    checkpoint = Checkpoint(folder)
    engine = ZeroEngine(model, ..., read=checkpoint.reader(pretrained.read))     # masters, under any stage and number of ranks
    load_optimizer(engine, checkpoint)

Every byte that is used has been compared with its checksum. Raises UserError, naming the file, for whatever is missing, cut off or changed.
"""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from framework.checkpoint.contents import MASTER
from framework.checkpoint.folder import EXTRA, read_index, read_ranks, what_is_missing
from framework.config.errors import Problem, UserError
from framework.models.safetensors_io import ALL_DTYPES, Entry, RangeReader, read_header
from framework.zero import ZeroEngine, state
from framework.zero.layout import Piece
from framework.zero.state_keys import elements_per_value

Read = Callable[[str, int, int], Tensor]


CHECKSUMS = {"xxh3": xxh3_64_intdigest, "crc32": zlib.crc32}
"""The latter in version 1 of the format."""


@dataclass(frozen=True, eq=False)
class _Part:
    """An interval of a buffer's flat space, as one rank has written it."""

    start: int
    stop: int
    entry: Entry
    checksums: list[int]
    """Of each chunk of its bytes."""
    checksum: Callable[[memoryview], int]
    chunk_bytes: int

    @property
    def per_chunk(self) -> int:
        """Elements of a chunk."""
        return self.chunk_bytes // self.entry.dtype.itemsize


@dataclass(frozen=True)
class _Place:
    buffer: int
    offset: int
    shape: tuple[int, ...]


class Checkpoint:
    """An opened checkpoint folder. `step`, `world_size` and `run` are those of the save."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        if (missing := what_is_missing(self.folder)) is not None:
            raise _damaged(self.folder, missing)
        self.index = read_index(self.folder)
        self.step: int = self.index["step"]
        self.world_size: int = self.index["world_size"]
        self.run: dict[str, Any] = self.index["run"]
        self.places = {
            parameter["name"]: _Place(number, parameter["offset"], tuple(parameter["shape"]))
            for number, buffer in enumerate(self.index["buffers"])
            for parameter in buffer["parameters"]
        }
        self.frozen = {parameter["name"] for buffer in self.index["buffers"] if buffer.get("frozen") for parameter in buffer["parameters"]}
        """Parameters that were saved but not trained."""
        self._ranks = read_ranks(self.folder, self.index)
        self._parts = self._find_parts()
        self._extra = self._find_extra()
        self._reader = RangeReader()
        self._last_chunk: tuple[_Part, int, Tensor] | None = None
        """What was read last of a chunk that holds more than was asked for: the next parameter begins there."""

    def _find_parts(self) -> dict[str, list[_Part]]:
        """By "BUFFER/KEY": the intervals in order. Raises UserError where they do not cover the buffer."""
        parts: dict[str, list[_Part]] = {}
        for rank, described in enumerate(self._ranks):
            entries = self._entries(f"rank_{rank}.safetensors", described, described["tensors"])
            for name, tensor in described["tensors"].items():
                kind = next(kind for kind in CHECKSUMS if kind in tensor)
                part = _part(entries[name], tensor["start"], tensor["stop"], tensor[kind], CHECKSUMS[kind], described["chunk_bytes"])
                parts.setdefault(name, []).append(part)
        for number, buffer in enumerate(self.index["buffers"]):
            intervals = sorted(parts.get(f"{number}/{MASTER}", ()), key=lambda part: part.start)
            ends = [0, *(part.stop for part in intervals)]
            if [part.start for part in intervals] != ends[:-1] or ends[-1] != buffer["total"]:
                raise _damaged(self.folder, f"the parts of {buffer['unit'] or 'the root'} do not make a whole")
        return {name: sorted(found, key=lambda part: part.start) for name, found in parts.items()}

    def _find_extra(self) -> dict[str, _Part]:
        described = self.index.get("extra")
        if described is None:
            return {}
        return {
            name: _part(entry, 0, prod(entry.shape), described["xxh3"][name], xxh3_64_intdigest, described["chunk_bytes"])
            for name, entry in self._entries(EXTRA, described, described["xxh3"]).items()
        }

    def _entries(self, name: str, described: dict[str, Any], tensors: Collection[str]) -> dict[str, Entry]:
        """The tensors in the file `name`, which must be those that its description names."""
        file = self.folder / name
        try:
            entries = read_header(file, ALL_DTYPES, described.get("header_sha256"))  # earlier saves did not write one
        except UserError as error:
            raise _damaged(file, error.problems[0].got) from error
        if differing := entries.keys() ^ set(tensors):
            raise _damaged(file, f"a header that has {min(differing)!r} where its description has not, or the other way round")
        return entries

    # ---- what it holds
    def read(self, name: str, start: int, stop: int, key: str = MASTER) -> Tensor:
        """Elements [start, stop) of the flattened parameter `name`: its master, or optimizer state such as `exp_avg`. 1-D, on the CPU.
        Where that has one value for each block of elements, those of the blocks from the one that begins at `start` on."""
        place, per = self.places[name], elements_per_value(key)
        first, end = (place.offset + start) // per, -(-(place.offset + stop) // per)
        parts, begin = self._parts[f"{place.buffer}/{key}"], first
        found = torch.empty(end - first, dtype=parts[0].entry.dtype)
        at = max(0, bisect_right(parts, begin, key=lambda part: part.start) - 1)
        while begin < end:
            part = parts[at] if at < len(parts) else None
            if part is None or not part.start <= begin < part.stop:
                raise _damaged(self.folder, f"no {key} of {name} from element {begin * per - place.offset:,} on")
            upto = min(end, part.stop)
            self._read_part(part, begin - part.start, found[begin - first : upto - first])
            begin, at = upto, at + 1
        return found

    def state_of_whole(self, name: str, key: str, shape: list[int]) -> Tensor:
        """Optimizer state of `shape` that is about all of the parameter `name`."""
        parts = self._parts.get(f"{self.places[name].buffer}/{key}:{name}", ())
        if [part.stop for part in parts] != [prod(shape)]:
            raise _damaged(self.folder, f"no {key} of {name}")
        found = torch.empty(parts[0].stop, dtype=parts[0].entry.dtype)
        self._read_part(parts[0], 0, found)
        return found.view(shape)

    def whole(self, name: str) -> Tensor:
        """The master of the parameter `name`."""
        shape = self.places[name].shape
        return self.read(name, 0, prod(shape)).view(shape)

    def extra(self, name: str) -> Tensor:
        """A tensor that was saved beside the parameters."""
        part = self._extra[name]
        found = torch.empty(part.stop, dtype=part.entry.dtype)
        self._read_part(part, 0, found)
        return found.view(part.entry.shape)

    def where(self, name: str, key: str = MASTER) -> list[str]:
        """FILE:BYTE of each run of elements of the parameter `name`, in order."""
        place = self.places[name]
        begin, end = place.offset, place.offset + prod(place.shape)
        parts = [part for part in self._parts[f"{place.buffer}/{key}"] if max(begin, part.start) < min(end, part.stop)]
        return [f"{part.entry.file.name}:{part.entry.offset + max(0, begin - part.start) * part.entry.dtype.itemsize}" for part in parts]

    def _read_part(self, part: _Part, start: int, out: Tensor) -> None:
        """Fill `out` with the elements of a part from `start` on, by whole chunks, whose checksums are compared."""
        stop, whole = start + len(out), part.stop - part.start
        for number in range(start // part.per_chunk, -(-stop // part.per_chunk)):
            begin, end = number * part.per_chunk, min((number + 1) * part.per_chunk, whole)
            if start <= begin and end <= stop:
                self._read_chunk(part, number, out[begin - start : end - start])
                continue
            if self._last_chunk is None or self._last_chunk[:2] != (part, number):
                chunk = torch.empty(end - begin, dtype=out.dtype)
                self._read_chunk(part, number, chunk)
                self._last_chunk = (part, number, chunk)
            low, high = max(begin, start), min(end, stop)
            out[low - start : high - start] = self._last_chunk[2][low - begin : high - begin]

    def _read_chunk(self, part: _Part, number: int, out: Tensor) -> None:
        raw = self._reader.read_into(out, part.entry, number * part.per_chunk)
        if part.checksum(raw) != part.checksums[number]:
            position = part.entry.offset + number * part.chunk_bytes
            raise _damaged(part.entry.file, f"changed bytes between {position:,} and {position + len(raw):,}")

    def reader(self, base: Read | None) -> Read:
        """`read` for an engine: what was trained from here, what was frozen from `base`."""

        def read(name: str, start: int, stop: int) -> Tensor:
            if name in self.places:
                return self.read(name, start, stop)
            if base is None:
                raise UserError(Problem(path=str(self.folder), got=f"no {name}", expected="a checkpoint of this model"))
            return base(name, start, stop)

        return read

    def optimizer_of(self, name: str) -> dict[str, Any] | None:
        """{"flat": names of state with one value for each element or block, "whole": shapes of state that is about all of it, if there is
        any, "scalars": the rest} of a parameter; None where it has no state yet."""
        return next((rank["optimizer"][name] for rank in self._ranks if name in rank["optimizer"]), None)

    def random_state(self, rank: int) -> dict[str, Tensor] | None:
        """torch's generators of a rank; None for one that there was not."""
        if rank >= self.world_size:
            return None
        stored = self._ranks[rank]["random"]
        return {name: torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8) for name, state in stored.items()}

    def verify(self) -> int:
        """Read everything and compare all checksums; the number of bytes comes back."""
        nbytes = 0
        for parts in (*self._parts.values(), self._extra.values()):
            for part in parts:
                chunk = torch.empty(part.per_chunk, dtype=part.entry.dtype)
                for start in range(0, part.stop - part.start, part.per_chunk):
                    wanted = chunk[: part.stop - part.start - start]
                    self._read_part(part, start, wanted)
                    nbytes += wanted.nbytes
        return nbytes

    def check(self, engine: ZeroEngine) -> None:
        """Raises UserError unless these are the parameters that `engine` trains (P28)."""
        wanted = {slot.name: tuple(slot.shape) for buffer in engine.trained for slot in buffer.layout.slots}
        found = {name: place.shape for name, place in self.places.items() if name not in self.frozen}
        if found != wanted:
            name = min(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
            got = f"{name} {list(found[name])}" if name in found else f"no {name}"
            expected = f"{list(wanted[name])}" if name in wanted else "no such parameter among those that are trained"
            raise UserError(Problem(path=str(self.folder), got=got, expected=expected))


def load_optimizer(engine: ZeroEngine, checkpoint: Checkpoint, groups: list[dict[str, Any]] | None = None) -> None:
    """Give `engine`, whose masters were read from `checkpoint`, optimizer state and step count. Every rank reads its own part.

    `groups`: options of the optimizer's groups (learning rate, weight decay, ...); None: they are those that it was made with.
    """
    checkpoint.check(engine)

    def of_piece(piece: Piece) -> dict[str, Any] | None:
        described = checkpoint.optimizer_of(piece.slot.name)
        if described is None:
            return None
        flat = {key: checkpoint.read(piece.slot.name, piece.start, piece.stop, key) for key in described["flat"]}
        for key, shape in described.get("whole", {}).items():
            flat[key] = checkpoint.state_of_whole(piece.slot.name, key, shape)
        return flat | {key: _scalar(value) for key, value in described["scalars"].items()}

    state.load_optimizer(engine, groups or [{} for _ in engine.optimizer.param_groups], of_piece)
    engine.steps_done = checkpoint.step
    if engine.scaler is not None and (scaler := checkpoint.index.get("loss_scaler")) is not None:
        engine.scaler.load_state_dict(scaler)


def _scalar(stored: Any) -> Any:
    """A number, or the tensor that `save` has described."""
    return torch.tensor(stored["value"], dtype=getattr(torch, stored["dtype"])) if isinstance(stored, dict) else stored


def restore_random_state(checkpoint: Checkpoint, engine: ZeroEngine) -> None:
    """torch's generators as they were on this rank, where as many ranks have saved; they decide about dropout only."""
    states = checkpoint.random_state(engine.world.rank) if checkpoint.world_size == engine.world.size else None
    if states is None:
        return
    torch.set_rng_state(states["cpu"])
    if engine.device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], engine.device)


def _part(entry: Entry, start: int, stop: int, checksums: list[int], checksum: Callable[[memoryview], int], chunk_bytes: int) -> _Part:
    """Raises UserError where the header of the file tells of a tensor of another type or length than its description."""
    nbytes = 0 if entry.dtype is None else (stop - start) * entry.dtype.itemsize
    if entry.dtype is None or prod(entry.shape) != stop - start or len(checksums) != -(-nbytes // chunk_bytes):
        got = f"a header with {entry.dtype_name} {list(entry.shape)} where {stop - start:,} elements were described"
        raise _damaged(entry.file, got)
    return _Part(start, stop, entry, checksums, checksum, chunk_bytes)


def _damaged(path: Path, got: str) -> UserError:
    return UserError(Problem(path=str(path), got=got, expected="a whole checkpoint", fix="resume=AN_EARLIER_CHECKPOINT"))
