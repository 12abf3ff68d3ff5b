"""Saves everything that is needed to go on, at a cadence; and puts it back before the first step of a resumed run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from framework.checkpoint.folder import CHECKPOINTS, prune, step_folder
from framework.checkpoint.load import Checkpoint, load_optimizer, restore_random_state
from framework.checkpoint.save import SaveError, save
from framework.config.errors import Problem, UserError
from framework.config.schema import CheckpointConfig
from framework.train.run_dir import saving

ROUNDS, SECONDS_A_ROUND = 40, 0.25


class SaveCheckpoints(pl.Callback):
    """Every rank has it; all save at the same step.

    Args:
        run_dir: checkpoints go to its `checkpoints/`.
        config: cadence, how many stay, what an error means.
        run_state: what else is needed to go on, as JSON; asked for at each save.
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig, run_state: Callable[[], dict[str, Any]]) -> None:
        self.run_dir, self.config, self.run_state = run_dir, config, run_state
        self._after_validation = False
        self.saved_step: int | None = None
        """Of the newest checkpoint that this run has made."""
        self.failures: list[str] = []
        """Why saves failed after which training went on."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raises UserError where a machine does not see the folder of rank 0, before hours have gone into steps that cannot be saved."""
        if not (self.config.every_n_steps or self.config.on_stop or self.config.at_end):
            return
        world, probe = trainer.strategy.engine.world, self.run_dir / CHECKPOINTS / ".probe"
        if world.rank == 0:
            with contextlib.suppress(OSError):  # a folder that cannot be written is what a save names
                probe.parent.mkdir(parents=True, exist_ok=True)
                probe.touch()
        made = world.gather_objects(probe.exists())[0]
        seen = world.gather_objects(not made or _appears(probe))
        if world.rank == 0:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)
                probe.parent.rmdir()
        if not all(seen):
            got = f"{self.run_dir}, which rank {seen.index(False)} does not see as rank 0 does"
            expected, fix = "a folder that all machines share", "runs_dir=FOLDER, or checkpoint.every_n_steps=null checkpoint.on_stop=false"
            raise UserError(Problem(path="runs_dir", got=got, expected=expected, fix=fix))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        every, step = self.config.every_n_steps, trainer.global_step
        if every is not None and step % every == 0 and step < trainer.max_steps:
            self._after_validation = _validates(trainer)
            if not self._after_validation:
                self.save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A checkpoint of a step with a validation holds what followed from it, for it is not repeated by the run that goes on."""
        if self._after_validation:
            self._after_validation = False
            self.save(trainer)

    def save(self, trainer: pl.Trainer) -> None:
        """Now. Collective. Raises UserError where it fails and `on_error` says so."""
        engine, began = trainer.strategy.engine, time.perf_counter()
        step = engine.steps_done
        if step == self.saved_step:
            return
        try:
            with saving(self.run_dir if trainer.is_global_zero else None):
                nbytes = save(engine, step_folder(self.run_dir, step), run=self.run_state())
        except SaveError as error:
            if self.config.on_error == "stop":
                expected, fix = "a disk that takes it", "runs_dir=FOLDER, checkpoint.keep=1 or checkpoint.on_error=continue"
                raise UserError(Problem(path=f"checkpoint of step {step}", got=str(error), expected=expected, fix=fix)) from error
            self.failures.append(f"step {step}: {error}")
            if trainer.is_global_zero:
                print(f"CHECKPOINT NOT SAVED at step {step}: {error}; training goes on (checkpoint.on_error=continue)", flush=True)
            return
        self.saved_step = step
        if trainer.is_global_zero:
            self._prune()
            size = f"{nbytes / 1e6:,.0f} MB" + (" per rank" if engine.world.size > 1 else "")
            print(f"checkpoint: step {step}, {size} in {time.perf_counter() - began:.1f} s", flush=True)

    def _prune(self) -> None:
        try:
            prune(self.run_dir, self.config.keep)
        except OSError as error:  # on rank 0 alone, and the new checkpoint is whole: nothing to stop for
            print(f"older checkpoints stay: {error}", flush=True)


def _validates(trainer: pl.Trainer) -> bool:
    """Whether a validation follows this step."""
    return bool(trainer.num_val_batches) and trainer.limit_val_batches != 0 and trainer.global_step % trainer.val_check_batch == 0


def _appears(path: Path) -> bool:
    """Whether `path` is there, or soon is: network file systems take their time."""
    for _ in range(ROUNDS):
        if path.exists():
            return True
        time.sleep(SECONDS_A_ROUND)
    return False


class Resume(pl.Callback):
    """The engine's masters were read from `checkpoint` already; this adds the optimizer's state and torch's generators."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        load_optimizer(trainer.strategy.engine, self.checkpoint)
        restore_random_state(self.checkpoint, trainer.strategy.engine)
