"""Checkpoint folders of a run: their names, which of them are whole, which is the newest or the best, which may go. No torch.

    RUN/checkpoints/step_500/    index.json, and of every rank rank_N.safetensors and rank_N.json (README.md)
    RUN/checkpoints/latest       the name of the newest
    RUN/checkpoints/best         the name of the one with the least validation loss, with `checkpoint.keep_best`

A folder gets its name when everything in it is on the disk; until then it is called .step_500.partial. So what has a name is whole, unless
somebody has damaged it since.

Unusual: the descriptions are JSON that ends with its own checksum (`sealed`), because a changed offset or interval would be read as
faithfully as the right one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

from framework.config.errors import Problem, UserError
from framework.disk import sync, write_whole

CHECKPOINTS = "checkpoints"
LATEST, BEST = "latest", "best"
INDEX, EXTRA = "index.json", "extra.safetensors"
SUMMARY, ENVIRONMENT = "summary.json", "env.json"
"""Of a run: how it ended; when and where it began."""
STEP = re.compile(r"step_(\d+)")
FORMAT, VERSION = "framework checkpoint", 2


def step_folder(run_dir: Path, step: int) -> Path:
    return Path(run_dir) / CHECKPOINTS / f"step_{step}"


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return folder.with_name(f".{folder.name}.partial")


def replaced_folder(folder: Path) -> Path:
    """What a checkpoint of the same name is called while a new one takes its place."""
    return partial_folder(folder.with_name(f"{folder.name}.old"))


def begin(folder: Path) -> None:
    """Make an empty folder to write to."""
    put_back(folder)
    remove(partial_folder(folder))
    partial_folder(folder).mkdir(parents=True)


def finish(folder: Path) -> None:
    """Give a written checkpoint its name, durably; in a run, `latest` follows.

    A whole checkpoint of the same step of a run stays, because between two renames a crash would leave neither with its name.
    """
    partial, old = partial_folder(folder), replaced_folder(folder)
    if folder.parent.name == CHECKPOINTS and STEP.fullmatch(folder.name) and what_is_missing(folder) is None:
        remove(partial)
    else:
        sync(partial)
        if os.path.lexists(folder):
            folder.rename(old)
        try:
            partial.rename(folder)
        except OSError:
            put_back(folder)
            raise
        sync(folder.parent)
        remove(old)
    if STEP.fullmatch(folder.name):
        write_whole(folder.parent / LATEST, f"{folder.name}\n")


def put_back(folder: Path) -> None:
    """After a crash or failure in `finish`: the old checkpoint gets its name back, if no new one has it."""
    old = replaced_folder(folder)
    if os.path.lexists(folder):
        remove(old)
    elif os.path.lexists(old):
        old.rename(folder)


def remove(path: Path) -> None:
    """A folder with all that is in it, a file, or a link but not what it leads to; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest step first."""
    folder = Path(run_dir) / CHECKPOINTS
    found = [entry for entry in folder.iterdir() if STEP.fullmatch(entry.name)] if folder.is_dir() else []
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    return int(STEP.fullmatch(folder.name)[1])


def prune(run_dir: Path, keep: int, *, keep_every_n_steps: int | None = None, keep_best: int = 0) -> list[Path]:
    """Remove whole checkpoints that nothing asks to keep, and what broken-off saves have left; returns what is gone.

    The `keep` newest stay, those whose step is a multiple of `keep_every_n_steps`, and the `keep_best` with the least validation loss, of
    which `best` names the first. A checkpoint that is not whole counts for nothing and stays: somebody may want to look at it.
    """
    folder = Path(run_dir) / CHECKPOINTS
    whole = whole_checkpoints(run_dir)
    stay = set(whole[-max(1, keep) :])
    if keep_every_n_steps:
        stay |= {path for path in whole if step_of(path) % keep_every_n_steps == 0}
    if keep_best and (best := _best(whole)[:keep_best]):
        stay |= set(best)
        write_whole(folder / BEST, f"{best[0].name}\n")
    for leftover in folder.glob(".*.partial"):  # folders, and the files that become `latest` and `best`
        remove(leftover)
    old = [path for path in whole if path not in stay]
    for path in old:
        remove_checkpoint(path)
    return old


def remove_checkpoint(folder: Path) -> None:
    """A name means whole, so the name goes first."""
    remove(partial_folder(folder))
    folder.rename(partial_folder(folder))
    remove(partial_folder(folder))


def _best(folders: list[Path]) -> list[Path]:
    """Those that have a validation loss, the least first; of equal ones the newest."""
    losses = {path: loss for path in folders if (loss := validation_loss(read_index(path))) is not None}
    return sorted(losses, key=lambda path: (losses[path], -step_of(path)))


def validation_loss(index: dict[str, Any]) -> float | None:
    """Of the step that was saved; None where that step was not validated."""
    return index["run"].get("validation_loss")


# ---- descriptions
def sealed(content: dict[str, Any]) -> str:
    """`content` as JSON whose last key is a checksum of all that stands before it."""
    body = json.dumps(content)[:-1]
    return f"{body}{_seal_of(body)}"


def unsealed(text: str) -> dict[str, Any]:
    """The content of JSON that `sealed` has written. Raises ValueError where it has changed since."""
    body = text[: -len(_seal_of(""))]
    if text != f"{body}{_seal_of(body)}":
        raise ValueError("changed since it was written (its checksum differs)")
    return json.loads(text)


def _seal_of(body: str) -> str:
    return f', "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n'


def read_index(folder: Path) -> dict[str, Any]:
    """The content of `index.json`. Raises UserError where it is missing, broken or of another format."""
    file = Path(folder) / INDEX
    try:
        text = file.read_text()
        index = json.loads(text)
        made_by = (index["format"], index["version"])
        if made_by in ((FORMAT, VERSION), (FORMAT, 1)):
            return unsealed(text) if made_by[1] > 1 or "sha256" in index else index  # version 1 had no checksum here
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(Problem(path=str(file), got=f"{type(error).__name__}: {error}", expected="the index of a checkpoint")) from error
    got = f"{made_by[0]!r}, version {made_by[1]}"
    raise UserError(Problem(path=str(folder), got=got, expected=f"{FORMAT!r}, version 1 or {VERSION}"))


def read_ranks(folder: Path, index: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank says of its part. Raises OSError, ValueError or KeyError where one is missing or does not belong to `index`."""
    ranks = []
    for rank in range(index["world_size"]):
        file = folder / f"rank_{rank}.json"
        text = file.read_text()
        content = unsealed(text) if index["version"] > 1 else json.loads(text)
        if content["save"] != index["save"]:
            raise ValueError(f"{file.name} of another save")
        if index["version"] > 1 and digest_of(text) != index["ranks"][rank]:
            raise ValueError(f"{file.name} changed since it was written (its checksum differs)")
        ranks.append(content)
    return ranks


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def what_is_missing(folder: Path) -> str | None:
    """Why a checkpoint cannot be whole, seen from its descriptions, names and sizes; None when nothing speaks against it."""
    try:
        index = read_index(folder)
        for rank in range(index["world_size"]):
            for file in (folder / f"rank_{rank}.safetensors", folder / f"rank_{rank}.json"):
                if not file.is_file():
                    return f"no {file.name}"
        for rank, described in enumerate(read_ranks(folder, index)):
            weights = folder / f"rank_{rank}.safetensors"
            if weights.stat().st_size != described["file_bytes"]:
                return f"{weights.name} of {weights.stat().st_size:,} bytes where {described['file_bytes']:,} were written"
        if "extra" in index and (folder / EXTRA).stat().st_size != index["extra"]["file_bytes"]:
            return f"{EXTRA} of another size than was written"
    except UserError as error:
        return error.problems[0].got
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"a broken description ({type(error).__name__}: {error})"
    return None


