"""The experiment dashboard of a run: TensorBoard, Weights & Biases, or none. metrics.csv is written besides, always.

    tracker = build_tracker(recipe, run_dir)     # rank 0 only, before the process group; other ranks take Tracker()
    Trainer(logger=tracker.loggers or False, ...)
    tracker.log(step, {"train/loss": 1.8, "tokens": 40960})
    tracker.finish()

Loggers are Lightning's, so other callbacks find them on the Trainer. The resolved recipe and the git revision are logged once.

Unusual: wandb is started here and not when it is first used, because a server that cannot be reached costs a minute in which the other
ranks would wait in a collective. In mode `auto` a run without a key or a reachable server is written offline, which is said.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from framework.config.errors import Problem, UserError
from framework.config.schema import LoggerConfig, RecipeConfig
from framework.config.typed import to_dict
from framework.train.run_dir import config_yaml, read_environment

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger, WandbLogger

REACH_SECONDS = 5.0
INIT_SECONDS = 20.0


class Answer(NamedTuple):
    """What the model was asked, and what it said."""

    prompt: str
    answer: str


class Tracker:
    """What a callback logs to. Without a logger it does nothing."""

    def __init__(self, *loggers: Logger) -> None:
        self.loggers = list(loggers)

    @property
    def run_id(self) -> str | None:
        """The run's id in the dashboard, by which it can be continued."""
        return None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log `values` at optimizer step `step`. `tokens` among them is a second axis."""
        for logger in self.loggers:
            logger.log_metrics(dict(values), step)

    def log_answers(self, step: int, answers: Sequence[Answer]) -> None:
        """Show what the model said at optimizer step `step`."""

    def finish(self, status: str = "success") -> None:
        """Write everything out and close the run; `status` is `success` or `failed`."""
        for logger in self.loggers:
            logger.finalize(status)


def check_logger(config: LoggerConfig) -> list[Problem]:
    """What can be known before a rank starts: whether the dashboard's package is installed. Imports nothing heavy."""
    needed = {"tensorboard": "tensorboard", "wandb": "wandb"}.get(config.name)
    if needed is None or importlib.util.find_spec(needed) is not None:
        return []
    expected = f"the package {needed}, which is not installed"
    return [Problem(path="logger.name", got=config.name, expected=expected, fix=f"pip install {needed}, or logger=none")]


def build_tracker(recipe: RecipeConfig, run_dir: Path, run_id: str | None = None) -> Tracker:
    """The tracker of rank 0; `run_id`: of the run in the dashboard that goes on (P39). Raises UserError when it cannot be used as asked."""
    problems = check_logger(recipe.logger)
    if problems:
        raise UserError(*problems)
    if recipe.logger.name == "tensorboard":
        return _tensorboard(recipe, run_dir)
    if recipe.logger.name == "wandb":
        return _wandb(recipe, run_dir, run_id)
    return Tracker()


def _tensorboard(recipe: RecipeConfig, run_dir: Path) -> Tracker:
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(run_dir, name="", version="tensorboard")
    logger.experiment.add_text("config", f"```yaml\n{config_yaml(recipe)}```")
    logger.experiment.add_text("git", str(read_environment(run_dir)["git"]))
    return _TensorBoardTracker(logger)


class _TensorBoardTracker(Tracker):
    def log_answers(self, step: int, answers: Sequence[Answer]) -> None:
        text = "\n\n".join(f"{_indented(prompt)}\n\n---\n\n{_indented(answer)}" for prompt, answer in answers)
        self.loggers[0].experiment.add_text("answers", text, step)


def _indented(text: str) -> str:
    """As Markdown shows it letter for letter."""
    return "\n".join(f"    {line}" for line in text.splitlines())


