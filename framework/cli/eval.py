"""`framework eval MODEL [data.validation=FILE ...]`: the exact loss and perplexity of a model on data, or its marks in tasks of lm-eval.

    recipe_of   words as in a recipe, over those of the run that MODEL may be, become a recipe with nothing to train
    measured    ranks compute it (`cli/measure.py`), under the supervisor of `train`

Unusual: everything here runs without torch. The run directory of the ranks is a temporary one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from framework.checkpoint.source import check_source, find_source
from framework.cli.check import check_rows
from framework.cli.launch import launch
from framework.config.check import check_settings
from framework.config.compose import STATUS_INTERRUPTED, STATUS_USER_MISTAKE, compose
from framework.config.errors import Problem, UserError
from framework.config.explain import render
from framework.config.hardware import check_hardware
from framework.config.schema import RecipeConfig
from framework.config.suggest import closest
from framework.config.typed import schema_paths, to_dict
from framework.data.sources import peek_at, validation_sources
from framework.models.locate import check_path, check_template
from framework.ranks import launched, local_ranks
from framework.train.run_dir import CONFIG, config_yaml, read_config

RANK_COMMAND = (sys.executable, "-m", "framework.worker")
RESULT = "result.json"
STOP_GRACE_SECONDS = 2.0
DESCRIPTION = """\
Exact loss and perplexity of a model, masked and counted as in training:

  framework eval RUN                                        on the validation data of that run
  framework eval MODEL data.validation=chats.jsonl          on data of yours
  framework eval MODEL "data.validation=[a.jsonl,b.jsonl]" precision=bf16 trainer.devices=2

or its marks in tasks of the lm-evaluation-harness, a package of its own:

  framework eval MODEL --tasks hellaswag,arc_easy --limit 100
"""
USABLE = ("data.", "precision.", "zero.", "kernels.", "seed.", "model.tokenizer.", "model.chat_template.", "eval.max_batches.")
USABLE += ("trainer.devices.", "trainer.accelerator.", "trainer.micro_batch_size.", "trainer.collective_timeout_seconds.")
"""Settings that mean something here, with all below them."""
MICRO_BATCH_SIZE = 8
OPTIONS = {"--json": "FILE", "--tasks": "A,B", "--limit": "N"}


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, 2 for a user's mistake, or that of ranks that failed."""
    arguments, unknown = parser().parse_known_intermixed_args(argv)
    try:
        if unknown:  # with the words behind them, which may be their values
            raise UserError(*(_unknown_option(word) for word in unknown if word.startswith("-")))
        out = _file_for(arguments.json)
        if arguments.tasks is not None:
            from framework.cli import harness

            result = harness.evaluate(arguments.model, arguments.tasks, arguments.limit, arguments.settings)
        else:
            result = measured(recipe_of(arguments))
        if out is not None:
            _write(out, result)
    except UserError as error:
        print(render(error.problems), file=sys.stderr)
        return STATUS_USER_MISTAKE
    except KeyboardInterrupt:
        return STATUS_INTERRUPTED
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="framework eval", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", metavar="MODEL", help="what `framework generate` takes: a run, a checkpoint, a Hugging Face folder, ...")
    made.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="data, precision, zero, trainer.devices ... as in a recipe")
    made.add_argument("--json", metavar=OPTIONS["--json"], help="write the result there, too")
    made.add_argument("--tasks", metavar=OPTIONS["--tasks"], help="tasks of lm-eval instead of data")
    made.add_argument("--limit", type=int, metavar=OPTIONS["--limit"], help="with --tasks: only the first N questions of each")
    return made


def _unknown_option(word: str) -> Problem:
    name, _, value = word.partition("=")
    near = closest(name, OPTIONS)
    expected = f"one of {', '.join(OPTIONS)}; settings have no dashes"
    fix = f"{near[0]} {value or OPTIONS[near[0]]}" if near else ""
    return Problem(path=name, got="an option that does not exist", expected=expected, fix=fix)


