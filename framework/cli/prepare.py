"""`framework prepare +recipe=NAME ... [--show N]`: tokenise the data of a recipe ahead, say what became of every row, and look at samples.

The same words after `train` find the tokens in the cache. No rank starts, and no weights are read or downloaded: of the model only the
tokenizer is used, so that a machine without GPUs can do it.

Unusual: what is in the cache already is compared with its digests to the last byte, where `train` looks at a part of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from framework.config.check import check_settings
from framework.config.compose import STATUS_INTERRUPTED, STATUS_USER_MISTAKE, compose
from framework.config.errors import Problem, UserError
from framework.config.explain import render
from framework.config.schema import RecipeConfig
from framework.progress import loading_libraries

HELP = """Tokenise the data of a recipe ahead of training, and say what became of every row.

  framework prepare +recipe=llama_sft data.num_workers=8       fills the cache that `train` uses, and prints the ledger
  framework prepare +recipe=llama_sft --show 3                 prints 3 samples, too, with the trained tokens marked
"""


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, 2 for a user's mistake, 130 when interrupted."""
    if "--help" in arguments or "-h" in arguments:
        print(HELP)
        return 0
    try:
        shown, words = _samples_to_show(arguments)
        if "-m" in words or "--multirun" in words:
            raise UserError(Problem(path="-m", got="a sweep", expected="one job; its data are prepared once for all values of a sweep"))
        recipe = compose(words, check=check_data).recipe
        with loading_libraries():
            from framework.data.prepare import prepare
            from framework.models.tokenizer import load_tokenizer
        tokenizer = load_tokenizer(recipe.model)
        prepared = prepare(recipe.data, tokenizer, seed=recipe.seed, show_progress=True, thoroughly=True)
    except UserError as error:
        print(render(error.problems), file=sys.stderr)
        return STATUS_USER_MISTAKE
    except KeyboardInterrupt:
        print("interrupted; nothing is left half done", file=sys.stderr)
        return STATUS_INTERRUPTED
    print(f"\n{prepared.ledger.table()}")
    _show(prepared, tokenizer, shown)
    return 0


def check_data(recipe: RecipeConfig) -> list[Problem]:
    """Problems of the settings, the first rows of the data, and the tokenizer's path; nothing about hardware."""
    from framework.cli.check import check_rows
    from framework.models.locate import check_path, check_template

    model, problems = recipe.model, check_settings(recipe)
    for setting, path in (("model.tokenizer", model.tokenizer), ("model.path", model.path)):
        if path is not None:
            problems += check_path(path, setting, weights=False)
            break
    return problems + check_template(model.chat_template) + check_rows(recipe.data)


def _samples_to_show(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """N of `--show N`, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--show", default="0")
    try:
        options, words = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError:
        options, words = argparse.Namespace(show=""), []
    if not options.show.isdecimal():
        raise UserError(Problem(path="--show", got=options.show or "nothing", expected="how many samples", fix="--show 3"))
    return int(options.show), words


def _show(prepared: Any, tokenizer: Any, count: int) -> None:
    """`count` samples, spread over the training data."""
    from framework.data.show import render_sample

    for index in np.unique(np.linspace(0, len(prepared.train) - 1, count).astype(int)):
        print(f"\n---- {index + 1:,} of {len(prepared.train):,}: {render_sample(tokenizer, prepared.train[int(index)])}", flush=True)
