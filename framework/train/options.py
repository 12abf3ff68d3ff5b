"""What of a `lightning.Trainer` and a LightningModule cannot be honoured by the ZeRO engine: found before anything slow, said in one go.

Lightning ignores some of these without a word when a strategy brings its own plugins (`precision=`), and lets others touch parameters
and gradients that the engine holds elsewhere.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.utilities.model_helpers import is_overridden

from framework.config.errors import Problem
from framework.train.plain_data import pack
from framework.zero.optimizer import EIGHT_BIT, STEPS

LIGHTNING_PRECISION = {"64": "float64", "32": "float32", "bf16": "bfloat16", "16": "float16"}

ELEMENTWISE_OPTIMIZERS = (
    torch.optim.Adadelta,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)

ACROSS_RANKS = (*STEPS, *EIGHT_BIT)
"""For which the engine has a step of its own."""

CALLBACKS = {
    StochasticWeightAveraging: "averages parameters that are sharded over the ranks",
    WeightAveraging: "averages parameters that are sharded over the ranks",
    BaseFinetuning: "freezes and unfreezes parameters after they were laid out in shards",
    ModelPruning: "replaces parameters after they were laid out in shards",
    LearningRateFinder: "restores a checkpoint in the middle of a run",
    BatchSizeFinder: "restores a checkpoint in the middle of a run",
}
CALLBACKS_ALONE = {OnExceptionCheckpoint: "saves on the rank that failed, while saving takes all of them, and would hang"}
"""Refused on several ranks."""


def trainer_problems(trainer: Trainer, module: LightningModule, grad_clip: float | None, world_size: int) -> list[Problem]:
    """Every option of `trainer` and hook of `module` that would be ignored or go wrong; `grad_clip` is the strategy's own."""
    problems = []
    asked = str(trainer._accelerator_connector._precision_flag)  # the only place where Lightning keeps it
    if asked != "32-true":
        dtype = LIGHTNING_PRECISION.get(asked.split("-")[0], "bfloat16")
        setting = "autocast" if asked.endswith("-mixed") else "compute_dtype"
        problems.append(
            Problem(
                path="Trainer(precision=)",
                got=repr(asked),
                expected="no precision here: parameters and their data types are the engine's",
                fix=f'ZeroStrategy(precision=PrecisionConfig({setting}="{dtype}"))',
            )
        )
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        problems.append(clip_by_value())
    if trainer.gradient_clip_val and grad_clip is not None and grad_clip != trainer.gradient_clip_val:
        problems.append(
            Problem(
                path="Trainer(gradient_clip_val=)",
                got=f"{trainer.gradient_clip_val} beside ZeroStrategy(grad_clip={grad_clip})",
                expected="one of the two",
                fix=f"Trainer(gradient_clip_val={trainer.gradient_clip_val}, strategy=ZeroStrategy(...))",
            )
        )
    device = trainer.strategy.root_device.type
    if device not in ("cpu", "cuda"):
        problems.append(Problem(path="Trainer(accelerator=)", got=repr(device), expected="'cpu' or 'cuda'"))
    if trainer._accelerator_connector._layer_sync is not None and world_size > 1 and device == "cpu":
        problems.append(
            Problem(path="Trainer(sync_batchnorm=)", got="True on CPU", expected="False: torch synchronises batch norm on GPUs only")
        )
    refusals = CALLBACKS | (CALLBACKS_ALONE if world_size > 1 else {})
    for callback in trainer.callbacks:
        for refused, reason in refusals.items():
            if isinstance(callback, refused):
                problems.append(Problem(path="Trainer(callbacks=)", got=type(callback).__name__, expected=f"a run without it: it {reason}"))
    if (plugin := trainer._accelerator_connector.checkpoint_io) is not None:
        expected = "no plugin for checkpoints: every rank writes its own part of them"
        problems.append(Problem(path="Trainer(plugins=)", got=type(plugin).__name__, expected=expected))
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "save_on_exception", False) and world_size > 1:
            expected = "False: a checkpoint takes all ranks, and the others may not have failed"
            problems.append(Problem(path=f"{type(callback).__name__}(save_on_exception=)", got="True", expected=expected))
    if trainer.checkpoint_callbacks:
        for owner in filter(None, (module, trainer.datamodule)):
            problems += pack(owner.hparams, f"{type(owner).__name__}.hparams")[2]
    if is_overridden("backward", module):
        problems.append(
            Problem(
                path=f"{type(module).__name__}.backward",
                got="an overridden hook",
                expected="Lightning's own: the engine runs backward, to know which micro-batch ends a step",
                fix="scale the loss in training_step instead",
            )
        )
    return problems


def optimizer_problems(optimizers: list[torch.optim.Optimizer]) -> list[Problem]:
    """Why the engine cannot run what `configure_optimizers` returned on flat shards; empty when it can."""
    path = "configure_optimizers"
    if len(optimizers) != 1 or isinstance(optimizers[0], _MockOptimizer):
        count = len([optimizer for optimizer in optimizers if not isinstance(optimizer, _MockOptimizer)])
        return [Problem(path=path, got=f"{count} optimizers", expected="one, with as many param groups as you like")]
    kind = type(optimizers[0])
    if kind in (*ELEMENTWISE_OPTIMIZERS, *ACROSS_RANKS) or getattr(kind, "elementwise", False):
        return []
    if kind.__module__.startswith("torch.optim"):
        return [
            Problem(
                path=path,
                got=f"torch.optim.{kind.__name__}",
                expected="an optimizer that treats every element by itself: ranks hold flat pieces of tensors",
                fix=f"one of torch.optim.{{{', '.join(allowed.__name__ for allowed in ELEMENTWISE_OPTIMIZERS)}}}, or of "
                + ", ".join(f"{allowed.__module__}.{allowed.__name__}" for allowed in ACROSS_RANKS),
            )
        ]
    return [
        Problem(
            path=path,
            got=f"{kind.__module__}.{kind.__name__}",
            expected="an optimizer known to treat every element by itself: ranks hold flat pieces of tensors",
            fix=f"{kind.__name__}.elementwise = True  # only if no update depends on a tensor's shape, norm or other elements",
        )
    ]


def clip_by_value() -> Problem:
    return Problem(
        path="gradient_clip_algorithm",
        got="'value'",
        expected="'norm': gradients are reduced, clipped and applied shard by shard, by their global norm",
        fix='Trainer(gradient_clip_val=1.0, gradient_clip_algorithm="norm")',
    )
