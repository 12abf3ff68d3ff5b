"""Whether a run may go on from a checkpoint of another: what must be the same, and what may change and is said.

`compare_settings` needs no torch, model or data, so that the command tells the most frequent mistakes within a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from framework.config.batch import solve_batch
from framework.config.errors import Problem, UserError
from framework.config.hardware import world_size
from framework.config.schema import RecipeConfig
from framework.config.typed import to_dict

if TYPE_CHECKING:
    from framework.plan.plan import Plan

FIXED = ("seed", "model.arch", "model.freeze", "model.train_last_n_blocks", "peft", "optimizer.name", "data.packing", "data.shuffle")
"""Settings that make another model or another order of samples. (Of the data a digest is compared, of the model its parameters.)"""
REMARKABLE = (
    "model.path",
    "model.tokenizer",
    "model.chat_template",
    "data.validation",
    "data.validation_fraction",
    "optimizer",
    "schedule",
    "precision",
    "trainer.max_steps",
    "trainer.epochs",
    "eval",
    "zero.gather_compression",
    "zero.reduce_compression",
    "zero.error_feedback",
)
"""Settings that may change, and may change the training that follows or what is measured of it."""
WHERE_IT_BEGAN = ("precision.initial_loss_scale",)
"""Settings that a resumed run has no use for."""


def state_of(plan: Plan) -> dict[str, Any]:
    """What a checkpoint remembers of the run, for `check_resume`."""
    return {
        "recipe": to_dict(plan.recipe),
        "architecture": to_dict(plan.architecture),
        "data": plan.train.digest,
        "global_batch_size": plan.batch.global_batch_size,
        "total_steps": plan.steps.total_steps,
    }


def compare_settings(recipe: RecipeConfig, saved: Mapping[str, Any], step: int) -> list[Problem]:
    """Why `recipe` cannot go on from the checkpoint of `step` that remembers `saved`, as far as settings tell."""
    if "recipe" not in saved:
        return [Problem(path="resume", got="a checkpoint that no recipe has made", expected="one of a training run", fix="resume=none")]
    problems = [
        Problem(path=key, got=f"{new}, where the checkpoint was made with {old}", expected="the same", fix=f"{key}={_written(old)}")
        for key, (old, new) in _changed(recipe, saved).items()
        if _below(key, FIXED)
    ]
    old = saved["global_batch_size"]
    try:
        batch = solve_batch(recipe.trainer, world_size(recipe.trainer)).global_batch_size
    except UserError:  # which `check` tells, or the plan
        batch = old
    if batch != old:
        got = f"{batch}, where the checkpoint was made with {old}"
        problems.append(Problem(path="trainer.global_batch_size", got=got, expected="the same", fix=f"trainer.global_batch_size={old}"))
    if recipe.trainer.max_steps is not None and step >= recipe.trainer.max_steps:
        problems.append(_all_done("max_steps", recipe.trainer.max_steps, 2 * step, step))
    return problems


def check_resume(plan: Plan, saved: Mapping[str, Any], step: int) -> list[str]:
    """What has changed since the checkpoint of `step` and holds from now on, a line each.

    Raises UserError where the same training cannot go on.
    """
    problems = compare_settings(plan.recipe, saved, step)
    if "recipe" not in saved:
        raise UserError(*problems)
    if saved["architecture"] != to_dict(plan.architecture):
        got = "another architecture than that of the checkpoint"
        problems.append(Problem(path="model", got=got, expected=f"{saved['architecture']}", fix="resume=none"))
    if saved["data"] != plan.train.digest:
        got = "other training samples than those of the checkpoint (files, tokenizer, template, max_tokens or held-out rows)"
        problems.append(Problem(path="data", got=got, expected="the same", fix="resume=none model.path=RUN/export"))
    trainer, total = plan.recipe.trainer, plan.steps.total_steps
    if step >= total and total != trainer.max_steps:  # else it has been said
        problems.append(_all_done("epochs", total, 2 * trainer.epochs, step))
    if problems:
        raise UserError(*problems)
    changed = _changed(plan.recipe, saved)
    began = WHERE_IT_BEGAN if saved["recipe"]["precision"]["compute_dtype"] == plan.recipe.precision.compute_dtype else ()
    lines = [
        f"{key}: {_written(old)} -> {_written(new)}"
        for key, (old, new) in changed.items()
        if _below(key, REMARKABLE) and not _below(key, began)
    ]
    if saved["total_steps"] != plan.steps.total_steps:
        lines.append(f"steps of the whole run: {saved['total_steps']:,} -> {plan.steps.total_steps:,} (the schedule follows)")
    return lines


def validates_alike(recipe: RecipeConfig, saved: Mapping[str, Any]) -> bool:
    """Whether validation losses of `recipe` can be compared with those of the saved one."""
    now, then = _flat(to_dict(recipe)), _flat(saved)
    return all(now[key] == then.get(key) for key in ("data.validation", "data.validation_fraction", "eval.max_batches"))


def _changed(recipe: RecipeConfig, saved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By setting: (then, now). What a later version has added is left out: it has its default."""
    now, then = _flat(to_dict(recipe)), _flat(saved["recipe"])
    return {key: (old, now.get(key)) for key, old in sorted(then.items()) if old != now.get(key)}


def _all_done(setting: str, total: int, value: float, step: int) -> Problem:
    got = f"{total:,} steps, all of which are done in the checkpoint of step {step:,}"
    return Problem(path=f"trainer.{setting}", got=got, expected=f"more than {step:,} steps", fix=f"trainer.{setting}={value:g}")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _below(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")
