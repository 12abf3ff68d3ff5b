"""`framework check +recipe=NAME ...`: what the same words after `train` would do, or everything that is wrong with them.

`check_everything` is also what `train` does first. The rooms that read files and models are asked by their parts without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from framework.checkpoint.folder import read_index, resolve
from framework.checkpoint.source import check_source
from framework.config.check import check
from framework.config.compose import STATUS_USER_MISTAKE, compose
from framework.config.errors import Problem, UserError
from framework.config.explain import render
from framework.config.schema import DataConfig, RecipeConfig
from framework.plan.resume import compare_settings
from framework.progress import loading_libraries

HELP = """Say what a training command would do, without doing it.

  framework check +recipe=llama_sft zero=3        prints the plan, or all problems (exit status 2)
"""


def main(arguments: Sequence[str]) -> int:
    """Print the plan of a recipe and return 0, or its problems and return 2."""
    if "--help" in arguments or "-h" in arguments:
        print(HELP)
        return 0
    try:
        if "-m" in arguments or "--multirun" in arguments:
            raise UserError(Problem(path="-m", got="a sweep", expected="one job; check each of its values by itself"))
        composed = compose(arguments, check=check_everything)
        with loading_libraries():
            from framework.cli.fit import preview  # torch

        print(preview(composed.recipe))
    except UserError as error:
        print(render(error.problems), file=sys.stderr)
        return STATUS_USER_MISTAKE
    return 0


def check_everything(recipe: RecipeConfig) -> list[Problem]:
    """Problems of settings with each other, with this machine, and with the files and models that they name."""
    problems = check(recipe) + check_inputs(recipe)
    return problems + check_names(recipe, {problem.path for problem in problems})


def check_inputs(recipe: RecipeConfig) -> list[Problem]:
    """Problems with the files and models that the recipe names; reads the first rows of the data."""
    from framework.models.locate import check_adapter_path, check_path, check_template
    from framework.train.loggers import check_logger

    problems = []
    if recipe.model.path is not None:
        described = {"has_tokenizer": recipe.model.tokenizer is not None, "has_architecture": recipe.model.arch is not None}
        problems += check_source(recipe.model.path, "model.path", **described)
    if recipe.model.tokenizer is not None:
        problems += check_path(recipe.model.tokenizer, "model.tokenizer", weights=False)
    problems += check_template(recipe.model.chat_template)
    if recipe.peft.path is not None:
        problems += check_adapter_path(recipe.peft.path, "peft.path")
    problems += check_rows(recipe.data) + check_prompts(recipe.eval.prompts)
    return problems + check_logger(recipe.logger) + check_checkpoint(recipe)


def check_names(recipe: RecipeConfig, told: set[str]) -> list[Problem]:
    """What is wrong with the model's architecture, and patterns that mean nothing in it; nothing where it has to be downloaded first.

    `told`: settings whose problems are known, which are not named again.
    """
    if any(path.startswith(("model.path", "model.arch")) for path in told):
        return []
    from framework.checkpoint.source import architecture_of
    from framework.models.architecture import check_architecture
    from framework.models.selection import check_selection

    architecture = recipe.model.arch
    try:
        if recipe.model.path is not None:
            architecture = architecture_of(recipe.model.path) or architecture
        elif architecture is not None and (problems := check_architecture(architecture)):
            return problems
        if architecture is not None:
            check_selection(recipe, architecture)
    except UserError as error:
        return [problem for problem in error.problems if problem.path not in told]
    return []


def check_rows(data: DataConfig) -> list[Problem]:
    """What the first rows tell is wrong with the data; nothing about an empty list, which the settings' own check has named."""
    from framework.data.sources import peek

    return [] if data.train == [] else peek(data)


def check_prompts(prompts: str | list[str] | None) -> list[Problem]:
    """What is wrong with the files or texts of `eval.prompts`; nothing about empty ones, as above."""
    from framework.data.files import TABLES, TEXTS, find_files, kind_of
    from framework.data.prompts import SETTING, peek_prompts

    if isinstance(prompts, str) and len(prompts.split()) > 1 and kind_of(Path(prompts)) not in TEXTS + TABLES:
        try:
            find_files(prompts, SETTING)
        except (UserError, OSError):  # too long for the name of a file
            text = prompts.replace("'", "\\'")
            expected = "a file of prompts, or a list of texts"
            return [Problem(path=SETTING, got=f"{prompts!r}, which is no file", expected=expected, fix=f"\"{SETTING}=['{text}']\"")]
    return peek_prompts(prompts or None)


def check_checkpoint(recipe: RecipeConfig) -> list[Problem]:
    """Why the run cannot go on from the checkpoint that `resume` means."""
    try:
        folder = resolve(recipe.resume, Path(recipe.runs_dir), recipe.name)
        if folder is None:
            return []
        index = read_index(folder)
        return compare_settings(recipe, index["run"], index["step"])
    except UserError as error:
        return list(error.problems)
