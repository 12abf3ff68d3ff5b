"""Ends a run that learns no more: after `eval.patience` validations in a row without a better loss.

What was seen so far is in every checkpoint, so a resumed run goes on counting. Put it before `SaveCheckpoints`, which saves after the
validation of a step.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl

from framework.config.schema import EvalConfig


class Patience(pl.Callback):
    """`ended` says why the run has ended, None while it has not. Every rank has it; rank 0 decides for all."""

    def __init__(self, config: EvalConfig) -> None:
        self.patience, self.min_delta = config.patience, config.min_delta
        self.ended: str | None = None
        self._best: float | None = None
        self._best_step = 0
        self._without_better = 0
        """Validations since the best one."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.patience is None or trainer.val_dataloaders.given_up:
            return
        loss, step = pl_module.last_validation, trainer.global_step
        if trainer.strategy.broadcast(self._is_better(loss)):
            self._best, self._best_step, self._without_better = loss, step, 0
            return
        self._without_better += 1
        if self._without_better < self.patience or step >= trainer.max_steps:
            return
        trainer.should_stop = True
        self.ended = self._reason()
        if trainer.is_global_zero:
            print(f"the run ends after step {step:,}: {self.ended}", flush=True)

    def _is_better(self, loss: float) -> bool:
        return math.isfinite(loss) and (self._best is None or (loss < self._best and self._best - loss >= self.min_delta))

    def _reason(self) -> str:
        count = "1 validation" if self._without_better == 1 else f"{self._without_better} validations in a row"
        by = f" by {self.min_delta:g}" if self.min_delta else ""
        wanted = "a finite loss" if self._best is None else f"a loss{by} below {self._best:.4f}, that of step {self._best_step:,}"
        return f"{count} without {wanted} (eval.patience={self.patience})"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "best_step": self._best_step, "without_better": self._without_better}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best, self._best_step, self._without_better = state["best"], state["best_step"], state["without_better"]