def recipe_of(arguments: argparse.Namespace) -> RecipeConfig:
    """What is to be measured. Raises UserError with all that is wrong with it."""
    problems: list[Problem] = []
    if launched(os.environ) is not None:
        problems.append(Problem(path="eval", got="a launcher's rank", expected="no launcher", fix="trainer.devices=N for several ranks"))
    if arguments.limit is not None:
        problems.append(Problem(path="--limit", got=str(arguments.limit), expected="--tasks beside it", fix="eval.max_batches=N"))
    keys = [word.lstrip("+~").partition("=")[0] for word in arguments.settings]
    useless = {key for key in keys if (key in schema_paths() or key == "recipe") and not f"{key}.".startswith(USABLE)}
    for key in sorted(useless):
        expected = "one of " + ", ".join(usable.rstrip(".") for usable in USABLE)
        problems.append(Problem(path=key, got="a setting that an evaluation does not have", expected=expected))
    good = [word for word, key in zip(arguments.settings, keys, strict=True) if key not in useless]
    model, run = arguments.model, None
    try:
        problems += check_source(arguments.model, "MODEL", has_tokenizer="model.tokenizer" in keys)
        model = find_source(arguments.model, "MODEL").path
        config = Path(arguments.model).expanduser() / CONFIG
        run = read_config(config) if config.is_file() else None
    except UserError as error:
        problems += error.problems
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "eval.yaml"
        file.write_text(yaml.safe_dump(_base(model, run, keys), allow_unicode=True))
        try:
            recipe = compose([f"+recipe={file}", *good], check=_problems).recipe
            if "data.train" in keys and recipe.data.validation is not None:
                got, fix = "training data beside data.validation, which is what is measured", "data.validation=FILE"
                problems.append(Problem(path="data.train", got=got, expected="one of them", fix=fix))
        except UserError as error:
            origin = re.compile(rf" \([^()]*{re.escape(file.name)}:\d+\)")
            problems += [dataclasses.replace(problem, got=origin.sub("", problem.got)) for problem in error.problems]
    if problems:
        raise UserError(*problems)
    if recipe.data.validation is None:
        return recipe  # rows are held out of `train`
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, train=None))


def _base(model: str, run: RecipeConfig | None, chosen: list[str]) -> dict[str, Any]:
    """What the words are laid on: `model`, and of its `run` the data and how it computed, but for the groups that are `chosen` anew."""
    trainer: dict[str, Any] = {"max_steps": 1, "epochs": None, "accumulate": 1, "global_batch_size": None}
    base: dict[str, Any] = {"name": "eval", "model": {"path": model, "arch": None, "tokenizer": None, "chat_template": None}}
    if run is None:
        return {**base, "trainer": {**trainer, "micro_batch_size": MICRO_BATCH_SIZE}}
    data = to_dict(run.data)
    if "data.validation" in chosen:
        data |= {"train": None, "validation": None, "validation_fraction": 0.0}
    trainer |= {"micro_batch_size": run.trainer.micro_batch_size or MICRO_BATCH_SIZE, "accelerator": run.trainer.accelerator}
    of_run = {"data": data, "precision": to_dict(run.precision), "zero": to_dict(run.zero), "kernels": to_dict(run.kernels)}
    return {**base, "seed": run.seed, "trainer": trainer} | {group: values for group, values in of_run.items() if group not in chosen}


def _problems(recipe: RecipeConfig) -> list[Problem]:
    """Of settings, machine and data; the model is looked at before."""
    problems = [*check_settings(recipe), *check_hardware(recipe.trainer), *check_template(recipe.model.chat_template)]
    if recipe.model.tokenizer is not None:
        problems += check_path(recipe.model.tokenizer, "model.tokenizer", weights=False)
    if recipe.data.validation is None and recipe.data.validation_fraction == 0:
        expected = "data to measure on: a file, a folder, a list of them"
        return [*problems, Problem(path="data.validation", got="nothing", expected=expected, fix="data.validation=/path/to/file.jsonl")]
    try:
        named = validation_sources(recipe.data)
    except UserError as error:
        return [*problems, *error.problems]
    return problems + (peek_at(named) if named else check_rows(recipe.data))


def measured(recipe: RecipeConfig) -> dict[str, Any]:
    """Print and return the result. Raises UserError, and SystemExit where ranks failed."""
    with tempfile.TemporaryDirectory(prefix="framework-eval-") as name:
        folder = Path(name)
        (folder / CONFIG).write_text(config_yaml(recipe))
        command = [*RANK_COMMAND, str(folder / CONFIG), name, "eval"]
        ranks = local_ranks(recipe.trainer)
        outcome = launch(command, ranks=ranks, run_dir=folder, stop_grace_seconds=STOP_GRACE_SECONDS)
        if outcome.status:
            print(outcome.message, file=sys.stderr)
            raise SystemExit(outcome.status)
        result = json.loads((folder / RESULT).read_text())
    print(table(result))
    return result


def table(result: dict[str, Any]) -> str:
    """A line for each source, and one for all."""
    rows = [*result["sources"], *([result] if len(result["sources"]) > 1 else [])]
    width = max(len(row["source"]) for row in rows)
    lines = [
        f"{result['model']}, {result['dtype']}",
        "",
        f"{'source':<{width}}{'samples':>10}{'trained':>12}{'loss':>12}{'perplexity':>14}",
    ]
    for row in rows:
        lines.append(
            f"{row['source']:<{width}}{row['samples']:>10,}{row['trained_tokens']:>12,}{row['loss']:>12.6f}{row['perplexity']:>14,.4f}"
        )
    return "\n".join(lines)


def _file_for(path: str | None) -> Path | None:
    """Raises UserError where it cannot be written, before anything slow."""
    if path is None:
        return None
    file = Path(path).expanduser()
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError(Problem(path="--json", got=path, expected="a file that can be written", fix="--json result.json"))
    return file


def _write(file: Path, result: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise UserError(Problem(path="--json", got=f"{file} ({error.strerror})", expected="a file that can be written")) from error
