"""Lightning's Trainer and our strategy as the recipes use them: everything that Lightning would do beside the loops is off."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from framework.config.schema import RecipeConfig
from framework.train.strategy import ZeroStrategy


def build_strategy(recipe: RecipeConfig, read: Callable[[str, int, int], Tensor] | None = None) -> ZeroStrategy:
    """The strategy of `recipe`; `read` gives pretrained weights. Weights stay sharded after `fit`: export them from `strategy.engine`,
    then `strategy.close()`."""
    return ZeroStrategy(
        zero=recipe.zero,
        offload=recipe.offload,
        precision=recipe.precision,
        grad_clip=recipe.optimizer.grad_clip,
        seed=recipe.seed,
        read=read,
        timeout_seconds=recipe.trainer.collective_timeout_seconds,
        gather_after_fit=False,
    )


def build_trainer(
    recipe: RecipeConfig,
    strategy: ZeroStrategy,
    *,
    total_steps: int,
    first_step: int = 0,
    run_dir: Path,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Logger] = (),
) -> Trainer:
    """A Trainer that runs optimizer steps `first_step` to `total_steps` over `StepBatches`.

    It validates every `eval.every_n_steps` and after the last one.

    Ranks are those of the launcher (`RANK`, `WORLD_SIZE`); progress, metrics and checkpoints are for `callbacks`.
    """
    trainer = Trainer(
        accelerator=recipe.trainer.accelerator,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        strategy=strategy,
        max_steps=total_steps,
        max_epochs=-1,
        val_check_interval=recipe.eval.every_n_steps or total_steps,  # batches, and a batch is a step; the last one: CausalLMModule
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        logger=list(loggers) or False,
        default_root_dir=run_dir,
        use_distributed_sampler=False,  # StepBatches knows its rank
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    _leave_signals_alone(trainer)
    _count_from(trainer, first_step)
    return trainer


def _count_from(trainer: Trainer, step: int) -> None:
    """Let `global_step` and the cadence of validations go on after `step`."""
    loop = trainer.fit_loop.epoch_loop
    for progress in (loop.manual_optimization.optim_step_progress.total, loop.batch_progress.total):
        for count in fields(progress):
            setattr(progress, count.name, step)


def _leave_signals_alone(trainer: Trainer) -> None:
    """No signal handlers and no per-batch broadcast of Lightning's.

    Its SIGTERM handler calls a collective inside the handler, which hangs when not all ranks get the signal at the same point, and the
    broadcast waits for the GPU in every batch. Our stop request rides on the gradient norm's all-reduce.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    for owner, name in ((connector, "register_signal_handlers"), (loop, "_broadcast_sigterm_tensor")):
        if not callable(getattr(owner, name, None)):
            raise RuntimeError(f"this version of Lightning has no {type(owner).__name__}.{name} to replace")
        setattr(owner, name, lambda: None)
