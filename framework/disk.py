"""Files that are whole or not there, whatever happens to the process or the machine meanwhile."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have what is written in a file, or the names in a folder, on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str, *, durably: bool = True, folder_too: bool = True) -> None:
    """Write a small file; a reader sees the old one or the whole new one, `durably` also after a loss of power (tens of milliseconds).

    folder_too=False leaves the file's name to whoever syncs the folder: somebody may rename that as soon as the file is seen.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    if durably:
        sync(partial)
    os.replace(partial, path)
    if durably and folder_too:
        sync(path.parent)
