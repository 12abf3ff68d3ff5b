"""Lion (arXiv:2302.06675) as a torch optimizer: one moment, and a step of the same size for every element.

Its learning rate is 3 to 10 times smaller than AdamW's, its weight decay as many times larger, so that their product stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from framework.kernels.lion import lion_reference_
from framework.kernels.shard import ShardRange
from framework.zero.whole_step import WholeStep


class Lion(WholeStep):
    """Decoupled weight decay, as in AdamW. Raises ValueError for settings out of range."""

    elementwise = True

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"Lion: got lr={lr}, betas={betas}, weight_decay={weight_decay}; expected lr and weight_decay from 0, betas in [0, 1)"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update_whole(self, group: dict[str, Any], state: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        whole = ShardRange(start=0, stop=parameter.numel(), lr=group["lr"], weight_decay=group["weight_decay"])
        lion_reference_(parameter.view(-1), state["exp_avg"].view(-1), grad.view(-1), [whole], betas=group["betas"])
