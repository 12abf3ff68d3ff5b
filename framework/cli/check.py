"""`framework check +recipe=NAME ...`: what the same words after `train` would do, or everything that is wrong with them.

`check_everything` is also what `train` does first. The rooms that read files and models are asked by their parts without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from framework.checkpoint.folder import resolve
from framework.config.check import check
from framework.config.compose import STATUS_USER_MISTAKE, compose
from framework.config.errors import Problem, UserError
from framework.config.explain import render
from framework.config.schema import RecipeConfig
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
    return check(recipe) + check_inputs(recipe)


def check_inputs(recipe: RecipeConfig) -> list[Problem]:
    """Problems with the files and models that the recipe names; reads the first rows of the data."""
    from framework.data.prompts import peek_prompts
    from framework.data.sources import peek
    from framework.models.locate import check_adapter_path, check_path
    from framework.train.loggers import check_logger

    problems = []
    if recipe.model.path is not None:
        problems += check_path(recipe.model.path, "model.path")
    if recipe.model.tokenizer is not None:
        problems += check_path(recipe.model.tokenizer, "model.tokenizer", weights=False)
    if recipe.peft.path is not None:
        problems += check_adapter_path(recipe.peft.path, "peft.path")
    try:
        resolve(recipe.resume, Path(recipe.runs_dir), recipe.name)
    except UserError as error:
        problems += error.problems
    return problems + peek(recipe.data) + peek_prompts(recipe.eval.prompts) + check_logger(recipe.logger)