# ---- Weights & Biases
def _wandb(recipe: RecipeConfig, run_dir: Path, run_id: str | None) -> Tracker:
    config = recipe.logger
    os.environ.setdefault("WANDB_SILENT", "true")  # its banner; what matters is said here
    if config.mode == "offline" or os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled"):
        if config.mode == "online":
            raise _not_online(f"WANDB_MODE={os.environ['WANDB_MODE']} in the environment")
        return _started(recipe, run_dir, run_id, offline=True)
    hindrance = _hindrance()
    if hindrance is None:
        try:
            return _started(recipe, run_dir, run_id, offline=False)
        except _wandb_errors() as error:
            hindrance = str(error).strip().split("\n")[0]
    if config.mode == "online":
        raise _not_online(hindrance)
    print(f"wandb: {hindrance}; writing offline, to be sent later with `wandb sync {run_dir / 'wandb'}/offline-run-*`", flush=True)
    return _started(recipe, run_dir, run_id, offline=True)


def _started(recipe: RecipeConfig, run_dir: Path, run_id: str | None, *, offline: bool) -> Tracker:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    config = recipe.logger
    mode = os.environ.get("WANDB_MODE", "offline") if offline else "online"  # may also say `disabled`
    logger = WandbLogger(
        name=f"{recipe.name}/{run_dir.name}",
        save_dir=run_dir,
        id=run_id,  # Lightning sets resume="allow"
        offline=offline,
        mode=mode,  # WandbLogger's own way is an environment variable, which wandb reads only once per process
        project=config.project,
        entity=config.entity,
        tags=list(config.tags),
        config={"recipe": to_dict(recipe), "git": read_environment(run_dir)["git"]},
        settings=wandb.Settings(init_timeout=INIT_SECONDS, console="off", silent=True),
    )
    run = logger.experiment  # starts it
    run.define_metric("step")
    run.define_metric("tokens")
    run.define_metric("*", step_metric="step")
    if not offline:
        print(f"wandb: {run.url}", flush=True)
    return _WandbTracker(logger)


class _WandbTracker(Tracker):
    """Our own `step` is the axis: wandb counts calls by itself, and Lightning's axis is named after its trainer."""

    loggers: list[WandbLogger]

    @property
    def run_id(self) -> str:
        return self.loggers[0].experiment.id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.loggers[0].experiment.log({"step": step, **values})

    def log_answers(self, step: int, answers: Sequence[Answer]) -> None:
        import wandb

        rows = [[step, prompt, answer] for prompt, answer in answers]
        self.loggers[0].experiment.log({"step": step, "answers": wandb.Table(columns=["step", "prompt", "answer"], data=rows)})

    def finish(self, status: str = "success") -> None:
        super().finish(status)
        self.loggers[0].experiment.finish(exit_code=0 if status == "success" else 1)


def _wandb_errors() -> tuple[type[Exception], ...]:
    import wandb

    return (wandb.errors.Error, OSError)


def _hindrance() -> str | None:
    """Why a run cannot be online, None when nothing speaks against it."""
    import wandb

    settings = wandb.setup().settings
    address = urlsplit(settings.base_url)
    if not (settings.api_key or _key_in_netrc(address.hostname)):
        return "no API key (WANDB_API_KEY or `wandb login`)"
    if not _reachable(address.hostname, address.port or (443 if address.scheme == "https" else 80)):
        return f"{address.hostname} cannot be reached"
    return None


def _key_in_netrc(host: str) -> bool:
    """Whether `wandb login` left a key for `host`."""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _reachable(host: str, port: int) -> bool:
    """Whether a connection can be made. Looking up a name has no time limit of its own, hence the thread."""
    connected = threading.Event()

    def connect() -> None:
        try:
            with socket.create_connection((host, port), timeout=REACH_SECONDS):
                connected.set()
        except OSError:
            return

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(REACH_SECONDS)
    return connected.is_set()


def _not_online(reason: str) -> UserError:
    fix = "logger.mode=offline, or logger.mode=auto"
    return UserError(Problem(path="logger.mode", got=f"online, but {reason}", expected="a key and a reachable server", fix=fix))
