"""How a user's mistake is reported: what was got, what was expected, and what to write instead.

Every room raises `UserError` for what a user can mend; anything else that escapes is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ELEMENT = re.compile(r"(?P<setting>[\w.]+)\[\d+\](?:\.(?P<key>\w+))?=")
"""What would set one element of a list, which a command line cannot."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with a recipe or its inputs."""

    path: str
    """Where: a configuration path (`zero.stage`), or a file with its row (`train.jsonl:412`)."""
    got: str
    expected: str
    fix: str = ""
    """What to write instead, ready to be copied; empty where `expected` says it all. `data.train[1].weight=2` becomes `weight: 2`: an
    element of a list is written in the recipe."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fix", ELEMENT.sub(_as_in_yaml, self.fix))

    def __str__(self) -> str:
        lines = [f"{self.path}: got {self.got}", f"    expected {self.expected}"]
        if self.fix:
            lines.append(f"    write    {self.fix}")
        return "\n".join(lines)


def _as_in_yaml(element: re.Match[str]) -> str:
    if element["key"] is not None:
        return f"{element['key']}: "
    return "path: " if element["setting"].startswith("data.") else "- "  # a source of data may be its path alone


class UserError(Exception):
    """One or more problems that the user can mend. Commands print them without a traceback and end with status 2."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def __reduce__(self):  # crosses process boundaries whole
        return (UserError, self.problems)
