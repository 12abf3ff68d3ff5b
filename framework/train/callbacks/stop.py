"""Stops a run on request: after the current step, at the same step on every rank, so that it can still be saved and exported.

A signal to any rank sets `engine.stop_requested`; the request rides on the all-reduce of the gradient norm, and the step's `stop` value
tells every rank. A validation is given up, which a small all-reduce per batch agrees on.

The signals are SIGTERM (what the supervisor, Slurm and torchrun send), SIGUSR1 (early warning of a scheduler), and SIGINT where no
supervisor stands between the terminal and the ranks.

Unusual: on CUDA the value is read one step late (`DelayedFlag`), so that no step waits for the device. Lightning's own handling of
SIGTERM must be off (`trainer.py` sees to that): it calls a collective inside the signal handler.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from framework.train.run_dir import Finishing, write_finishing

SAME_REQUEST_SECONDS = 1.0
"""Slurm, a terminal and a wrapper script may each deliver one request; signals within this time are the same one."""


class GracefulStop(pl.Callback):
    """Use it around `fit` and what follows. `stopped_at_step` is the step after which all ranks stopped on request, or None.

    Args:
        run_dir: rank 0 tells the supervisor there that saving has begun; None without a supervisor.
        supervised: a terminal's Ctrl-C reaches the supervisor only; False: it reaches this process.
    """

    def __init__(self, run_dir: Path | None, *, supervised: bool) -> None:
        self.run_dir = run_dir
        self.signals = (signal.SIGTERM, signal.SIGUSR1) if supervised else (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        self.stopped_at_step: int | None = None
        self._in_step, self._in_validation = DelayedFlag(), DelayedFlag()
        self._previous: dict[int, Any] = {}
        self._asked: float | None = None  # when the first signal came, on the monotonic clock

    def __enter__(self) -> GracefulStop:
        self._previous = {number: signal.getsignal(number) for number in self.signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on a signal waits for the end of the step; before, it ends the process, which has nothing to save yet."""

        def request_stop(number: int, *_: Any) -> None:
            trainer.strategy.engine.stop_requested = True
            if self._is_asked_again() and number == signal.SIGINT:
                raise KeyboardInterrupt

        for number in self.signals:
            signal.signal(number, request_stop)

    def _is_asked_again(self) -> bool:
        """Whether this signal is another request than the first one."""
        now = time.monotonic()
        self._asked = self._asked or now
        return now - self._asked > SAME_REQUEST_SECONDS

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._in_step.above_zero(pl_module.last_stats.stop) and self.stopped_at_step is None:
            trainer.limit_val_batches = 0  # Lightning would validate once more before it stops
            self._stop(trainer)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        asked = torch.tensor(float(trainer.strategy.engine.stop_requested), device=trainer.strategy.root_device)
        if self._in_validation.above_zero(trainer.strategy.reduce(asked, reduce_op="sum")) and self.stopped_at_step is None:
            trainer.val_dataloaders.give_up()
            self._stop(trainer)

    def _stop(self, trainer: pl.Trainer) -> None:
        self.stopped_at_step = trainer.global_step
        trainer.should_stop = True
        if trainer.is_global_zero:
            print(f"stop requested: all ranks stop after step {trainer.global_step}", flush=True)
            if self.run_dir is not None:
                write_finishing(self.run_dir, Finishing(step=trainer.global_step, stopped=True))

    @contextmanager
    def saving(self, step: int, *, is_first: bool) -> Iterator[None]:
        """Training is over and what it made is being written: a signal does not interrupt that, but another one later does."""

        def go_on(number: int, *_: Any) -> None:
            if self._is_asked_again():
                signal.signal(number, self._previous[number])
                signal.raise_signal(number)

        self._asked = None
        for number in self.signals:
            signal.signal(number, go_on)
        if is_first and self.run_dir is not None:
            write_finishing(self.run_dir, Finishing(step=step, stopped=self.stopped_at_step is not None))
        yield


class DelayedFlag:
    """Whether a 0-d tensor is above zero: at once on the CPU; on CUDA the answer for the previous call's tensor.

    The device copies the value to the host behind the step's work, and it is read when the next step has already been queued, so the
    device never runs dry. The delay is the same on every rank, so is the step at which all see it.
    """

    def __init__(self) -> None:
        self._on_host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def above_zero(self, value: Tensor) -> bool:
        if value.device.type != "cuda":
            return bool(value > 0)
        previous = self._read()
        self._on_host = torch.empty((), dtype=value.dtype, pin_memory=True)
        self._on_host.copy_(value.detach(), non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        return previous

    def _read(self) -> bool:
        if self._copied is None:
            return False
        self._copied.synchronize()
        return bool(self._on_host > 0)
