"""Reports a rank's exception before Lightning tears anything down (see `train/failure.py` for why)."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl

from framework.train.failure import report_failure


class FailureReporter(pl.Callback):
    """Put it first among the callbacks: another one's `on_exception` may take its time."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Exception):
            report_failure(self.run_dir, trainer.global_rank, exception)
