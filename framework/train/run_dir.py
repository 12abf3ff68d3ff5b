"""The run directory: everything that one run leaves behind, RUNS_DIR/NAME/TIME/.

    config.yaml      the resolved recipe, what workers read        metrics.csv    one row per logged step (metrics.py)
    overrides.txt    what was changed on the command line          plot.png       loss, learning rate and gradient norm
    command.txt      the whole command line                        logs/          rank_N.log, rank_N.error.json
    env.json         versions, hardware, git revision              export/        the trained model as a Hugging Face folder
    plan.txt, ledger.json   what was going to happen, what became of every row of data
    summary.json     how it ended                                  answers.jsonl  what the model said to `eval.prompts`

Unusual: no torch here, because the supervisor writes it before any rank starts; versions come from package metadata and GPUs from
`nvidia-smi`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from framework.config.errors import Problem, UserError
from framework.config.schema import RecipeConfig
from framework.config.typed import from_dict, to_dict
from framework.disk import write_whole

CONFIG = "config.yaml"
OVERRIDES = "overrides.txt"
COMMAND = "command.txt"
ENVIRONMENT = "env.json"
SUMMARY = "summary.json"
PLAN = "plan.txt"
LEDGER = "ledger.json"
METRICS = "metrics.csv"
ANSWERS = "answers.jsonl"
PLOT = "plot.png"
LOGS = "logs"
EXPORT = "export"
TOKENS = "tokens"
"""What the first rank of a machine has tokenised, for the others; gone when the run has ended."""

PACKAGES = ("torch", "lightning", "transformers", "tokenizers", "datasets", "safetensors", "hydra-core", "omegaconf", "numpy", "wandb")
CHECKOUT = Path(__file__).resolve().parents[2]
COMMAND_SECONDS = 10


# ---- made before the ranks start
def write_run_dir(
    path: Path, recipe: RecipeConfig, *, overrides: Sequence[str], command: Sequence[str], sweep_job: int | None = None
) -> Path:
    """Write what is known before the first rank starts into `path`; returns the configuration file for the workers."""
    try:
        (path / LOGS).mkdir(parents=True, exist_ok=True)
        (path / CONFIG).write_text(config_yaml(recipe))
        (path / OVERRIDES).write_text("".join(f"{override}\n" for override in overrides))
        (path / COMMAND).write_text(shlex.join(command) + "\n")
        (path / ENVIRONMENT).write_text(json.dumps(environment() | {"sweep_job": sweep_job}, indent=2) + "\n")
    except OSError as error:
        raise _unwritable(path, error) from error
    return path / CONFIG


def config_yaml(recipe: RecipeConfig) -> str:
    """The resolved recipe as text; `read_config` gives the same recipe back."""
    return yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True)


def environment() -> dict[str, Any]:
    """What a run depends on besides its recipe."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "platform": platform.platform(),
        "host": platform.node(),
        "cores": os.cpu_count(),
        "gpus": _lines("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader") or [],
        "git": git_revision(CHECKOUT),
    }


def git_revision(checkout: Path) -> dict[str, Any] | None:
    """Revision of the code in `checkout` and whether files differ from it; None when the code is not under git there.

    An installed package may lie inside somebody else's repository: only a tracked file makes it this one's code.
    """
    if _lines("git", "-C", str(checkout), "ls-files", "--error-unmatch", "framework/__init__.py") is None:
        return None
    revision = _lines("git", "-C", str(checkout), "rev-parse", "HEAD")
    if not revision:
        return None  # nothing was committed yet
    changed = _lines("git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no", "--", ".")
    return {"revision": revision[0], "dirty": bool(changed)}


@dataclass(frozen=True, kw_only=True)
class Finishing:
    """All ranks have made their last step and save, which may take as long as it takes."""

    step: int
    stopped: bool
    """On request, whether or not it was the last planned step."""


def saving_path(run_dir: Path) -> Path:
    return Path(run_dir) / LOGS / "saving"


def finishing_path(run_dir: Path) -> Path:
    return Path(run_dir) / LOGS / "finishing.json"


# ---- written while it runs
def write_summary(run_dir: Path, **facts: Any) -> None:
    """Write how the run ended (`ended`: done, early, stopped or failed; `steps`, `loss`, ...); replaces an earlier summary as a whole."""
    _replace(Path(run_dir) / SUMMARY, facts)


@contextmanager
def saving(run_dir: Path | None) -> Iterator[None]:
    """Around a save in the middle of a run: the supervisor, which looks for the file, lets it come to its end. None: no supervisor."""
    if run_dir is None:
        yield
        return
    with suppress(OSError):  # it is a hint: on a full disk the save itself says what is wrong
        saving_path(run_dir).touch()
    try:
        yield
    finally:
        with suppress(OSError):
            saving_path(run_dir).unlink(missing_ok=True)


def write_finishing(run_dir: Path, finishing: Finishing) -> None:
    """Tell the supervisor."""
    _replace(finishing_path(run_dir), dataclasses.asdict(finishing))


# ---- read afterwards
def read_finishing(run_dir: Path) -> Finishing | None:
    """None while the ranks still train."""
    path = finishing_path(run_dir)
    return Finishing(**json.loads(path.read_text())) if path.exists() else None


def read_config(path: Path) -> RecipeConfig:
    """The recipe in a `config.yaml`, or in that of a run directory."""
    path = Path(path) / CONFIG if Path(path).is_dir() else Path(path)
    return from_dict(RecipeConfig, yaml.safe_load(path.read_text()))


def read_environment(run_dir: Path) -> dict[str, Any]:
    return json.loads((Path(run_dir) / ENVIRONMENT).read_text())


def read_summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((Path(run_dir) / SUMMARY).read_text())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(*command: str) -> list[str] | None:
    """Output lines of a command; None when it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def _replace(path: Path, content: dict[str, Any]) -> None:
    try:
        write_whole(path, json.dumps(content, indent=2) + "\n", durably=False)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> UserError:
    expected = "a folder with room to write"
    return UserError(Problem(path=str(path), got=error.strerror or str(error), expected=expected, fix="runs_dir=FOLDER"))
