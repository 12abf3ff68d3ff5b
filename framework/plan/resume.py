"""Whether a run may go on from a checkpoint of another: what must be the same, and what may change and is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework.config.errors import Problem, UserError
from framework.config.typed import to_dict
from framework.plan.plan import Plan

FIXED = ("seed", "model.arch", "model.freeze", "model.train_last_n_blocks", "peft", "data.packing", "data.shuffle")
"""Settings that make another model or another order of samples. (Of the data a digest is compared, of the model its parameters.)"""
REMARKABLE = ("model.path", "model.tokenizer", "optimizer", "schedule", "precision", "trainer.max_steps", "trainer.epochs")
"""Settings that may change, and may change the training that follows."""


def state_of(plan: Plan) -> dict[str, Any]:
    """What a checkpoint remembers of the run, for `check_resume`."""
    return {
        "recipe": to_dict(plan.recipe),
        "architecture": to_dict(plan.architecture),
        "data": plan.train.digest,
        "global_batch_size": plan.batch.global_batch_size,
        "total_steps": plan.steps.total_steps,
    }


def check_resume(plan: Plan, saved: Mapping[str, Any], step: int) -> list[str]:
    """What has changed since the checkpoint of `step` and holds from now on, a line each.

    Raises UserError where the same training cannot go on.
    """
    now, then = _flat(to_dict(plan.recipe)), _flat(saved["recipe"])
    changed = {
        key: (old, now.get(key)) for key, old in sorted(then.items()) if old != now.get(key)
    }  # what a later version added has its default
    problems = [
        Problem(path=key, got=f"{new}, where the checkpoint was made with {old}", expected="the same", fix=f"{key}={_written(old)}")
        for key, (old, new) in changed.items()
        if _below(key, FIXED)
    ]
    if saved["architecture"] != to_dict(plan.architecture):
        got = "another architecture than that of the checkpoint"
        problems.append(Problem(path="model", got=got, expected=f"{saved['architecture']}", fix="resume=none"))
    if saved["data"] != plan.train.digest:
        got = "other training samples than those of the checkpoint (files, tokenizer, template, max_tokens or held-out rows)"
        problems.append(Problem(path="data", got=got, expected="the same", fix="resume=none model.path=RUN/export"))
    if saved["global_batch_size"] != plan.batch.global_batch_size:
        old = saved["global_batch_size"]
        got = f"{plan.batch.global_batch_size}, where the checkpoint was made with {old}"
        problems.append(Problem(path="trainer.global_batch_size", got=got, expected="the same", fix=f"trainer.global_batch_size={old}"))
    if step >= plan.steps.total_steps:
        got = f"{plan.steps.total_steps:,} steps, all of which are done in the checkpoint of step {step:,}"
        trainer = plan.recipe.trainer
        by_epochs = trainer.epochs is not None and trainer.max_steps != plan.steps.total_steps
        name, value = ("epochs", 2 * trainer.epochs) if by_epochs else ("max_steps", 2 * step)
        problems.append(Problem(path=f"trainer.{name}", got=got, expected=f"more than {step:,} steps", fix=f"trainer.{name}={value:g}"))
    if problems:
        raise UserError(*problems)
    lines = [f"{key}: {_written(old)} -> {_written(new)}" for key, (old, new) in changed.items() if _below(key, REMARKABLE)]
    if saved["total_steps"] != plan.steps.total_steps:
        lines.append(f"steps of the whole run: {saved['total_steps']:,} -> {plan.steps.total_steps:,} (the schedule follows)")
    return lines


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _below(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _written(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")
