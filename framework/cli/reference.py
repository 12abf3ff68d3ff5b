"""`framework help [GROUP | GROUP.KEY]`: what can be set, made from the docstrings of `config/schema.py` and the comments in `conf/`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any

from framework.config import schema, schema_engine
from framework.config.paths import asset_dir
from framework.config.schema import RecipeConfig
from framework.config.suggest import suggest_paths
from framework.config.typed import dataclass_in, default_of, described, hints_of, schema_paths

WIDTH = 110
HELP = """Explain groups and settings.

  framework help              all groups
  framework help optimizer    one group: its options and keys
  framework help optimizer.lr one setting
"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One thing that a recipe can set."""

    path: str
    kind: str
    default: str
    meaning: str


def main(arguments: Sequence[str]) -> int:
    """Print the reference and return 0, or 2 when there is no such setting."""
    if "--help" in arguments or "-h" in arguments:
        print(HELP)
        return 0
    if not arguments:
        print(overview())
        return 0
    known = schema_paths()
    for path in arguments:
        if path not in known:
            near = suggest_paths(path, known)
            instead = f"write\n    framework help {near[0]}" if near else "`framework help` lists them"
            print(f"there is no setting {path}; {instead}", file=sys.stderr)
            return 2
        print(explain_group(path) if dataclass_in(known[path]) else explain_setting(path))
    return 0


def overview() -> str:
    """All groups and the settings outside of groups."""
    top = [setting for setting in settings_of(RecipeConfig, "") if dataclass_in(schema_paths()[setting.path]) is None]
    lines = ["Groups (GROUP=OPTION chooses, GROUP.KEY=VALUE sets; `framework help GROUP` says more):"]
    for name, hint in hints_of(RecipeConfig).items():
        if cls := dataclass_in(hint):
            lines.append(f"  {name:<11} {summary_of(cls)}")
            lines.append(f"  {'':<11} {', '.join(options_of(name))}")
    return "\n".join([*lines, "", "Settings outside of groups:", *map(_setting_lines, top)])


def explain_group(path: str) -> str:
    """Options and keys of a group, or of settings within one (`model.arch`)."""
    cls = dataclass_in(schema_paths()[path])
    lines = [f"{path}: {summary_of(cls)}"]
    if options := options_of(path):
        width = max(map(len, options))
        lines += ["", "Options:", *(f"  {path}={name:<{width}}  {comment}" for name, comment in options.items())]
    return "\n".join([*lines, "", "Keys:", *map(_setting_lines, settings_of(cls, f"{path}."))])


def explain_setting(path: str) -> str:
    """One setting."""
    group, _, name = path.rpartition(".")
    cls = dataclass_in(schema_paths()[group]) if group else RecipeConfig
    return next(_setting_lines(setting) for setting in settings_of(cls, f"{group}." if group else "") if setting.path == path)


def settings_of(cls: type, prefix: str) -> list[Setting]:
    """The fields of a dataclass of the schema."""
    hints = hints_of(cls)
    meanings = _docstrings()[cls.__name__]
    return [
        Setting(path=prefix + f.name, kind=described(hints[f.name]), default=_shown(default_of(f)), meaning=meanings.get(f.name, ""))
        for f in fields(cls)
    ]


def summary_of(cls: type) -> str:
    """The first sentence of a group's docstring, without its own name."""
    text = (cls.__doc__ or "").strip().splitlines()[0]
    return text.partition(": ")[2] if text.startswith("Group `") and ": " in text else "" if text.startswith("Group `") else text


def options_of(group: str) -> dict[str, str]:
    """The shipped options of a group, each with the comment on its first line."""
    return {file.stem: _first_comment(file) for file in sorted((asset_dir("conf") / group).glob("*.yaml"))}


@cache
def _docstrings() -> dict[str, dict[str, str]]:
    """Class name -> field name -> the docstring under it in the source of the schema."""
    found: dict[str, dict[str, str]] = {}
    nodes = (node for module in (schema, schema_engine) for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body)
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {}
            for field, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    found[node.name][field.target.id] = " ".join(str(after.value.value).split())
    return found


def _setting_lines(setting: Setting) -> str:
    head = f"  {setting.path}  [{setting.kind}]  {setting.default}"
    return head + ("\n" + fill(setting.meaning, WIDTH, initial_indent="      ", subsequent_indent="      ") if setting.meaning else "")


def _shown(default: Any) -> str:
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    return str(list(default)) if isinstance(default, tuple) else repr(default) if isinstance(default, str | int | float | list) else ""


def _first_comment(file: Path) -> str:
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
