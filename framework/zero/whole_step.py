"""What our torch optimizers have in common: a step that updates whole parameters, one after the other.

It is how they train without an engine, and the reference for their steps on shards (`flat_optimizer.py`, `piece_step.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class WholeStep(torch.optim.Optimizer, ABC):
    """As in torch, a parameter without a gradient is passed over, and `step` returns what `closure` does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update_whole(group, parameter, parameter.grad)
        return loss

    @abstractmethod
    def update_whole(self, group: dict[str, Any], parameter: nn.Parameter, grad: Tensor) -> None: ...
