"""torch.optim.Adafactor (arXiv:1804.04235) on shards: second moments of a matrix are those of its rows and columns.

Sums over rows and columns, and the sizes of parameter and update, are made of what each rank's piece gives to them: two small all-reduces
for each buffer, in fp64, so that the sums are the same under any number of ranks up to their last bits. `row_var` and `col_var` are
whole on every rank that has a piece of the matrix.

Unusual: an update is computed twice, once for its size and once to be made, so that it is never there for more than a few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from framework.zero.buffer import FlatBuffer
from framework.zero.comm import Handle
from framework.zero.grid import Grid
from framework.zero.layout import Layout, Piece, Slot
from framework.zero.piece_step import Member, Members, PieceStep, keep_finite

CHUNK = 1 << 18
"""Elements of an update that are there at a time, in whole rows where these are not longer."""


@dataclass(frozen=True)
class Part:
    """Elements of a piece that are `rows` x `columns` of its matrix."""

    at: slice
    """In the piece."""
    rows: slice
    """Of all matrices, one below the other."""
    columns: slice
    """Of all matrices, side by side."""
    matrix: int
    """Which of them, where the parameter has more than two dimensions."""


def parts(shape: torch.Size, start: int, stop: int) -> Iterator[Part]:
    """Elements [start, stop) of a flattened parameter of `shape`, in order."""
    height, width = shape[-2:]
    at = start
    while at < stop:
        row, column = divmod(at, width)
        matrix, left = row // height, stop - at
        if column or left < width:
            rows, columns = 1, min(width - column, left)
        else:
            rows, columns = min(left // width, height - row % height, max(1, CHUNK // width)), width
        first = matrix * width + column
        yield Part(slice(at - start, at - start + rows * columns), slice(row, row + rows), slice(first, first + columns), matrix)
        at += rows * columns


@dataclass
class _Sums:
    """What a buffer's members have to know of all ranks: of each the squares of the parameter, of rows and of columns, one after the other;
    then the squares of the update."""

    members: list[Member]
    of_gradients: Tensor
    of_updates: Tensor
    under_way: Handle = field(default_factory=lambda: Handle([]))

    def of(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views: (of the parameter, 0-d; of its rows; of its columns)."""
        start = sum(_sums_of(member.slot) for member in self.members[:number])
        rows, columns = _vectors(self.members[number].slot)
        return torch.split(self.of_gradients[start : start + 1 + rows + columns], [1, rows, columns])


