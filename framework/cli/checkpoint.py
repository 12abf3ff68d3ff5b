"""`framework checkpoint ls|show|verify PATH`: what a run has saved, what is in it, and whether every byte is as it was written.

Checkpoints of DeepSpeed and of torch.distributed.checkpoint are shown, too, with what it takes to start a training from them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from framework.checkpoint.folder import BEST, checkpoints_at, pointed, read_index, validation_loss, what_is_missing
from framework.checkpoint.source import Source, check_source, find_source, newest_checkpoint
from framework.config.errors import Problem, UserError
from framework.progress import busy, loading_libraries, progress

READ_ELEMENTS = 1 << 22
FLOATS = ("float64", "float32", "float16", "bfloat16")


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
    made = argparse.ArgumentParser(prog="framework checkpoint", description="Look at the checkpoints of a run, of DeepSpeed or of torch.")
    made.add_argument("action", choices=("ls", "show", "verify"), help="list all; show what the newest holds; compare every checksum")
    made.add_argument("path", metavar="PATH", help="a run directory, one checkpoint folder, a folder of DeepSpeed or torch DCP")
    made.add_argument(
        "--tensors", action="store_true", help="show: every parameter, its type and shape, and FILE:BYTE where its values lie"
    )
    return made


def _list(arguments: argparse.Namespace) -> None:
    if (source := _foreign(arguments.path)) is not None:
        _show_foreign(source, arguments)
        return
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
    if (source := _foreign(arguments.path)) is not None:
        _show_foreign(source, arguments)
        return
    _found(arguments.path)
    folder = newest_checkpoint(pointed(Path(arguments.path).expanduser(), "PATH"), "PATH")
    index = read_index(folder)
    buffers = sorted(index["buffers"], key=lambda buffer: buffer.get("frozen", False))
    parameters = [parameter for buffer in buffers for parameter in buffer["parameters"]]
    frozen = [parameter for buffer in buffers if buffer.get("frozen") for parameter in buffer["parameters"]]
    trained = parameters[: len(parameters) - len(frozen)]
    print(f"{folder}\nstep        {index['step']:,}\nranks       {index['world_size']}")
    if (loss := validation_loss(index)) is not None:
        print(f"validation  loss {loss:.4f}")
    print(f"parameters  {_elements(trained):,} in {len(trained)} tensors, trained")
    if frozen:
        print(f"            {_elements(frozen):,} in {len(frozen)} tensors, frozen")
    recipe = index["run"].get("recipe")
    if recipe is not None:
        print(f"model       {recipe['model']['path'] or 'random weights'}\nrecipe      {recipe['name']}, seed {recipe['seed']}")
    if arguments.tensors:
        with loading_libraries():
            from framework.checkpoint.load import Checkpoint
        checkpoint = Checkpoint(folder)
        for parameter in parameters:
            name = parameter["name"]
            dtype = str(checkpoint.read(name, 0, 1).dtype).removeprefix("torch.")
            _print_tensor(name, dtype, parameter["shape"], checkpoint.where(name))


def _elements(parameters: list[dict[str, Any]]) -> int:
    return sum(prod(parameter["shape"]) for parameter in parameters)


def _show_foreign(source: Source, arguments: argparse.Namespace) -> None:
    with loading_libraries():
        from framework.checkpoint.open import open_weights
    weights = open_weights(source)
    print(f"{source.path}\nwhat        {weights.describe()}")
    print(f"elements    {sum(map(prod, weights.shapes.values())):,} in {len(weights.shapes)} tensors")
    print(f"use it      framework train ... model.path={arguments.path}\n            framework export {arguments.path} NEW_FOLDER")
    for problem in check_source(arguments.path):
        print(f"first       {problem.got}; write {problem.fix}")
    if arguments.tensors:
        for name, shape in weights.shapes.items():
            _print_tensor(name, weights.dtypes[name], shape, weights.places(name))


def _print_tensor(name: str, dtype: str, shape: Iterable[int], places: list[str]) -> None:
    print(f"{name}  {dtype} {list(shape)}  {' '.join(places)}")


def _verify(arguments: argparse.Namespace) -> None:
    if (source := _foreign(arguments.path)) is not None:
        _read_foreign(source)
        return
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


def _read_foreign(source: Source) -> None:
    with loading_libraries():
        from framework.checkpoint.open import open_weights
    weights, nbytes = open_weights(source), 0
    readable = {name: prod(shape) for name, shape in weights.shapes.items() if weights.dtypes[name] in FLOATS}
    for name, elements in progress(readable.items(), "reading tensors", total=len(readable), unit="tensors"):
        for start in range(0, elements, READ_ELEMENTS):
            nbytes += weights.read(name, start, min(start + READ_ELEMENTS, elements)).nbytes
    with busy("comparing checksums"):
        compared, without = weights.check()
    print(f"{source.path}: {nbytes:,} bytes of {len(readable)} tensors, every element of which can be read")
    if compared:
        print(f"    CRC-32 as it was written over {compared:,} bytes, with what is not read for a training")
    if without:
        print(f"    NOT checked, having no checksums: {', '.join(without)}")


def _foreign(path: str) -> Source | None:
    """A checkpoint of another program; None for a path that leads to one of ours."""
    folder = Path(path).expanduser()
    if checkpoints_at(folder) or not folder.is_dir():
        return None
    source = find_source(path, "PATH")
    return source if source.is_foreign else None


def _found(path: str) -> list[Path]:
    """One checkpoint folder, or all of a run."""
    folder = pointed(Path(path).expanduser(), "PATH")
    if found := checkpoints_at(folder):
        return found
    expected = "a run directory with checkpoints, one checkpoint folder, or a folder of DeepSpeed or torch DCP"
    raise UserError(Problem(path="PATH", got=f"{folder}, which holds no checkpoint", expected=expected))
