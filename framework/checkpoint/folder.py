"""Checkpoint folders of a run: their names, which of them are whole, which is the newest, which may go. No torch.

    RUN/checkpoints/step_500/    index.json, and of every rank rank_N.safetensors and rank_N.json (format.py)
    RUN/checkpoints/latest       the name of the newest

A folder gets its name when everything in it is on the disk; until then it is called .step_500.partial. So what has a name is whole, unless
somebody has damaged it since.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from framework.config.errors import Problem, UserError
from framework.disk import sync, write_whole

CHECKPOINTS = "checkpoints"
LATEST = "latest"
INDEX = "index.json"
SUMMARY = "summary.json"
"""Of a run: how it ended."""
STEP = re.compile(r"step_(\d+)")


def step_folder(run_dir: Path, step: int) -> Path:
    return Path(run_dir) / CHECKPOINTS / f"step_{step}"


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return folder.with_name(f".{folder.name}.partial")


def finish(folder: Path) -> None:
    """Give a written checkpoint its name, durably; `latest` follows."""
    partial = partial_folder(folder)
    sync(partial)
    old = partial_folder(folder.with_name(f"{folder.name}.old"))
    if folder.exists():  # saved again, because what follows here has failed before
        folder.rename(old)
    partial.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
    write_whole(folder.parent / LATEST, f"{folder.name}\n")


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest step first."""
    folder = Path(run_dir) / CHECKPOINTS
    found = [entry for entry in folder.iterdir() if STEP.fullmatch(entry.name)] if folder.is_dir() else []
    return sorted(found, key=lambda entry: int(STEP.fullmatch(entry.name)[1]))


def prune(run_dir: Path, keep: int) -> list[Path]:
    """Remove all but the `keep` newest whole checkpoints, and what broken-off saves have left; returns what is gone.

    A checkpoint that is not whole counts for nothing and stays: somebody may want to look at it.
    """
    folder = Path(run_dir) / CHECKPOINTS
    whole = [path for path in checkpoints(run_dir) if what_is_missing(path) is None]
    old = whole[: max(0, len(whole) - max(1, keep))]
    for path in old:
        path.rename(partial_folder(path))  # a name means whole, so the name goes first
    for leftover in folder.glob(".step_*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    return old


def read_index(folder: Path) -> dict[str, Any]:
    """The content of `index.json`. Raises UserError where it is missing or broken."""
    file = Path(folder) / INDEX
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(Problem(path=str(file), got=f"{type(error).__name__}: {error}", expected="the index of a checkpoint")) from error


def what_is_missing(folder: Path) -> str | None:
    """Why a checkpoint cannot be whole, seen from names and sizes alone; None when nothing speaks against it."""
    try:
        index = read_index(folder)
        for rank in range(index["world_size"]):
            if reason := _missing_of_rank(folder, rank, index["save"]):
                return reason
    except UserError as error:
        return error.problems[0].got
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"a broken description ({type(error).__name__}: {error})"
    return None


def _is_done(run: Path) -> bool:
    try:
        return json.loads((run / SUMMARY).read_text())["ended"] in ("done", "early")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _missing_of_rank(folder: Path, rank: int, save: str) -> str | None:
    weights, description = folder / f"rank_{rank}.safetensors", folder / f"rank_{rank}.json"
    for file in (weights, description):
        if not file.is_file():
            return f"no {file.name}"
    facts = json.loads(description.read_text())
    if facts["save"] != save:
        return f"{description.name} of another save"
    if weights.stat().st_size != facts["file_bytes"]:
        return f"{weights.name} of {weights.stat().st_size:,} bytes where {facts['file_bytes']:,} were written"
    return None


def resolve(resume: str, runs_dir: Path, name: str) -> Path | None:
    """The checkpoint that `resume` means: that of a run or a checkpoint folder; `none`; `auto`, that of the newest run in RUNS_DIR/NAME,
    None where that is done or no run has one.

    Raises UserError where nothing whole is found at a path.
    """
    if resume == "none":
        return None
    if resume == "auto":
        return _newest_run(Path(runs_dir).expanduser() / name)
    path = Path(resume).expanduser()
    found = [path] if (path / INDEX).is_file() else checkpoints(path)
    whole = [folder for folder in found if what_is_missing(folder) is None]
    if not whole:
        reasons = "; ".join(f"{folder.name}: {what_is_missing(folder)}" for folder in found)
        got = f"{resume}, which {f'has no whole checkpoint ({reasons})' if found else 'holds no checkpoint'}"
        expected = "a run directory with checkpoints, one checkpoint folder, auto or none"
        raise UserError(Problem(path="resume", got=got, expected=expected, fix="resume=none"))
    return whole[-1].absolute()


def finished_run(runs_dir: Path, name: str) -> Path | None:
    """The newest run of this name, where it came to its end."""
    runs = Path(runs_dir).expanduser() / name
    started = [run for run in sorted(runs.iterdir()) if (run / SUMMARY).exists() or checkpoints(run)] if runs.is_dir() else []
    return started[-1] if started and _is_done(started[-1]) else None


def _newest_run(runs: Path) -> Path | None:
    """The last whole checkpoint of the newest run that has one, run directories being named by their time; None after a finished run."""
    for run in sorted(runs.iterdir(), reverse=True) if runs.is_dir() else ():
        whole = [folder for folder in checkpoints(run) if what_is_missing(folder) is None]
        if _is_done(run):
            return None
        if whole:
            return whole[-1].absolute()
    return None
