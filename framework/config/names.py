"""Patterns over names of modules and parameters, the one language that all settings with a `pattern` share. No torch.

A pattern means a module or parameter: the last words of its name (`q_proj`, `layers.0`, `embed_tokens`) or a regular expression for the
whole of it; a module stands for all parameters in it.
"""

from __future__ import annotations

import re


def name_is_meant(pattern: str, name: str) -> bool:
    """Whether `pattern` is the last words of `name` or a regular expression for the whole of it. An illegal one means nothing."""
    try:
        return name == pattern or name.endswith(f".{pattern}") or re.fullmatch(pattern, name) is not None
    except re.error:  # named by the settings' own check
        return False


def is_meant(pattern: str, name: str) -> bool:
    """Whether `pattern` means the parameter `name`, by its own name or that of a module that it is in."""
    return any(name_is_meant(pattern, inside) for inside in modules_and_name(name))


def modules_and_name(name: str) -> list[str]:
    """`a.b.c` -> `a`, `a.b`, `a.b.c`."""
    words = name.split(".")
    return [".".join(words[: count + 1]) for count in range(len(words))]
