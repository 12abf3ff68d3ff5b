"""Bytes of an optimizer's state, for plans: of a piece of a parameter, from the settings alone."""

from __future__ import annotations

from collections.abc import Callable

from framework.config.schema import OptimizerConfig
from framework.zero.adafactor_step import state_numel
from framework.zero.eight_bit import bytes_per_moment, in_8_bits
from framework.zero.layout import Piece
from framework.zero.optimizer_by_name import state_values

IsOrthogonal = Callable[[str], bool]
"""Whether Muon makes the steps of the parameter with this name orthogonal."""


def state_bytes_of(config: OptimizerConfig, itemsize: int, is_orthogonal: IsOrthogonal) -> Callable[[Piece], int]:
    """`itemsize`: bytes of a master's element."""
    if config.name == "muon":
        return lambda piece: itemsize * piece.numel * (1 if is_orthogonal(piece.slot.name) else 2)
    if config.name == "adafactor":
        return lambda piece: itemsize * state_numel(piece.slot, piece.numel)
    values = state_values(config)
    if config.moments == "8bit":
        return lambda piece: values * (bytes_per_moment(piece.numel) if in_8_bits(piece.slot.shape) else itemsize * piece.numel)
    return lambda piece: itemsize * piece.numel * values
