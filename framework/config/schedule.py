"""Learning rate over optimizer steps, and how many steps there are. Pure functions of the recipe: ranks and accumulation play no part.

Steps are counted from 0: `lr_factor(schedule, k, total)` is the factor on `optimizer.lr` used by optimizer step k of 0 .. total-1.
Warm-up over w steps is (k+1)/w for k < w, so the peak is reached with step w-1 and no step is wasted on a rate of zero. From there the
rate falls to `min_lr_ratio`, reached exactly with the last step, total-1. A run of a single step uses the peak.

    factor 1 |    /‾‾‾\\            linear, cosine: fall from step max(w,1)-1 to step total-1
             |   /     \\           wsd: stays at 1, falls over the last round(decay_ratio * total) steps
       floor |  /       \\__ total-1 constant: stays at 1
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from framework.config.errors import Problem, UserError
from framework.config.schema import ScheduleConfig, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """How long a run is."""

    total_steps: int
    """Optimizer steps of the whole run."""
    steps_per_epoch: int
    """ceil(samples / global batch): the last step of an epoch may be short."""
    epochs: float
    """Passes over the training data in `total_steps`."""


def plan_steps(trainer: TrainerConfig, samples: int, global_batch: int) -> StepPlan:
    """Steps of a run over `samples` training samples with `global_batch` samples a step. Raises UserError for a run without steps."""
    if samples < 1:
        raise UserError(Problem(path="data.train", got="0 training samples, so 0 optimizer steps", expected="at least one sample"))
    steps_per_epoch = math.ceil(samples / global_batch)
    ends = []
    if trainer.max_steps is not None:
        ends.append(trainer.max_steps)
    if trainer.epochs is not None:
        ends.append(math.ceil(round(trainer.epochs * steps_per_epoch, 6)))  # 0.1 * 30 is 3.0000000000000004 for a computer
    total = min(ends, default=0)
    if total < 1:
        raise UserError(zero_steps(trainer))
    return StepPlan(total_steps=total, steps_per_epoch=steps_per_epoch, epochs=total / steps_per_epoch)


def zero_steps(trainer: TrainerConfig) -> Problem:
    """The problem of a run that would not train."""
    name = "max_steps" if trainer.max_steps is not None and (trainer.max_steps <= 0 or trainer.epochs is None) else "epochs"
    value = getattr(trainer, name)
    if value is None:
        got, expected = "neither trainer.max_steps nor trainer.epochs", "at least one of them"
        return Problem(path="trainer.max_steps", got=got, expected=expected, fix="trainer.epochs=1")
    path = f"trainer.{name}"
    return Problem(path=path, got=f"{value:g}, a run of 0 optimizer steps", expected="at least one step", fix=f"{path}=1")


def warmup_steps(schedule: ScheduleConfig, total_steps: int) -> int:
    """Steps of linear warm-up; 0 for none."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return round((schedule.warmup_ratio or 0.0) * total_steps)


def decay_steps(schedule: ScheduleConfig, total_steps: int) -> int:
    """Steps over which the rate falls: at the end for wsd, all after warm-up for linear and cosine, 0 for constant."""
    after_peak = total_steps - max(warmup_steps(schedule, total_steps), 1)
    if schedule.name == "constant":
        return 0
    if schedule.name == "wsd":
        return min(max(1, round(schedule.decay_ratio * total_steps)), after_peak)
    return after_peak


def lr_factor(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """Factor on the peak learning rate for optimizer step `step` (0 .. total_steps-1).

    A step past the end keeps the last factor. Raises UserError when warm-up leaves no step at or after the peak.
    """
    warmup = warmup_steps(schedule, total_steps)
    if warmup > 0 and warmup >= total_steps:
        raise UserError(warmup_too_long(schedule, warmup, total_steps))
    if step < warmup:
        return (step + 1) / warmup
    fall = decay_steps(schedule, total_steps)
    begun = step - (total_steps - 1 - fall)  # 0: still at the peak, `fall`: at the floor
    if fall == 0 or begun <= 0:
        return 1.0
    floor = schedule.min_lr_ratio
    if begun >= fall:
        return floor
    share = begun / fall
    left = 0.5 * (1.0 + math.cos(math.pi * share)) if schedule.name == "cosine" else 1.0 - share
    return floor + (1.0 - floor) * left


def warmup_too_long(schedule: ScheduleConfig, warmup: int, total_steps: int) -> Problem:
    """The problem of a warm-up that lasts as long as the run."""
    path = "schedule.warmup_steps" if schedule.warmup_steps is not None else "schedule.warmup_ratio"
    got = f"a warm-up of {warmup} steps in a run of {total_steps}, which never reaches the decay"
    fix = f"schedule.warmup_steps={total_steps // 10}"
    return Problem(path=path, got=got, expected=f"a warm-up shorter than the run: 0 to {total_steps - 1} steps", fix=fix)
