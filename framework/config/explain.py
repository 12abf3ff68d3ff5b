"""Turns what goes wrong while a recipe is composed into problems that name the file, the line and what to write.

`problems_of` reads the exceptions of Hydra, OmegaConf and YAML; `Origins` tells where a setting was written; `render` is how every
command prints problems.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

import yaml

from framework.config.errors import Problem, UserError
from framework.config.suggest import closest

MISSING_OPTION = re.compile(r"(?:In '(?P<parent>[^']+)': )?Could not (?:find|load) '(?P<path>[^']+)'")
MISSING_GROUP = re.compile(r"(?:In '(?P<parent>[^']+)': )?Could not override '(?P<key>[^']+)'")
TWICE = re.compile(r"(?P<key>[\w@/]+) appears more than once in the final defaults list|Multiple values for (?P<other>[\w@/]+)\.")
HYDRAS_OWN = re.compile(r"Could not override '(?P<key>hydra\.[^']+)'")
FULL_KEY = re.compile(r"full_key: (\S+)")

OMEGACONF_DETAILS = ("full_key:", "reference_type=", "object_type=", "To append")
SHOWN_LINES = 2


def render(problems: Sequence[Problem]) -> str:
    """Problems as they are printed."""
    head = "1 problem:" if len(problems) == 1 else f"{len(problems)} problems:"
    return "\n\n".join([head, *(str(problem) for problem in problems)])


def problems_of(error: BaseException, options: Mapping[str, list[str]], recipes: Iterable[Path] = ()) -> list[Problem]:
    """What an exception during composition means. `options`: every group with its options; `recipes`: the files that were read."""
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, UserError):
            return list(link.problems)
        if isinstance(link, yaml.MarkedYAMLError):
            return [_yaml_problem(link)]
    text = "\n".join(dict.fromkeys(str(link).strip() for link in chain))
    if match := MISSING_OPTION.search(text):
        return [_missing_option(match["parent"], match["path"], options, recipes)]
    if match := HYDRAS_OWN.search(text):
        return [Problem(path=match["key"], got="a key that does not exist", expected="one that `--cfg hydra` shows")]
    if match := MISSING_GROUP.search(text):
        return [_missing_group(match["parent"], match["key"], options, recipes)]
    if match := TWICE.search(text):
        group = (match["key"] or match["other"]).partition("@")[0]
        expected = "`override` before an option that replaces the default"
        return [Problem(path="defaults", got=f"a second choice for {group}", expected=expected, fix=f"- override /{group}: OPTION")]
    key = FULL_KEY.search(text)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith(OMEGACONF_DETAILS)]
    got = " ".join(list(dict.fromkeys(lines))[:SHOWN_LINES]) or type(error).__name__
    return [Problem(path=key[1] if key else "recipe", got=got, expected="a recipe that can be composed")]


class Origins:
    """Where each setting was written: on the command line, or in a line of a file."""

    def __init__(self, overrides: Iterable[str], files: Iterable[tuple[Path, str]]) -> None:
        """`files`: those that were composed, later ones win, with the path at which their content lies (`zero`, or "" for recipes)."""
        self._places: dict[str, str] = {}
        for file, prefix in files:
            for path, line in key_lines(file, prefix).items():
                self._places[path] = f"{_short(file)}:{line}"
        for override in overrides:
            self._places[override.lstrip("+~").partition("=")[0]] = "command line"

    def add(self, problem: Problem) -> Problem:
        """`problem` with its place, where that is known."""
        place = self._places.get(problem.path.partition("[")[0])
        return problem if place is None else dataclasses.replace(problem, got=f"{problem.got} ({place})")


def key_lines(file: Path, prefix: str = "") -> dict[str, int]:
    """The line of every key of a YAML file, by its path."""
    found: dict[str, int] = {}
    _walk(yaml.compose(file.read_text(encoding="utf-8"), yaml.SafeLoader), prefix, found)
    return found


def _walk(node: yaml.Node | None, path: str, found: dict[str, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            where = f"{path}.{key.value}" if path else str(key.value)
            found[where] = key.start_mark.line + 1
            _walk(value, where, found)


def _yaml_problem(error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    file, line = (_short(Path(mark.name)), mark.line + 1) if mark else ("recipe", 0)
    reason = error.problem or "text that is not YAML"
    around = f" {error.context}" if error.context else ""
    return Problem(path=f"{file}:{line}", got=f"{reason}{around}", expected="YAML: `key: value`, two more spaces for each level, no tabs")


def _missing_option(parent: str | None, path: str, options: Mapping[str, list[str]], recipes: Iterable[Path]) -> Problem:
    group, _, name = path.rpartition("/")
    where = _line_with(rf"(.*:\s*)?[\"']?{re.escape(name)}[\"']?\s*(#.*)?", recipes) or _file_of(parent)
    if group in options:
        known = options[group]
        near = closest(name, known)
        write = f"- {near[0]}" if group == "recipe" else f"- override /{group}: {near[0]}" if near else ""
        return Problem(path=where, got=f"an unknown {group} {name}", expected=f"one of {', '.join(known)}", fix=write if near else "")
    inner = group.rpartition("/")[2]
    if inner in options:  # `- zero: 3` in a recipe
        fix = f"- override /{inner}: {name}"
        return Problem(path=where, got=f"`- {inner}: {name}`", expected="`override` and a slash before the group", fix=fix)
    return Problem(path=where, got=f"{path}, which does not exist", expected=f"a recipe or one of the groups {', '.join(options)}")


def _missing_group(parent: str | None, key: str, options: Mapping[str, list[str]], recipes: Iterable[Path]) -> Problem:
    name = key.partition("@")[0].removeprefix("recipe/")
    where = _line_with(rf"override\s+/?{re.escape(name)}\s*:.*", recipes) or _file_of(parent)
    if name in options:
        expected = "a slash before the group"
        return Problem(path=where, got=f"`override {name}`", expected=expected, fix=f"- override /{name}: OPTION")
    near = closest(name, options)
    return Problem(
        path=where,
        got=f"`override /{name}`, but there is no group {name}",
        expected=f"one of {', '.join(options)}",
        fix=f"- override /{near[0]}: OPTION" if near else "",
    )


def _file_of(parent: str | None) -> str:
    if parent is None:
        return "recipe"
    name = unquote(parent.partition("/")[2] or parent)
    return f"{_short(Path(name)) if '/' in name else name} (defaults)"


def _line_with(item: str, files: Iterable[Path]) -> str | None:
    """The place of an item (a regular expression) in a defaults list, such as `- override /zero: 7` or `- quickstart`."""
    pattern = re.compile(r"\s*-\s+" + item)
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if pattern.fullmatch(line):
                return f"{_short(file)}:{number}"
    return None


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _short(file: Path) -> str:
    relative = os.path.relpath(file)
    return str(file) if relative.startswith("..") else relative
