"""What a pattern of a recipe means: modules and parameters by the last words of their names, or by a regular expression for whole ones."""

from __future__ import annotations

import re


def name_is_meant(pattern: str, name: str) -> bool:
    """Whether `pattern` is the last words of `name` or a regular expression for the whole of it."""
    return name == pattern or name.endswith(f".{pattern}") or re.fullmatch(pattern, name) is not None
