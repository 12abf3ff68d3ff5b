"""Saves everything that is needed to go on, at a cadence and at the best validations; and puts it back before a resumed run's first step.

A save is begun at a step and written by a thread while training goes on (`checkpoint/save.py`); the step at which no rank is busy with
it any more is known to all ranks from the step's own all-reduce (`StepStats.busy`), and there they ask each other how it went. A save
that is due while another is under way waits for that.

Unusual: where a save and a validation are due at the same step, the validation comes first, so that the checkpoint knows its loss and a run
that goes on from it need not repeat it.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from framework.checkpoint.folder import CHECKPOINTS, prune, step_folder
from framework.checkpoint.load import Checkpoint, load_optimizer, restore_random_state
from framework.checkpoint.save import Save, SaveError, Staging
from framework.config.errors import Problem, UserError
from framework.config.schema import CheckpointConfig
from framework.train.callbacks.stop import DelayedFlag
from framework.train.host_memory import free_memory_bytes
from framework.train.run_dir import saving
from framework.zero import ZeroEngine

ROUNDS, SECONDS_A_ROUND = 40, 0.25
AFTER_AN_ERROR_SECONDS = 5.0
"""When training has failed, rank 0 waits so long for the other ranks' files of a save that was under way."""


class SaveCheckpoints(pl.Callback):
    """Every rank has it; all save at the same step.

    Args:
        run_dir: checkpoints go to its `checkpoints/`.
        config: cadence, how many stay, what an error means.
        run_state: what else is needed to go on, as JSON; asked for at each save.
        validate_every_n_steps: cadence of validations; None: there is none before the last step.
        copy_bytes: host memory that the copy of this rank's part takes.
    """

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        run_state: Callable[[], dict[str, Any]],
        *,
        validate_every_n_steps: int | None = None,
        copy_bytes: int = 0,
    ) -> None:
        self.run_dir, self.config, self.run_state = run_dir, config, run_state
        self.validate_every_n_steps, self.copy_bytes = validate_every_n_steps, copy_bytes
        self.saved_step: int | None = None
        """Of the newest checkpoint that this run has made."""
        self.failures: list[str] = []
        """Why saves failed after which training went on."""
        self.staging = Staging() if config.asynchronous else None
        self._under_way: Save | None = None
        self._nobody_busy = DelayedFlag()
        self._validated: tuple[int, float] | None = None  # step, loss
        self._losses: dict[int, float] = {}  # validation losses of the steps that were saved

    # ---- before the first step
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raises UserError for what would come out at the first save, hours later: no room for the copy, or a machine that does not see the
        folder of rank 0."""
        config, engine = self.config, trainer.strategy.engine
        engine.busy = lambda: self._under_way is not None and self._under_way.busy
        if not (config.every_n_steps or config.on_stop or config.at_end or config.keep_best):
            return
        self._check_room(engine)
        self._check_folder(engine)

    def _check_room(self, engine: ZeroEngine) -> None:
        needed, there = self.copy_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", 1)), free_memory_bytes()
        short = engine.world.gather_objects(self.staging is not None and there is not None and needed > there)
        if any(short):
            got = f"true, which takes {needed / 2**30:,.1f} GiB of host memory of a machine (rank {short.index(True)})"
            expected = "as much free memory" if there is None else f"at most the {there / 2**30:,.1f} GiB that are free here"
            raise UserError(Problem(path="checkpoint.asynchronous", got=got, expected=expected, fix="checkpoint.asynchronous=false"))

    def _check_folder(self, engine: ZeroEngine) -> None:
        world, probe = engine.world, self.run_dir / CHECKPOINTS / ".probe"
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

    # ---- when
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._under_way is not None and self._nobody_busy.above_zero(1 - pl_module.last_stats.busy):
            self._advance(trainer)
        if self._is_due(trainer) and not self._validation_follows(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        given_up = trainer.val_dataloaders.given_up
        self._validated = None if given_up else (trainer.global_step, pl_module.last_validation)
        if self._is_due(trainer) or self._is_among_the_best():
            self.save(trainer)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        every, step = self.config.every_n_steps, trainer.global_step
        return every is not None and step % every == 0 and step < trainer.max_steps

    def _validation_follows(self, trainer: pl.Trainer) -> bool:
        every = self.validate_every_n_steps
        return every is not None and trainer.global_step % every == 0 and trainer.limit_val_batches != 0  # 0: stopped on request

    def _is_among_the_best(self) -> bool:
        """The same on all ranks, as the losses are."""
        if self._validated is None or not self.config.keep_best or not math.isfinite(self._validated[1]):
            return False
        best = sorted(self._losses.values())[: self.config.keep_best]
        return len(best) < self.config.keep_best or self._validated[1] < best[-1]

    # ---- saving
    def save(self, trainer: pl.Trainer) -> None:
        """Begin one of this step, after the end of that under way. Collective. Raises UserError where it fails and `on_error` says so."""
        engine = trainer.strategy.engine
        step = engine.steps_done
        with saving(self.run_dir if trainer.is_global_zero else None):
            if self._under_way is not None:
                if self._under_way.step == step:
                    return
                self._wait(trainer, step)
            if step == self.saved_step:
                return
            loss = self._validated[1] if self._validated is not None and self._validated[0] == step else None
            state = self.run_state() | {"validation_loss": loss if loss is not None and math.isfinite(loss) else None}
            with self._failures_handled(trainer, step):
                self._under_way = Save(
                    engine, step_folder(self.run_dir, step), run=state, staging=self.staging, afterwards=self._remove_old
                )
                self._nobody_busy = DelayedFlag()
                if state["validation_loss"] is not None:
                    self._losses[step] = loss
            if self.staging is None:
                self.finish(trainer)

    def finish(self, trainer: pl.Trainer) -> None:
        """Wait for the save under way, if there is one. Collective. Raises like `save`."""
        while self._under_way is not None:
            self._advance(trainer)

    def _wait(self, trainer: pl.Trainer, step: int) -> None:
        before, began = self._under_way.step, time.perf_counter()
        self.finish(trainer)
        if trainer.is_global_zero and (waited := time.perf_counter() - began) > 0.1:
            print(f"checkpoint: step {step} waited {waited:.1f} s for that of step {before} to be written", flush=True)

    def _advance(self, trainer: pl.Trainer) -> None:
        under_way = self._under_way
        with self._failures_handled(trainer, under_way.step):
            if not under_way.advance():
                self._nobody_busy = DelayedFlag()
                return
            self._under_way, self.saved_step = None, under_way.step
            if trainer.is_global_zero:
                size = f"{under_way.nbytes / 1e6:,.0f} MB" + (" per rank" if trainer.world_size > 1 else "")
                stalled = f", training waited {under_way.stall_seconds:.2f} s" if self.staging is not None else ""
                print(f"checkpoint: step {under_way.step}, {size} in {under_way.write_seconds:.1f} s{stalled}", flush=True)

    @contextlib.contextmanager
    def _failures_handled(self, trainer: pl.Trainer, step: int):
        try:
            yield
        except SaveError as error:
            self._under_way = None
            self._losses.pop(step, None)
            if self.config.on_error == "stop":
                expected, fix = "a disk that takes it", "runs_dir=FOLDER, checkpoint.keep=1 or checkpoint.on_error=continue"
                raise UserError(Problem(path=f"checkpoint of step {step}", got=str(error), expected=expected, fix=fix)) from error
            self.failures.append(f"step {step}: {error}")
            if trainer.is_global_zero:
                print(f"CHECKPOINT NOT SAVED at step {step}: {error}; training goes on (checkpoint.on_error=continue)", flush=True)

    def _remove_old(self) -> None:
        config = self.config
        try:
            prune(self.run_dir, config.keep, keep_every_n_steps=config.keep_every_n_steps, keep_best=config.keep_best)
        except (OSError, UserError) as error:  # on rank 0 alone, and the new checkpoint is whole: nothing to stop for
            print(f"older checkpoints stay: {error}", flush=True)

    # ---- the end
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Other ranks may be anywhere, so nothing is sent: what was nearly written is finished."""
        if self._under_way is not None and isinstance(exception, Exception):
            self._under_way.give_up(AFTER_AN_ERROR_SECONDS)


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
