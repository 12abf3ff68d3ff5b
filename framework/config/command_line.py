"""What the command line says, looked at word by word before Hydra composes it.

    vetted = vet(["+recipe=llama_stf", "zero=3", "optimizer.learning_rate=1e-4"], config_dir=None, multirun=False)
    vetted.problems   # the recipe and the key, each with what was meant
    vetted.good       # ["zero=3"]

Hydra stops at the first word that it does not understand and then advises to add a `+`. Here every word gets its own answer, and a `+`
that nobody needs (`+zero=3`, `recipe=NAME`) makes no difference.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, QuotedString, ValueType
from hydra.errors import HydraException

from framework.config.errors import Problem, UserError
from framework.config.hydra_ext import GROUP, find_recipe, is_path, recipe_folders, recipe_names
from framework.config.paths import asset_dir
from framework.config.suggest import closest, suggest_paths, unknown_key
from framework.config.typed import described, schema_paths

PLAIN_PATH = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./+:%@?\\")
"""Characters that need no quotes in Hydra's grammar."""
HYDRAS_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
FUNCTION_CALL = re.compile(r"[a-z]+\(.*\)")
"""`choice(a,b)` and the like, in sweeps."""
ELEMENT = re.compile(r"\+*(?P<setting>[\w.]+)\[(?P<number>\d+)\](?:\.(?P<inner>\w+))?")
"""`data.train[0].weight`, which Hydra's grammar does not have."""


@dataclass(kw_only=True)
class Vetted:
    """The words of a command line, sorted."""

    good: list[str] = field(default_factory=list)
    """Overrides that Hydra will accept."""
    problems: list[Problem] = field(default_factory=list)
    recipe_named: bool = False
    """Whether a recipe was asked for (found or not)."""


