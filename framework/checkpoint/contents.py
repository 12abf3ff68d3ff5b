"""What one rank writes of a step: its intervals of the flat masters and optimizer state, and the numbers that belong to them.

What a rank has follows from its place alone, so nothing is planned together. `Contents` holds no copy: a tensor's sources are the engine's
own memory, which the next optimizer step changes, until `copy_into` has been called. What lies on a disk can be held instead, where no
step changes it until it is let go.

Unusual: state that is replicated over ranks is taken in equal shares, so that every element is written once under any ZeRO stage.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from framework.zero import ZeroEngine
from framework.zero.buffer import FlatBuffer
from framework.zero.layout import Piece
from framework.zero.nvme import Extent
from framework.zero.state_keys import elements_per_value, kind_of

MASTER = "master"
OfPiece = tuple[Piece, dict[str, Tensor], dict[str, Tensor], dict[str, Any]]
"""A piece, its optimizer state with one value for each element or block, that which is about the whole parameter, and numbers."""
States = list[list[OfPiece]]
"""Of each buffer."""


@dataclass(frozen=True)
class OnDisk:
    """Elements of an extent, from `start` on."""

    extent: Extent
    start: int
    count: int

    def numel(self) -> int:
        return self.count


@dataclass(frozen=True, kw_only=True)
class FlatTensor:
    """Elements [start, stop) of a buffer's flat space: the masters, or one kind of optimizer state (blocks, where it has one value for
    each). Or, from 0 on, all of a state that is about a whole parameter."""

    name: str
    """BUFFER/KEY, or BUFFER/KEY:PARAMETER."""
    start: int
    stop: int
    dtype: torch.dtype
    sources: list[tuple[int, Tensor | OnDisk]]
    """(where in the flat space it begins, 1-D tensor) in order; zeros lie between."""
    write_into: Callable[[Tensor], object] | None = None
    """Gives the values in the place of `sources`, where they are no tensor of that dtype."""

    @property
    def extents(self) -> list[Extent]:
        """What of it lies on a disk."""
        return [source.extent for _, source in self.sources if isinstance(source, OnDisk)]

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize

    def copy_into(self, out: Tensor) -> None:
        """Fill `out` [stop - start] in host memory. From a GPU into pinned memory this returns before the copy has been made."""
        if self.write_into is not None:
            self.write_into(out)
            return
        at = 0
        for begin, source in self.sources:
            low, high = begin - self.start, begin - self.start + source.numel()
            out[at:low].zero_()
            if isinstance(source, OnDisk):
                source.extent.read(out[low:high], source.start).wait()
            else:
                out[low:high].copy_(source, non_blocking=source.is_cuda and out.is_pinned())
            at = high
        out[at:].zero_()

    def in_host_memory(self) -> Tensor:
        """The same as a tensor, without a copy where that is possible."""
        if (
            not self.extents
            and len(self.sources) == 1
            and self.sources[0][1].numel() == self.stop - self.start
            and self.sources[0][1].device.type == "cpu"
        ):
            return self.sources[0][1].detach()
        out = torch.empty(self.stop - self.start, dtype=self.dtype)
        self.copy_into(out)
        return out


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All that a rank writes."""

    tensors: list[FlatTensor]
    optimizer: dict[str, dict[str, Any]]
    """By parameter: the names of its flat state, shapes of what is about all of it, and its other state as numbers (a step count)."""
    random: dict[str, str]
    """torch's generators, base64."""


def contents_of(engine: ZeroEngine, buffers: Sequence[FlatBuffer], with_optimizer: bool) -> Contents:
    """Of this rank, now. `buffers`: those that the engine trains, and after them frozen ones. Raises TypeError for optimizer state that
    cannot be saved."""
    states = _states_by_buffer(engine, buffers, with_optimizer)
    return Contents(
        tensors=[tensor for number, buffer in enumerate(buffers) for tensor in _tensors_of(number, buffer, states[number])],
        optimizer=_optimizer_of_parameters(states),
        random=_random_state(engine.device),
    )


