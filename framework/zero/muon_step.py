"""Muon on shards: the momentum stays with the pieces; ranks get whole matrices for as long as it takes to make them orthogonal.

In rounds of a few matrices per rank (`matrix_exchange.py`) the pieces travel in bf16, which is what the iterations compute in anyway: the
numbers are those of the whole matrix in one process. What is no hidden matrix is updated by AdamW, piece by piece.

Unusual: where every rank holds all (stage 0), each computes for itself and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from framework.zero.buffer import FlatBuffer
from framework.zero.comm import Comm
from framework.zero.grid import Grid
from framework.zero.layout import Layout, Slot
from framework.zero.matrix_exchange import Exchange, Matrix, Round, rounds
from framework.zero.muon import adamw_step, ahead, moved, new_state, orthogonal, workspace_bytes
from framework.zero.piece_step import Member, Members, PieceStep, keep_finite

WIRE = torch.bfloat16


class MuonStep(PieceStep):
    """See the module's docstring."""

    def _step(self, used: Members, factor: Tensor) -> None:
        matrices = []
        for buffer, members in used.items():
            for member in members:
                if self._group(member)["orthogonal"]:
                    matrices.append((buffer, member))
                elif member.piece is not None:
                    self._adamw(buffer, member, factor)
        for comm, together in groupby(((buffer.shard_comm, buffer, member) for buffer, member in matrices), key=itemgetter(0)):
            of_comm = [(buffer, member) for _, buffer, member in together]
            for some in rounds(len(of_comm), comm.size):
                self._round(comm, of_comm[some], factor)

    def _adamw(self, buffer: FlatBuffer, member: Member, factor: Tensor) -> None:
        master, grad, group = buffer.master[member.at], _scaled(buffer, member, factor), self._group(member)
        state = self._state(member, partial(new_state, group, master))
        only_if_finite = torch.where(torch.isfinite(factor), 1.0, torch.nan).float()
        adamw_step(group, self._count(state), master, state["exp_avg"], state["exp_avg_sq"], grad, only_if_finite)

    def _round(self, comm: Comm, matrices: list[tuple[FlatBuffer, Member]], factor: Tensor) -> None:
        plan = Round([Matrix(member.slot, buffer.shard_numel) for buffer, member in matrices], comm.size, comm.rank)
        first, finite = matrices[0][0], torch.isfinite(factor)
        nbytes = exchange_bytes(plan)
        first.meter.add("exchange", nbytes)
        exchange = Exchange(plan, comm, WIRE, first.full.device)
        mine = [(i, buffer, member) for i, (buffer, member) in enumerate(matrices) if member.piece is not None]
        for i, buffer, member in mine:
            group, grad = self._group(member), _scaled(buffer, member, factor)
            momentum = self._state(member, partial(new_state, group, grad))["momentum_buffer"]
            keep_finite(momentum, momentum.lerp(grad, 1 - group["momentum"]), finite)
            exchange.piece(i).copy_(ahead(group, grad, momentum))
        for i, matrix in exchange.wholes():
            exchange.put(i, orthogonal(matrix))
        exchange.give_back()
        for i, buffer, member in mine:
            master = buffer.master[member.at]
            keep_finite(master, moved(self._group(member), member.slot.shape, master, exchange.piece(i)), finite)
        first.meter.add("exchange", -nbytes)


def _scaled(buffer: FlatBuffer, member: Member, factor: Tensor) -> Tensor:
    """The piece's gradient, in its place."""
    grad = buffer.grad[member.at]
    return grad.mul_(factor.to(grad.dtype))


def exchange_bytes(plan: Round) -> int:
    """What a round needs on this rank: both buffers, and one matrix at work."""
    at_work = max((2 * plan.matrices[i].slot.numel + workspace_bytes(plan.matrices[i].slot.shape) for i in plan.part_at), default=0)
    return WIRE.itemsize * plan.numel + at_work


def step_bytes(matrices: Sequence[tuple[Layout, Slot]], grid_of: Callable[[Layout], Grid]) -> tuple[int, int]:
    """(most memory of a round, sent in a step) of a rank in bytes, for all orthogonal matrices of a model in the order of its buffers.
    `grid_of`: the place of the rank among those that share a layout; policies of modules may give it several."""
    most = sent = 0
    for grid, together in groupby(matrices, key=lambda matrix: grid_of(matrix[0])):
        placed = [Matrix(slot, layout.shard_numel(grid.members)) for layout, slot in together]
        for some in rounds(len(placed), grid.members):
            plan = Round(placed[some], grid.members, grid.member)
            most, sent = max(most, exchange_bytes(plan)), sent + WIRE.itemsize * plan.sent_numel(grid.member)
    return most, sent