# ---- which checkpoint a run goes on from
def resolve(resume: str, runs_dir: Path, name: str) -> Path | None:
    """The checkpoint that `resume` means: the newest of a run, a checkpoint folder, or what RUN/checkpoints/latest or best names; `none`;
    `auto`, that of the newest run in RUNS_DIR/NAME, None where that is done or no run has one.

    Raises UserError where nothing whole is found at a path.
    """
    if resume == "none":
        return None
    if resume == "auto":
        run = newest_run(runs_dir, name)
        return None if run is None or is_done(run) else whole_checkpoints(run)[-1].absolute()
    path = pointed(Path(resume).expanduser(), "resume")
    found = checkpoints_at(path)
    whole = [folder for folder in found if what_is_missing(folder) is None]
    if not whole:
        reasons = "; ".join(f"{folder.name}: {what_is_missing(folder)}" for folder in found)
        got = f"{resume}, which {f'has no whole checkpoint ({reasons})' if found else 'holds no checkpoint'}"
        expected = "a run directory with checkpoints, one checkpoint folder, RUN/checkpoints/best, auto or none"
        raise UserError(Problem(path="resume", got=got, expected=expected, fix="resume=none"))
    return whole[-1].absolute()


def pointed(path: Path, setting: str) -> Path:
    """What `latest` or `best` of a run names; any other path as it is. Raises UserError where it names no checkpoint."""
    if path.name not in (LATEST, BEST) or not path.is_file():
        return path
    name = path.read_text(errors="replace").strip()
    if not STEP.fullmatch(name) or not path.with_name(name).is_dir():
        got, expected = f"{path}, which names {name[:50]!r}", f"the name of a checkpoint in {path.parent}"
        raise UserError(Problem(path=setting, got=got, expected=expected, fix=f"{setting}={path.parent.parent}"))
    return path.with_name(name)


def checkpoints_at(path: Path) -> list[Path]:
    """One checkpoint folder, or all of a run, oldest first; RUN/checkpoints stands for the run."""
    if (path / INDEX).is_file():
        return [path]
    return checkpoints(path.parent if path.name == CHECKPOINTS else path)


def run_of(folder: Path) -> Path | None:
    """The run whose checkpoint `folder` is; None for one that somebody has put elsewhere."""
    return folder.parent.parent if folder.parent.name == CHECKPOINTS and STEP.fullmatch(folder.name) else None


def newest_run(runs_dir: Path, name: str) -> Path | None:
    """The run of this name that began last, of those that are done or have a whole checkpoint."""
    runs = Path(runs_dir).expanduser() / name
    found = sorted(runs.iterdir(), key=lambda run: (_began(run), run.name), reverse=True) if runs.is_dir() else []
    return next((run for run in found if is_done(run) or whole_checkpoints(run)), None)


def _began(run: Path) -> float:
    """Seconds since 1970, by what the run itself has noted: names of folders are local times, and a copy has a name of its own."""
    try:
        return datetime.fromisoformat(json.loads((run / ENVIRONMENT).read_text())["time"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def whole_checkpoints(run_dir: Path) -> list[Path]:
    """Oldest step first."""
    return [folder for folder in checkpoints(run_dir) if what_is_missing(folder) is None]


def is_done(run_dir: Path) -> bool:
    """Whether a run came to its end."""
    try:
        return json.loads((run_dir / SUMMARY).read_text())["ended"] in ("done", "early")
    except (OSError, ValueError, KeyError, TypeError):
        return False
