"""Loss scaling for fp16, whose smallest numbers are larger than many gradients.

Backward runs on loss * scale; `step` divides the gradients by it again, in fp32. Where a scaled gradient overflows on any rank the step
changes nothing on all of them, and the scale halves; after `loss_scale_window` good steps in a row it doubles. (Micikevicius et al. 2017,
arXiv:1710.03740.)

Unusual: the scale lives on the device and follows by arithmetic there, so that a skipped step makes no host wait. It is a power of
two as long as it starts as one, so scaling rounds nothing. What it multiplies is the *sum* of the losses of a micro-batch's tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from framework.config.schema import PrecisionConfig

GROWTH = 2.0


class LossScaler:
    """The scale, as a 0-d fp64 tensor on `device`; the same on every rank, because all see the same verdicts."""

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.is_dynamic = config.loss_scale == "dynamic"
        initial = config.initial_loss_scale if self.is_dynamic else config.loss_scale
        self._least, self._window, self._hysteresis = config.min_loss_scale, config.loss_scale_window, config.loss_scale_hysteresis
        self.scale = torch.tensor(float(initial), dtype=torch.float64, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)
        """Since the scale last changed, or a step was skipped."""
        self._overflows = torch.zeros((), dtype=torch.int64, device=device)
        """That the scale has not answered yet."""

    @property
    def exhausted(self) -> torch.Tensor:
        """Whether an overflow cannot be answered by a smaller scale: 0-d bool on the device."""
        return self.scale <= self._least if self.is_dynamic else torch.ones_like(self.scale, dtype=torch.bool)

    def update(self, finite: torch.Tensor) -> None:
        """After a step that was `finite` (0-d bool on the device) or skipped."""
        if not self.is_dynamic:
            return
        overflows = torch.where(finite, self._overflows, self._overflows + 1)
        shrinks = overflows >= self._hysteresis
        good_steps = (self._good_steps + 1).masked_fill(~finite, 0)  # `torch.where` would copy the 0 to the device and wait
        grows = good_steps >= self._window
        smaller, larger = (self.scale / GROWTH).clamp(min=self._least), self.scale * GROWTH
        self.scale = torch.where(shrinks, smaller, torch.where(grows, larger, self.scale))
        self._good_steps = good_steps.masked_fill(grows, 0)
        self._overflows = overflows.masked_fill(shrinks | grows, 0)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale.item(), "good_steps": self._good_steps.item(), "overflows": self._overflows.item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as saved; a fixed scale stays what the recipe says."""
        if self.is_dynamic:
            self.scale.fill_(state["scale"])
            self._good_steps.fill_(state["good_steps"])
            self._overflows.fill_(state["overflows"])