def _tensors_of(number: int, buffer: FlatBuffer, states: list[OfPiece]) -> Iterator[FlatTensor]:
    start, stop = _extent(buffer)
    if start == stop:
        return
    own, here = {"start": start, "stop": stop, "dtype": buffer.master_dtype}, slice(start - buffer.start, stop - buffer.start)

    def on_disk(key: str) -> list[tuple[int, OnDisk]]:
        return [(start, OnDisk(buffer.stored[key], here.start, stop - start))]

    if MASTER in buffer.stored:
        yield FlatTensor(name=f"{number}/{MASTER}", sources=on_disk(MASTER), **own)
    elif buffer.master is None:
        yield FlatTensor(name=f"{number}/{MASTER}", sources=[], write_into=partial(buffer.write_masters, here.start), **own)
    else:
        yield FlatTensor(name=f"{number}/{MASTER}", sources=[(start, buffer.master[here])], **own)
    for key in sorted({key for _, flat, _, _ in states for key in flat}):
        if key in buffer.stored:
            yield FlatTensor(name=f"{number}/{key}", sources=on_disk(key), **own)
            continue
        per, sources = elements_per_value(key), []
        first, last = start // per, stop // per
        for piece, flat, _, _ in states:
            begin = (buffer.start + piece.shard_start) // per
            low, high = max(first, begin), min(last, begin + flat[key].numel()) if key in flat else 0
            if low < high:
                sources.append((low, flat[key][low - begin : high - begin]))
        if not sources:
            continue
        if not all(key in flat for _, flat, _, _ in states):  # only some parameters have it: nothing is written around them
            first, last = sources[0][0], sources[-1][0] + sources[-1][1].numel()
        yield FlatTensor(name=f"{number}/{key}", sources=sources, start=first, stop=last, dtype=sources[0][1].dtype)
    for piece, _, whole, _ in states:
        if piece.start == 0 and start <= buffer.start + piece.shard_start < stop:
            for key, value in whole.items():
                name = f"{number}/{key}:{piece.slot.name}"
                yield FlatTensor(name=name, sources=[(0, value.reshape(-1))], start=0, stop=value.numel(), dtype=value.dtype)


def _extent(buffer: FlatBuffer) -> tuple[int, int]:
    """What this rank writes of the flat space: what it alone owns."""
    start, stop = buffer.start + buffer.owned.start, min(buffer.start + buffer.owned.stop, buffer.layout.total)
    return min(start, stop), stop


def _states_by_buffer(engine: ZeroEngine, buffers: Sequence[FlatBuffer], with_optimizer: bool) -> States:
    found: dict[int, list] = {id(buffer): [] for buffer in buffers}
    sharded = engine.sharded_optimizer if with_optimizer else None
    for buffer, piece, state in sharded.state_pieces() if sharded is not None else ():
        kinds = {key: kind_of(key, value, piece.numel) for key, value in state.items()}
        parts = ({key: state[key] for key, kind in kinds.items() if kind in of} for of in (("element", "block"), ("whole",), ("number",)))
        found[id(buffer)].append((piece, *parts))
    return [found[id(buffer)] for buffer in buffers]


def _optimizer_of_parameters(states: States) -> dict[str, dict[str, Any]]:
    found = {}
    for of_buffer in states:
        for piece, flat, whole, rest in of_buffer:
            if flat or whole or rest:
                found[piece.slot.name] = {"flat": sorted(flat), "scalars": {key: _scalar(key, value) for key, value in rest.items()}}
                found[piece.slot.name] |= {"whole": {key: list(value.shape) for key, value in whole.items()}} if whole else {}
    return found


def _scalar(key: str, value: Any) -> Any:
    """A number as it is; a tensor with one value as its value and dtype."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.dim() == 0:
        return {"value": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, float | int | bool | None):
        return value
    raise TypeError(f"the optimizer's state {key!r} is a {type(value).__name__}: only numbers and one value per element can be saved")


def _random_state(device: torch.device) -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}
