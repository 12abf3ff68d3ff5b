"""Plain dictionaries to the frozen dataclasses of `schema.py` and back, with every problem found in one pass.

`convert` walks a dictionary along the annotations of a dataclass. What does not fit becomes a `Problem`, the field keeps its default and
the walk goes on, so that one look tells everything. `from_dict` raises what was found.

Unusual: Hydra and OmegaConf could type a configuration themselves, but stop at the first problem and know neither frozen dataclasses nor
`Literal`; so they compose plain values and the types are checked here. Needs neither of them: a rank reads its recipe through this file.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from framework.config.errors import Problem, UserError
from framework.config.suggest import closest, unknown_key

T = TypeVar("T")


def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
    """`data` as a `cls`. Raises UserError with all problems."""
    value, problems = convert(cls, data)
    if problems:
        raise UserError(*problems)
    return value


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass as nested dictionaries and lists, which YAML can hold; `from_dict` reads it back."""
    return {f.name: _plain(getattr(config, f.name)) for f in fields(config)}


def convert(cls: type[T], data: Mapping[str, Any], path: str = "") -> tuple[T, list[Problem]]:
    """`data` as a `cls` as far as it fits, and what does not. `path` is where `data` lies in the recipe."""
    problems: list[Problem] = []
    hints = hints_of(cls)
    values: dict[str, Any] = {}
    for key, value in data.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in hints:
            known = {f"{path}.{name}": hint for name, hint in hints.items()} if "[" in path else schema_paths()  # an item of a list
            problems.append(unknown_key(where, known))
            continue
        try:
            values[key] = _fit(hints[key], value, where, problems)
        except _Misfit as misfit:
            problems.append(misfit.problem)
    return cls(**values), problems


def hints_of(cls: type) -> dict[str, Any]:
    """Field names and their types."""
    return get_type_hints(cls)


@cache
def schema_paths() -> dict[str, Any]:
    """Every path that a recipe may set, with its type; a group's own path (`zero`) has its dataclass."""
    from framework.config.schema import RecipeConfig

    return _paths(RecipeConfig, "")


def dataclass_in(hint: Any) -> type | None:
    """The dataclass that a field holds, also when it may be None; a list of them is a value."""
    candidates = () if get_origin(hint) is list else (hint, *get_args(hint))
    return next((option for option in candidates if is_dataclass(option)), None)


def described(hint: Any) -> str:
    """A type in words, for messages and the reference."""
    if hint is type(None):
        return "null"
    if get_origin(hint) is Literal:
        return " | ".join(str(option) for option in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " | ".join(described(option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return "[" + ", ".join(described(option) for option in get_args(hint)) + "]"
    if get_origin(hint) is list:
        return f"[{described(get_args(hint)[0])}, ...]"
    if is_dataclass(hint):
        return "settings of " + hint.__name__
    return {int: "a whole number", float: "a number", bool: "true | false", str: "text"}[hint]


def default_of(field: Field) -> Any:
    """What a field holds when nobody sets it."""
    return field.default if field.default is not MISSING else field.default_factory()


class _Misfit(Exception):
    def __init__(self, where: str, got: Any, expected: str, fix: str = "") -> None:
        self.problem = Problem(path=where, got=_shown(got), expected=expected, fix=fix)


def _fit(hint: Any, value: Any, where: str, problems: list[Problem]) -> Any:
    """`value` as a `hint`; raises _Misfit. Problems inside a nested group are appended and its remaining fields kept."""
    if value == "???":
        raise _Misfit(where, "nothing", described(hint), f"{where}=VALUE")
    if get_origin(hint) in (Union, types.UnionType):
        return _fit_union(hint, value, where, problems)
    if get_origin(hint) is Literal:
        return _fit_literal(hint, value, where)
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise _Misfit(where, value, *_group_wanted(where, value))
        nested, found = convert(hint, value, where)
        problems += found
        return nested
    if get_origin(hint) in (list, tuple):
        return _fit_sequence(hint, value, where, problems)
    fitted = _SCALARS[hint](value)
    if fitted is None:
        raise _Misfit(where, value, described(hint))
    return fitted


def _fit_union(hint: Any, value: Any, where: str, problems: list[Problem]) -> Any:
    options = get_args(hint)
    if value is None and type(None) in options:
        return None
    misfits = []
    for option in (option for option in options if option is not type(None)):
        try:
            return _fit(option, value, where, problems)
        except _Misfit as misfit:
            misfits.append(misfit)
    if len(misfits) == 1:
        raise misfits[0]
    raise _Misfit(where, value, described(hint))


def _fit_literal(hint: Any, value: Any, where: str) -> Any:
    options = get_args(hint)
    for option in options:
        if str(option) == str(value) and not isinstance(value, bool):
            return option
    near = closest(str(value), [str(option) for option in options])
    raise _Misfit(where, value, f"one of {', '.join(map(str, options))}", f"{where}={near[0]}" if near else "")


def _fit_sequence(hint: Any, value: Any, where: str, problems: list[Problem]) -> list | tuple:
    if not isinstance(value, list | tuple):
        raise _Misfit(where, value, f"a list {described(hint)}")
    arguments = get_args(hint)
    if get_origin(hint) is list:
        return [_fit(arguments[0], item, f"{where}[{i}]", problems) for i, item in enumerate(value)]
    if len(value) != len(arguments):
        raise _Misfit(where, value, f"{len(arguments)} values {described(hint)}")
    return tuple(_fit(option, item, f"{where}[{i}]", problems) for i, (option, item) in enumerate(zip(arguments, value, strict=True)))


def _as_bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _as_float(value: Any) -> float | None:
    """Numbers, and text such as `1e-4`, which YAML 1.1 reads as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _as_int(value: Any) -> int | None:
    """Whole numbers, also written `1e6` or "10"."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _as_float(value)
    return int(number) if number is not None and number.is_integer() else None


def _as_str(value: Any) -> str | None:
    """Text; a number (`name=123`) is text here."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value)


_SCALARS = {bool: _as_bool, int: _as_int, float: _as_float, str: _as_str}


def _group_wanted(where: str, value: Any) -> tuple[str, str]:
    """Expected and fix where a group's settings should stand and a single value does: usually the group's option was meant."""
    if "." in where or value is None:
        return f"settings below `{where}`, as in `{where}: {{...}}`", ""
    return f"settings below `{where}:`; the option of a group is chosen in the recipe's `defaults:` list", f"- override /{where}: {value}"


def _paths(cls: type, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, hint in hints_of(cls).items():
        found[prefix + name] = hint
        nested = dataclass_in(hint)
        if nested is not None:
            found |= _paths(nested, f"{prefix}{name}.")
    return found


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_dict(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "null" if value is None else "an empty text"
    if isinstance(value, Mapping):
        return "settings (" + ", ".join(map(str, value)) + ")"
    return str(value).lower() if isinstance(value, bool) else str(value)
