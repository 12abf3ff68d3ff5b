"""Mistakes that have a fix do not hide others: what else is wrong is looked for as though the fix had been written.

    values, doubtful = as_meant(values, problems)       # of zero.stgae=3: zero.stage is 3 in `values`, and nothing is doubtful

A fix is followed where it leaves no choice: one key that was meant, with the value that was given, or the one value that was meant. What
the other mistakes would have set is not known: problems of their groups are `doubtful`, since they may only follow from them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from framework.config.errors import Problem
from framework.config.suggest import UNKNOWN
from framework.config.typed import dataclass_in, schema_paths

PLACEHOLDER = "VALUE"


def as_meant(values: Mapping[str, Any], problems: Sequence[Problem]) -> tuple[dict[str, Any], set[str]]:
    """`values` of a recipe with the fixes of `problems` in keys and types, and the first words of settings that stay doubtful."""
    meant, doubtful = copy.deepcopy(dict(values)), set()
    for problem in problems:
        setting, _, text = problem.fix.partition("=")
        if problem.got == UNKNOWN and not problem.fix:
            continue  # nothing is known to depend on it
        hint = schema_paths().get(setting)
        follows = hint is not None and dataclass_in(hint) is None and setting in (problem.path, problem.expected)
        if not (follows and _follow(meant, problem.path, setting, text)):
            doubtful |= {_first_word(problem.path), _first_word(problem.fix)}
    return meant, doubtful


def _follow(values: dict[str, Any], path: str, setting: str, text: str) -> bool:
    """Set `setting` to what was written at `path`, or to `text`; False where neither is a value."""
    *parents, word = path.split(".")
    written: Any = values
    for parent in parents:
        written = written.get(parent) if isinstance(written, dict) else None
    if path != setting and isinstance(written, dict) and word in written:
        value = written[word]
    elif text == PLACEHOLDER:
        return False
    else:
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            return False
    *parents, word = setting.split(".")
    place = values
    for parent in parents:
        if not isinstance(place.get(parent), dict):
            place[parent] = {}
        place = place[parent]
    place[word] = value
    return True


def _first_word(path: str) -> str:
    return path.lstrip("+-").partition("=")[0].partition(".")[0]
