"""One line per logged step on rank 0's console, the same numbers in metrics.csv and in the dashboard.

    step  120/1,000  epoch 0.48  loss 1.8342  lr 1.96e-05  grad 0.913  12,345 tok/s  0:02:10 < 0:15:52

The module offers `last_stats` (`loss`, `grad_norm`, `tokens`, ...: 0-d tensors over all ranks), `lr` and, after a validation,
`last_validation_by_source`. `tokens` are trained tokens of all ranks.

Unusual: on steps that are not logged nothing is read from the device; token counts are summed there. The loss of a line is that of
its step, so that the same step shows the same number whatever the cadence.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import lightning.pytorch as pl
import torch

from framework.progress import progress
from framework.train.loggers import Tracker
from framework.train.metrics import MetricsFile, MetricsRow
from framework.train.source_loss import SourceLoss, perplexity, total

MOST_SOURCES_SHOWN = 4


class Progress(pl.Callback):
    """Every rank may have it; only rank 0 reads and writes.

    Args:
        metrics: where rows go; closed at the end.
        tracker: the dashboard, see `loggers.py`.
        total_steps: optimizer steps of the whole run.
        steps_per_epoch: optimizer steps in one pass over the data.
        log_every_n_steps: cadence; the first and the last step are always logged.
    """

    def __init__(
        self, metrics: MetricsFile | None, tracker: Tracker, *, total_steps: int, steps_per_epoch: float, log_every_n_steps: int
    ) -> None:
        self.metrics, self.tracker = metrics, tracker
        self.total_steps, self.steps_per_epoch, self.log_every_n_steps = total_steps, steps_per_epoch, log_every_n_steps
        self.last_row: MetricsRow | None = None
        """The last training row, for the summary."""
        self._tokens = 0  # trained, of the whole run, up to the last logged step
        self._unread_tokens: torch.Tensor | None = None  # trained, since then
        self._seconds_before = 0.0  # of earlier parts of a resumed run
        self._first_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = self._logged_at = time.perf_counter()
        self._first_step = trainer.global_step
        if trainer.is_global_zero:
            print(f"training: {self.total_steps:,} steps", flush=True)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.is_global_zero:
            return
        stats, step = pl_module.last_stats, trainer.global_step
        self._unread_tokens = stats.tokens.double() if self._unread_tokens is None else self._unread_tokens + stats.tokens
        if step % self.log_every_n_steps == 0 or step in (1, self.total_steps):
            self._log(step, stats, pl_module.lr)

    def _log(self, step: int, stats: Any, lr: float) -> None:
        scale = torch.ones_like(self._unread_tokens) if stats.loss_scale is None else stats.loss_scale
        values = torch.stack([stats.loss.double(), stats.grad_norm.double(), self._unread_tokens, scale, stats.skipped.double()])
        loss, grad_norm, trained, loss_scale, skipped = values.tolist()  # the only wait for the device
        now = time.perf_counter()
        self._tokens += round(trained)
        rate = trained / max(now - self._logged_at, 1e-9)
        self._logged_at, self._unread_tokens = now, None
        row = MetricsRow(
            step=step,
            epoch=round(step / self.steps_per_epoch, 4),
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens=self._tokens,
            tokens_per_second=round(rate, 1),
            seconds=round(self._seconds(), 3),
            loss_scale=None if stats.loss_scale is None else loss_scale,
        )
        self.last_row = row
        print(self._line(row) + (f"  overflow at loss scale {loss_scale:g}: skipped" if skipped else ""), flush=True)
        self._record(row)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero or trainer.val_dataloaders.given_up:
            return
        step, sources = trainer.global_step, pl_module.last_validation_by_source
        every = total(sources)
        print(f"step {self._of(step)}  validation loss {every.loss:.4f}  perplexity {every.perplexity:,.2f}{_shown(sources)}", flush=True)
        self._record(
            MetricsRow(
                step=step,
                epoch=round(step / self.steps_per_epoch, 4),
                tokens=self._tokens,
                seconds=round(self._seconds(), 3),
                val_loss=every.loss,
                val_perplexity=every.perplexity,
                val_loss_of={source.name: source.loss for source in sources} if len(sources) > 1 else {},
            )
        )
        self.training_goes_on()

    def training_goes_on(self) -> None:
        """The time since the last line was not that of training: tokens per second begin to count here."""
        self._logged_at = time.perf_counter()

    def _record(self, row: MetricsRow) -> None:
        if self.metrics is not None:
            self.metrics.append(row)
        names = {"loss": "train/loss", "lr": "train/lr", "grad_norm": "train/grad_norm", "tokens_per_second": "train/tokens_per_second"}
        names |= {"val_loss": "val/loss", "val_perplexity": "val/perplexity", "loss_scale": "train/loss_scale"}
        names |= {"tokens": "tokens", "epoch": "epoch"}
        values = {title: value for name, title in names.items() if (value := getattr(row, name)) is not None}
        for source, loss in row.val_loss_of.items():
            values |= {f"val/{source}/loss": loss, f"val/{source}/perplexity": perplexity(loss)}
        self.tracker.log(row.step, values)

    def _line(self, row: MetricsRow) -> str:
        here = time.perf_counter() - self._began
        left = here / max(row.step - self._first_step, 1) * (self.total_steps - row.step)
        return (
            f"step {self._of(row.step)}  epoch {row.epoch:.2f}  loss {row.loss:.4f}  lr {row.lr:.2e}  grad {row.grad_norm:.3f}  "
            f"{row.tokens_per_second:,.0f} tok/s  {_clock(row.seconds)} < {_clock(left)}"
        )

    def _of(self, step: int) -> str:
        total = f"{self.total_steps:,}"
        return f"{step:{len(total)},}/{total}"

    def _seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._began

    def state_dict(self) -> dict[str, Any]:
        unread = 0 if self._unread_tokens is None else round(self._unread_tokens.item())
        return {"tokens": self._tokens + unread, "seconds": self._seconds()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tokens, self._seconds_before = state["tokens"], state["seconds"]


class ValidationBar(pl.Callback):
    """How far a long validation has come."""

    def __init__(self) -> None:
        self._batches: Generator[int] | None = None

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batches = progress(range(len(trainer.val_dataloaders)), "validation", unit="batches", show=trainer.is_global_zero)
        next(self._batches)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        next(self._batches, None)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batches.close()


def _shown(sources: list[SourceLoss]) -> str:
    """`  (chats 1.2345, qa 0.9876)`: the loss of each of several sources."""
    if len(sources) < 2:
        return ""
    shown = ", ".join(f"{source.name} {source.loss:.4f}" for source in sources[:MOST_SOURCES_SHOWN])
    return f"  ({shown}{', ...' if len(sources) > MOST_SOURCES_SHOWN else ''})"


def _clock(seconds: float) -> str:
    """`1:02:03`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