class AdafactorStep(PieceStep):
    """See the module's docstring."""

    def _step(self, used: Members, factor: Tensor) -> None:
        finite = torch.isfinite(factor)
        meter, nbytes = next(iter(used)).meter, 8 * sum(_sums_of(member.slot) + 1 for members in used.values() for member in members)
        meter.add("exchange", nbytes)
        sums = {buffer: self._squares(buffer, members, factor) for buffer, members in used.items()}
        for buffer, of_buffer in sums.items():
            of_buffer.under_way.wait()
            for number, member in enumerate(of_buffer.members):
                if member.piece is not None:
                    self._learn(buffer, member, of_buffer.of(number), of_buffer.of_updates[number], finite)
            of_buffer.under_way = buffer.shard_comm.all_reduce(of_buffer.of_updates)
        for buffer, of_buffer in sums.items():
            of_buffer.under_way.wait()
            for number, member in enumerate(of_buffer.members):
                if member.piece is not None:
                    self._move(buffer, member, of_buffer.of(number)[0], of_buffer.of_updates[number], finite)
        meter.add("exchange", -nbytes)

    def _squares(self, buffer: FlatBuffer, members: list[Member], factor: Tensor) -> _Sums:
        """Scale the gradients in their place, and begin to sum squares over the ranks."""
        make = partial(torch.zeros, dtype=torch.float64, device=buffer.grad.device)
        sums = _Sums(members, make(sum(_sums_of(member.slot) for member in members)), make(len(members)))
        for number, member in enumerate(members):
            if member.piece is None:
                continue
            parameter, rows, columns = sums.of(number)
            grad, master = buffer.grad[member.at], buffer.master[member.at]
            grad.mul_(-factor.to(grad.dtype) if self._group(member)["maximize"] else factor.to(grad.dtype))
            for part in _parts(member.slot, member.piece):
                parameter += master[part.at].double().square().sum()
                if len(member.slot.shape) > 1:
                    square = grad[part.at].view(part.rows.stop - part.rows.start, -1).double().square()
                    rows[part.rows] += square.sum(dim=1)
                    columns[part.columns] += square.sum(dim=0)
        sums.under_way = buffer.shard_comm.all_reduce(sums.of_gradients)
        return sums

    def _learn(self, buffer: FlatBuffer, member: Member, sums: tuple[Tensor, Tensor, Tensor], of_update: Tensor, finite: Tensor) -> None:
        """Second moments, and what this rank's piece gives to the size of the update."""
        grad, shape = buffer.grad[member.at], member.slot.shape
        state = self._state(member, partial(_new_state, shape, grad))
        share = self._count(state) ** self._group(member)["beta2_decay"]
        if len(shape) > 1:
            for key, of_key, length in (("row_var", sums[1], shape[-1]), ("col_var", sums[2], shape[-2])):
                mean = (of_key / length).to(grad.dtype).view(state[key].shape)
                keep_finite(state[key], state[key].lerp(mean, share), finite)
        else:
            keep_finite(state["variance"], state["variance"].lerp(grad.square(), share), finite)
        for _, update in self._updates(buffer, member):
            of_update += update.double().square().sum()

    def _updates(self, buffer: FlatBuffer, member: Member) -> Iterator[tuple[Part, Tensor]]:
        """The update before it is made smaller, part by part, 1-D."""
        state, grad = self._torch.state[member.parameter], buffer.grad[member.at]
        smallest = self._group(member)["eps"][0]
        smallest = torch.finfo(grad.dtype).eps if smallest is None else smallest
        if len(member.slot.shape) > 1:
            size = state["row_var"].mean(dim=-2).clamp(min=smallest).view(-1)
            rows, columns = state["row_var"].view(-1), state["col_var"].view(-1)
        for part in _parts(member.slot, member.piece):
            if len(member.slot.shape) > 1:
                variance = (rows[part.rows, None] * columns[None, part.columns]).div_(size[part.matrix]).view(-1)
            else:
                variance = state["variance"][part.at]
            yield part, variance.clamp(min=smallest * smallest).rsqrt_().mul_(grad[part.at])

    def _move(self, buffer: FlatBuffer, member: Member, of_parameter: Tensor, of_update: Tensor, finite: Tensor) -> None:
        group, numel, master = self._group(member), member.slot.numel, buffer.master[member.at]
        lr, step = float(group["lr"]), int(self._torch.state[member.parameter]["step"])
        size = (of_parameter[0] / numel).sqrt().clamp(min=group["eps"][1]) * min(lr, 1 / step**0.5)
        factor = (size / ((of_update / numel).sqrt() / group["d"]).clamp(min=1.0)).to(master.dtype)
        for part, update in self._updates(buffer, member):
            moved = (master[part.at] * (1 - lr * group["weight_decay"])).sub_(update.mul_(factor))
            keep_finite(master[part.at], moved, finite)


def _new_state(shape: torch.Size, piece: Tensor) -> dict[str, Tensor]:
    """Of a parameter of `shape` that was never updated, in the shapes that torch has."""
    state = {"step": torch.tensor(0.0)}
    if len(shape) < 2:
        return state | {"variance": torch.zeros_like(piece)}
    return state | {"row_var": piece.new_zeros(*shape[:-1], 1), "col_var": piece.new_zeros(*shape[:-2], 1, shape[-1])}


def _parts(slot: Slot, piece: Piece) -> Iterable[Part]:
    if len(slot.shape) > 1:
        return parts(slot.shape, piece.start, piece.stop)
    return [Part(slice(0, piece.numel), slice(0), slice(0), 0)]


def _vectors(slot: Slot) -> tuple[int, int]:
    """Rows and columns of a parameter, of all its matrices together."""
    if len(slot.shape) < 2:
        return 0, 0
    return slot.numel // slot.shape[-1], slot.numel // slot.shape[-2]


def _sums_of(slot: Slot) -> int:
    return 1 + sum(_vectors(slot))


def state_numel(slot: Slot, piece_numel: int) -> int:
    """Values of second moments on a rank that has `piece_numel` elements of a parameter."""
    return sum(_vectors(slot)) if len(slot.shape) > 1 else piece_numel


def step_bytes(layouts: Iterable[Layout], grid_of: Callable[[Layout], Grid]) -> tuple[int, int]:
    """(memory of the sums, sent in a step) of a rank in bytes. `grid_of`: its place among those that share a layout."""
    memory = sent = 0
    for layout in layouts:
        others, ranks = grid_of(layout).members - 1, grid_of(layout).members
        for numel in (sum(map(_sums_of, layout.slots)), len(layout.slots)):
            memory, sent = memory + 8 * numel, sent + 2 * others * 8 * numel // ranks
    return memory, sent
