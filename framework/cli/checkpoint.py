"""`framework checkpoint ls|show|verify PATH`: what a run has saved, what is in it, and whether every byte is as it was written."""

from __future__ import annotations

import argparse
import sys
import time
from math import prod
from pathlib import Path

from framework.checkpoint.folder import BEST, INDEX, checkpoints, read_index, resolve, validation_loss, what_is_missing
from framework.config.errors import Problem, UserError
from framework.progress import busy, loading_libraries


def main(argv: list[str]) -> int:
    """Exit status: 0, 2 for a user's mistake or a damaged checkpoint."""
    arguments = parser().parse_args(argv)
    try:
        {"ls": _list, "show": _show, "verify": _verify}[arguments.action](arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="framework checkpoint", description="Look at the checkpoints of a run.")
    made.add_argument("action", choices=("ls", "show", "verify"), help="list all; show what the newest holds; compare every checksum")
    made.add_argument("path", metavar="PATH", help="a run directory, or one checkpoint folder")
    made.add_argument("--tensors", action="store_true", help="show: every parameter, its shape and where it lies")
    return made


def _list(arguments: argparse.Namespace) -> None:
    found = _found(arguments.path)
    print(f"{'step':>10} {'ranks':>6} {'GB':>8}  {'val loss':>9}  {'saved':<19}  state")
    for folder in found:
        missing = what_is_missing(folder)
        nbytes = sum(file.stat().st_size for file in folder.iterdir())
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(folder.stat().st_mtime))
        index = None if missing else read_index(folder)
        step, ranks, loss = ("?", "?", None) if missing else (index["step"], index["world_size"], validation_loss(index))
        shown = "" if loss is None else f"{loss:.4f}"
        state = missing or ("whole, best" if folder.name == _best_of(folder.parent) else "whole")
        print(f"{step:>10} {ranks:>6} {nbytes / 1e9:>8.2f}  {shown:>9}  {saved:<19}  {state}  {folder}")


def _best_of(checkpoints_dir: Path) -> str | None:
    """The name in the file `best`, where there is one."""
    file = checkpoints_dir / BEST
    return file.read_text().strip() if file.is_file() else None


def _show(arguments: argparse.Namespace) -> None:
    folder = resolve(arguments.path, Path(), "")
    index = read_index(folder)
    parameters = [(number, parameter) for number, buffer in enumerate(index["buffers"]) for parameter in buffer["parameters"]]
    print(f"{folder}\nstep        {index['step']:,}\nranks       {index['world_size']}")
    if (loss := validation_loss(index)) is not None:
        print(f"validation  loss {loss:.4f}")
    print(f"parameters  {sum(prod(parameter['shape']) for _, parameter in parameters):,} in {len(parameters)} tensors, trained")
    recipe = index["run"].get("recipe")
    if recipe is not None:
        print(f"model       {recipe['model']['path'] or 'random weights'}\nrecipe      {recipe['name']}, seed {recipe['seed']}")
    if arguments.tensors:
        for number, parameter in parameters:
            print(f"{parameter['name']}  {parameter['shape']}  buffer {number}, from element {parameter['offset']:,}")


def _verify(arguments: argparse.Namespace) -> None:
    with loading_libraries():
        from framework.checkpoint.load import Checkpoint
    problems = []
    for folder in _found(arguments.path):
        try:
            with busy(f"reading {folder}"):
                nbytes = Checkpoint(folder).verify()
            print(f"{folder}: {nbytes:,} bytes, every checksum as it was written")
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)


def _found(path: str) -> list[Path]:
    """One checkpoint folder, or all of a run."""
    folder = Path(path).expanduser()
    if found := [folder] if (folder / INDEX).is_file() else checkpoints(folder):
        return found
    expected = "a run directory with checkpoints, or one checkpoint folder"
    raise UserError(Problem(path="PATH", got=f"{folder}, which holds no checkpoint", expected=expected))
