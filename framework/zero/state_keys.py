"""Which state of an optimizer has one value for each element of a parameter, which one for each block of elements, and which is about all.

The first two are sharded as the parameter is; of the last every rank that has a piece has a copy.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from framework.kernels.moments import BLOCK, blocks
from framework.zero.layout import Piece

PER_BLOCK = ("exp_avg_scale", "exp_avg_sq_scale")
WHOLE = ("row_var", "col_var")
Kind = Literal["element", "block", "whole", "number"]


def kind_of(key: str, value: Any, numel: int) -> Kind:
    """Of the state `key` of `numel` elements. A number is a count of steps, say, as a tensor or not."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return "number"
    if key in WHOLE:
        return "whole"
    if key in PER_BLOCK:
        return "block"
    return "element" if value.numel() == numel else "number"


def elements_per_value(key: str) -> int:
    return BLOCK if key in PER_BLOCK else 1


def part(key: str, value: Any, piece: Piece) -> Any:
    """Of the state `key` of a whole parameter, a copy of what belongs to `piece`."""
    kind = kind_of(key, value, piece.slot.numel)
    if kind not in ("element", "block"):
        return value
    per = elements_per_value(key)
    return value.reshape(-1)[piece.start // per : piece.start // per + (piece.numel if per == 1 else blocks(piece.numel))].clone()
