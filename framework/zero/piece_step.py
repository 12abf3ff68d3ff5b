"""Steps that torch's loop over parameters cannot make, because ranks hold pieces: what the optimizers for them have in common.

A *member* is one parameter that the optimizer updates, on every rank, whether or not it has a piece of it: ranks have to take part in
what the others send. State lies in the torch optimizer, by the piece's 1-D parameter, and is looked up there in every step, so that loading
it needs nothing more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from framework.zero.buffer import FlatBuffer
from framework.zero.layout import Piece, Slot


@dataclass(frozen=True, eq=False)
class Member:
    """`piece` and `parameter` (the 1-D one) are None where this rank has nothing of it."""

    index: int
    """Of its slot."""
    slot: Slot
    group: int
    """Which of the torch optimizer's."""
    piece: Piece | None
    parameter: nn.Parameter | None

    @property
    def at(self) -> slice:
        """Where the piece lies in `master` and `grad`."""
        return slice(self.piece.shard_start, self.piece.shard_stop)


Members = dict[FlatBuffer, list[Member]]


class PieceStep(ABC):
    """Makes the step of `optimizer` on pieces. Where the factor on the gradients is not finite nothing changes but counts of steps."""

    writes_shards = writes_blocks = False
    """Whether parameters in the compute dtype are written, too; and where they are gathered in 8 bits, the blocks."""

    def __init__(self, optimizer: torch.optim.Optimizer, members: Members) -> None:
        self._torch, self._members = optimizer, members
        self._counted: list[Tensor] = []
        """Counts of steps that the last step has raised."""

    def step(self, factor: Tensor, is_used: list[bool], offsets: Mapping[int, int]) -> None:
        """Update with gradient = `buffer.grad` * `factor` what `is_used`, by offset of its buffer and index of its slot. Collective."""
        self._counted.clear()
        used: Members = {}
        for buffer, members in self._members.items():
            if some := [member for member in members if is_used[offsets[id(buffer)] + member.index]]:
                used[buffer] = some
        if used:
            with torch.no_grad():
                self._step(used, factor)

    @abstractmethod
    def _step(self, used: Members, factor: Tensor) -> None:
        """`used`: no buffer without members, and one at least."""

    def take_back_count(self) -> None:
        """The last step was skipped on the device."""
        for count in self._counted:
            count -= 1
        self._counted.clear()

    def adopt_state(self, buffer: FlatBuffer) -> None:  # noqa: B027  (most use it as it is)
        """State of `buffer` was put into the torch optimizer from outside."""

    def _group(self, member: Member) -> dict[str, Any]:
        return self._torch.param_groups[member.group]

    def _state(self, member: Member, new: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Of a member of which this rank has a piece."""
        state = self._torch.state[member.parameter]
        if not state:
            state.update(new())
        return state

    def _count(self, state: dict[str, Tensor]) -> int:
        """One step more; its number, from 1."""
        self._counted.append(state["step"])
        state["step"] += 1
        return int(state["step"])


def keep_finite(target: Tensor, value: Tensor, finite: Tensor) -> None:
    """`target` becomes `value`, if `finite`; nothing waits for the device."""
    torch.where(finite, value, target, out=target)
