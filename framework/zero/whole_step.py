"""What our torch optimizers have in common: a step that updates whole parameters, one after the other.

It is how they train without an engine, and the reference for their steps on shards (`flat_optimizer.py`, `piece_step.py`). Kernels take
flat tensors, so a parameter that does not lie in order (channels last, a transpose) is updated as a copy that does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
                if parameter.grad is None:
                    continue
                whole = parameter.contiguous()
                self.update_whole(group, self.state[parameter], whole, parameter.grad.contiguous())
                if whole is not parameter:
                    parameter.copy_(whole)
        return loss

    @abstractmethod
    def update_whole(self, group: dict[str, Any], state: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        """Of one parameter, contiguous; its `state` is empty in its first step."""
