"""Bytes of an optimizer's state, for plans: of what a rank has of a layout, from the settings alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from framework.config.schema import OptimizerConfig
from framework.zero.adafactor_step import state_numel
from framework.zero.eight_bit import bytes_per_moment, in_8_bits
from framework.zero.layout import Piece, span
from framework.zero.optimizer_by_name import state_values

StateBytesOf = Callable[[Sequence[Piece]], int]
"""Of the pieces that a rank has of a layout, in their order."""
IsOrthogonal = Callable[[str], bool]
"""Whether Muon makes the steps of the parameter with this name orthogonal."""


def state_bytes_of(config: OptimizerConfig, itemsize: int, is_orthogonal: IsOrthogonal, *, on_buffers: bool) -> StateBytesOf:
    """`itemsize`: bytes of a master's element. `on_buffers`: whether our kernels update whole buffers (`flat_optimizer.py`), so that there
    is state for the gaps between parameters, too."""
    values = 0 if config.name in ("muon", "adafactor") else state_values(config)

    def of_piece(piece: Piece) -> int:
        if config.name == "muon":
            return itemsize * piece.numel * (1 if is_orthogonal(piece.slot.name) else 2)
        if config.name == "adafactor":
            return itemsize * state_numel(piece.slot, piece.numel)
        if config.moments == "8bit" and in_8_bits(piece.slot.shape):
            return values * bytes_per_moment(piece.numel)
        return itemsize * piece.numel * values

    if on_buffers:
        return lambda pieces: itemsize * values * span(pieces)
    return lambda pieces: sum(map(of_piece, pieces))