def parse_arguments(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Hydra's own options, and the arguments in the order that its parser can read (options, then overrides)."""
    parsed, unknown = get_args_parser().parse_known_intermixed_args(list(arguments))
    if unknown:
        words = [word for word in arguments if "=" in word and not word.startswith("-")]
        others = vet(words, config_dir=None, multirun=True).problems
        raise UserError(*_unknown_options(unknown, list(arguments)), *others)
    if parsed.config_dir is not None and not Path(parsed.config_dir).is_dir():
        got = f"{parsed.config_dir}, which is no folder"
        raise UserError(Problem(path="--config-dir", got=got, expected="a folder with recipes or groups"))
    options = [argument for argument in arguments if argument not in parsed.overrides]
    return parsed, options


def group_options(config_dir: str | None) -> dict[str, list[str]]:
    """Every group with its options."""
    options = {GROUP: recipe_names(recipe_folders(config_dir))}
    for root in (asset_dir("conf"), *([Path(config_dir)] if config_dir else [])):
        for folder in (entry for entry in sorted(root.iterdir()) if entry.is_dir()):
            found = [file.stem for file in folder.glob("*.yaml")]
            if found:
                options[folder.name] = sorted({*options.get(folder.name, []), *found})
    return options


def vet(overrides: Sequence[str], *, config_dir: str | None, multirun: bool) -> Vetted:
    """Look at every override by itself. `multirun`: lists of values are legal."""
    options = group_options(config_dir)
    words, spaced = _without_spaces(overrides)
    vetted = Vetted(problems=spaced)
    for text in words:
        problem = _vet_one(text, options, config_dir, multirun, vetted)
        if problem is not None:
            vetted.problems.append(problem)
    return vetted


def _without_spaces(overrides: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """The other words, and the three of each `KEY = VALUE` as one problem."""
    words, problems = list(overrides), []
    while "=" in words[1:-1]:
        middle = words.index("=", 1)
        key, value = words[middle - 1].lstrip("+"), words[middle + 1]
        problems.append(Problem(path=key, got=f"`{key} = {value}`", expected="no spaces around `=`", fix=f"{key}={value}"))
        del words[middle - 1 : middle + 2]
    return words, problems


def _vet_one(text: str, options: dict[str, list[str]], config_dir: str | None, multirun: bool, vetted: Vetted) -> Problem | None:
    text = _with_quoted_path(text)
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        return _unreadable(text, error, options)
    key, value = override.key_or_group, text.partition("=")[2]
    if override.is_sweep_override() and not multirun:
        fix = f"-m {text}   (a list: {key}=[{value}])"
        return Problem(path=key, got=f"several values ({value})", expected="one value, or -m for a run with each", fix=fix)
    if key in HYDRAS_FOLDERS:
        expected = "runs_dir and name, which make RUNS_DIR/NAME/TIME"
        return Problem(path=key, got=value, expected=expected, fix=f"runs_dir={value}")
    if override.is_hydra_override() or key.startswith("hydra/") or override.package is not None:
        vetted.good.append(text)
        return None
    if override.is_delete():
        return _taken_away(key, options) if key in options or key in schema_paths() else unknown_key(key, schema_paths(), value, options)
    if key == GROUP:
        if vetted.recipe_named:
            expected = "one; a recipe builds on another through its `defaults:` list"
            return Problem(path=GROUP, got=f"a second recipe ({value})", expected=expected)
        vetted.recipe_named = True
        problem = next((found for name in _values(override) if (found := _vet_recipe(name, options[GROUP], config_dir))), None)
    elif key in options and not isinstance(override.value(), dict):
        problem = next((_unknown_option_of(key, name, options[key]) for name in _values(override) if name not in options[key]), None)
    elif key in schema_paths():
        problem = None
    else:
        problem = unknown_key(key, schema_paths(), value, options)
    if problem is None:
        unneeded_plus = key != GROUP and override.type in (OverrideType.ADD, OverrideType.FORCE_ADD)
        vetted.good.append(text.lstrip("+") if unneeded_plus else text)
    return problem


def _taken_away(key: str, options: dict[str, list[str]]) -> Problem:
    """`~KEY`: the schema's default would step in, unseen."""
    if key in options:
        return Problem(path=f"~{key}", got="a group taken away", expected=f"{key} as one of {', '.join(options[key])}")
    return Problem(path=f"~{key}", got="a setting taken away", expected=f"another value for it; `framework help {key}` says which")


def _values(override: Override) -> list[str]:
    """The options that a group override names: one, or those of a sweep."""
    if override.value_type in (ValueType.GLOB_CHOICE_SWEEP, ValueType.INTERVAL_SWEEP):
        return []
    if override.is_sweep_override():
        return [value.strip("'\"") for value in override.sweep_string_iterator()]
    value = override._value
    return [value.text if isinstance(value, QuotedString) else override.get_value_element_as_str()]


def _vet_recipe(name: str, known: list[str], config_dir: str | None) -> Problem | None:
    if find_recipe(name, recipe_folders(config_dir)) is not None:
        return None
    if not name:
        expected = f"one of {', '.join(known)}, or a file of yours"
        return Problem(path=GROUP, got="nothing", expected=expected, fix="+recipe=quickstart")
    if Path(name).expanduser().is_dir():
        recipes = sorted(Path(name).expanduser().glob("*.yaml"))
        fix = f"+recipe={recipes[0]}" if len(recipes) == 1 else ""
        return Problem(path=GROUP, got=f"{name}, which is a folder", expected="a recipe file, or the name of a recipe", fix=fix)
    if is_path(name):
        file = Path(name).expanduser()
        near = closest(file.name, [other.name for other in file.parent.glob("*.yaml")]) if file.parent.is_dir() else []
        fix = f"+recipe={file.parent / near[0]}" if near else ""
        expected = "a recipe file, or the name of a recipe: " + ", ".join(known)
        return Problem(path=GROUP, got=f"{name}, but there is no such file", expected=expected, fix=fix)
    here = Path(f"{name}.yaml")
    near = [f"./{here}"] if here.is_file() else closest(name, known)
    fix = f"+recipe={near[0]}" if near else ""
    return Problem(path=GROUP, got=f"an unknown recipe {name}", expected="one of " + ", ".join(known), fix=fix)


def _unknown_option_of(group: str, name: str, options: list[str]) -> Problem:
    near = closest(name, options)
    fix = f"{group}={near[0]}" if near else " or ".join(f"{group}={option}" for option in options)
    return Problem(path=group, got=f"an unknown option {name or '(nothing)'}", expected=f"one of {', '.join(options)}", fix=fix)


def _unknown_options(unknown: list[str], arguments: list[str]) -> Iterator[Problem]:
    """`--lr 3` and `--lr=3` both mean the setting that is called so."""
    for option in (word for word in unknown if word.startswith("-")):
        name, _, value = option.lstrip("-").partition("=")
        name = name.replace("-", "_")
        following = arguments[arguments.index(option) + 1 :][:1]
        if not value and following and "=" not in following[0] and not following[0].startswith("-"):
            value = following[0]
        meant = [name] if name in schema_paths() else suggest_paths(name, schema_paths())
        fix = f"{meant[0] if meant else name}={value or 'VALUE'}"
        yield Problem(path=option, got="an option that does not exist", expected="settings without dashes", fix=fix)


def _unreadable(text: str, error: HydraException, options: dict[str, list[str]]) -> Problem:
    if "=" not in text:
        group = next((group for group, names in options.items() if text in names), None)
        if is_path(text) and find_recipe(text, []) is not None:
            group = GROUP
        fix = "" if group is None else f"+recipe={text}" if group == GROUP else f"{group}={text}"
        return Problem(path=text, got="a word without `=`", expected="KEY=VALUE", fix=fix)
    key, _, value = text.partition("=")
    if element := ELEMENT.fullmatch(key):
        return _element_of_a_list(element, value, options)
    reason = str(error).strip().splitlines()[0]
    quoted = value.replace("'", "\\'")
    fix = f"\"{key}='{quoted}'\""
    return Problem(path=key.lstrip("+"), got=f"{value} ({reason})", expected="a value; quotes around special characters", fix=fix)


def _element_of_a_list(element: re.Match[str], value: str, options: dict[str, list[str]]) -> Problem:
    setting, inner = element["setting"], element["inner"]
    if setting not in schema_paths():
        return unknown_key(setting, schema_paths(), value, options)
    if "[" not in (kind := described(schema_paths()[setting])):
        return Problem(path=setting, got=f"{element[0]}={value}", expected=kind, fix=f"{setting}={value}")
    others = "..., " if int(element["number"]) else ""
    whole = f"{{..., {inner}: {value}}}" if inner else value
    expected = "the whole list, in quotes, or the recipe file: its elements cannot be set one by one"
    return Problem(path=setting, got=f"{element[0]}={value}", expected=expected, fix=f'"{setting}=[{others}{whole}]"')


def _with_quoted_path(text: str) -> str:
    """`+recipe=./my file.yaml` as Hydra's grammar wants it."""
    key, _, value = text.partition("=")
    if key.lstrip("+") != GROUP or not is_path(value) or FUNCTION_CALL.fullmatch(value):
        return text
    odd = set(value) - PLAIN_PATH
    return f"{key}='{value}'" if odd and not odd & set(",'\"[") else text
