"""Where the shipped `conf/` and `recipes/` are: inside the package in a wheel, beside it in a checkout or an editable install."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

PACKAGE = Path(__file__).resolve().parents[1]


def asset_dir(name: Literal["conf", "recipes"]) -> Path:
    """The folder of shipped configuration files."""
    candidates = (PACKAGE / name, PACKAGE.parent / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"the installation is incomplete: none of {', '.join(map(str, candidates))} exists")
