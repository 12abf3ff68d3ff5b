"""Composes recipes: group options, then the recipe, then the command line, into one typed `RecipeConfig`. All use of Hydra starts here.

Two ways in. `compose(arguments)` returns what one command line means. `hydra_main(task)` is a whole command on Hydra's machinery (sweeps,
`--help`, `--cfg job`, shell completion), which calls `task` once per job and returns the exit status.

Unusual: Hydra composes plain values and does not check them. The words of the command line are looked at first (`command_line.py`), the
composed values afterwards (`typed.py`, `check.py`), so that all problems of all files and words come out together. No torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework.config import hydra_ext
from framework.config.as_meant import as_meant
from framework.config.check import check as check_recipe
from framework.config.command_line import Vetted, group_options, parse_arguments, vet
from framework.config.errors import Problem, UserError
from framework.config.explain import Origins, problems_of, render
from framework.config.paths import asset_dir
from framework.config.run_folder import RunFolders
from framework.config.schema import RecipeConfig
from framework.config.typed import convert, to_dict
from framework.ranks import launched

STATUS_USER_MISTAKE = 2
STATUS_FAILURE = 1
STATUS_INTERRUPTED = 130
Check = Callable[[RecipeConfig], list[Problem]]
MOST_JOBS_CHECKED = 16
COMPOSING_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, UserError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Composed:
    """One job."""

    recipe: RecipeConfig
    overrides: tuple[str, ...]
    """The words of the command line that made it, without Hydra's own."""
    run_dir: Path | None
    """The job's own new directory, absolute. None: nobody asked for one (`compose`), or another rank of torchrun, Slurm or MPI has it."""
    sweep_job: int | None = None
    """Its number in the sweep; None: it is no job of a sweep."""


def compose(arguments: Sequence[str], *, check: Check | None = None) -> Composed:
    """What the arguments of one `train` command mean: overrides, and `--config-dir DIR`.

    Raises UserError with all problems: those of keys and types, and those that `check` finds.
    """
    options, _ = parse_arguments(arguments)
    _register(options)
    vetted = vet(options.overrides, config_dir=options.config_dir, multirun=False)
    return _composed(vetted, options.config_dir, check)


def hydra_main(task: Callable[[Composed], int | None], arguments: Sequence[str] | None = None, *, check: Check = check_recipe) -> int:
    """Run `task` on what the command line says, once or, with `-m`, once per job, and return the exit status of the process.

    The whole of the command `train` is

        def main() -> None:
            sys.exit(hydra_main(start, check=check_everything))   # framework.cli.check

        def start(job: Composed) -> int | None:
            # keys, types, arithmetic, files and hardware have been checked: job.recipe is sound
            # job.run_dir exists, is empty and is this job's alone; the working directory is the user's
            # under torchrun, Slurm or MPI every rank gets here; ranks other than 0 have job.run_dir None and must ask rank 0
            plan = ...                         # import torch only in here, if at all
            return launch(...).status          # 0 or None: done. Anything else: failed, and the user has been told why

    A job has failed when `task` returns a status other than 0 or raises; UserError is printed without traceback and counts as status 2,
    any other exception is printed with its traceback and counts as 1. Failed jobs do not stop a sweep: at its end they are listed, and the
    status is theirs if they agree, else 1. KeyboardInterrupt and SystemExit do stop it (130, or the status of the SystemExit).

    `arguments`: None for those of the process. `check`: what else is wrong with a recipe, before its job starts; `check_recipe` looks at
    arithmetic and hardware.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options, flags = parse_arguments(arguments)
        if options.multirun and "resume=auto" in options.overrides:
            got, expected = "auto in a sweep, whose jobs it could not tell apart", "a run or a checkpoint folder, or one job"
            raise UserError(Problem(path="resume", got=got, expected=expected, fix="resume=RUN"))
        _register(options)
        overrides = options.overrides if options.shell_completion else _accepted(options, check)
    except UserError as error:
        print(render(error.problems), file=sys.stderr)
        return STATUS_USER_MISTAKE
    jobs = _Jobs(task=task, check=check, config_dir=options.config_dir, sweep=options.multirun, argv=sys.argv)
    command = hydra.main(version_base="1.3", config_path=str(asset_dir("conf")), config_name="config")(jobs.run)
    with tempfile.TemporaryDirectory() as scratch, _process_state():
        own = [f"hydra.sweep.dir='{scratch}'"] if options.multirun else []  # Hydra leaves its own settings of a sweep there
        sys.argv = [sys.argv[0], *flags, *overrides, *own]
        try:
            command()
        except COMPOSING_ERRORS as error:
            print(render(problems_of(error, group_options(options.config_dir), hydra_ext.RecipeSource.loaded)), file=sys.stderr)
            return STATUS_USER_MISTAKE
        except KeyboardInterrupt:
            jobs.report()
            print("interrupted", file=sys.stderr)
            return STATUS_INTERRUPTED
        except SystemExit:
            jobs.report()
            raise
    return jobs.report()


@dataclass(kw_only=True)
class _Ended:
    overrides: str
    run_dir: Path | None
    status: int


@dataclass(kw_only=True)
class _Jobs:
    """Calls the task per job and remembers how each ended."""

    task: Callable[[Composed], int | None]
    check: Check
    config_dir: str | None
    sweep: bool
    argv: list[str]
    """The command line as it was typed; Hydra has read its own by the time a job starts."""
    folders: RunFolders = field(default_factory=RunFolders)
    ended: list[_Ended] = field(default_factory=list)

    def run(self, config: DictConfig) -> None:
        sys.argv = self.argv
        settings = HydraConfig.get()
        overrides = tuple(settings.overrides.task)
        run_dir, number = None, settings.job.num if self.sweep else None
        if self.sweep:
            print(f"\n=== job {settings.job.num}: {' '.join(overrides)}", flush=True)
        try:
            recipe = _typed(config, overrides, settings.runtime.choices, self.config_dir, self.check)
            place = launched(os.environ)
            if place is None or place.rank == 0:
                run_dir = self.folders.claim(recipe.runs_dir, recipe.name, number)
            status = self.task(Composed(recipe=recipe, overrides=overrides, run_dir=run_dir, sweep_job=number)) or 0
        except UserError as error:
            print(render(error.problems), file=sys.stderr, flush=True)
            status = STATUS_USER_MISTAKE
        except Exception:
            traceback.print_exc()
            status = STATUS_FAILURE
        if status and run_dir is not None:
            with contextlib.suppress(OSError):  # not empty
                run_dir.rmdir()
        self.ended.append(_Ended(overrides=" ".join(overrides), run_dir=run_dir, status=status))

    def report(self) -> int:
        """List the failed jobs of a sweep; the exit status of all."""
        failed = [job for job in self.ended if job.status]
        if self.sweep and self.ended:
            print(f"\n{len(self.ended) - len(failed)} of {len(self.ended)} jobs done" + (", failed:" if failed else ""), file=sys.stderr)
            for job in failed:
                place = f"  {job.run_dir}" if job.run_dir is not None and job.run_dir.exists() else ""
                print(f"  {job.overrides}  (status {job.status}){place}", file=sys.stderr)
        statuses = {job.status for job in failed}
        return 0 if not statuses else statuses.pop() if len(statuses) == 1 else STATUS_FAILURE


def _accepted(options: Namespace, check: Check) -> list[str]:
    """The overrides as Hydra takes them. Raises UserError with every problem that is visible before jobs start."""
    if options.multirun and launched(os.environ) is not None:
        expected = "one job per launch, or -m with trainer.devices=N and no launcher"
        raise UserError(Problem(path="-m", got="a sweep under torchrun, Slurm or MPI", expected=expected))
    vetted = vet(options.overrides, config_dir=options.config_dir, multirun=options.multirun)
    if vetted.problems and options.multirun:
        raise UserError(*_of_jobs(vetted, options.config_dir, check))
    if vetted.problems:
        _composed(vetted, options.config_dir, check)  # finds what else is wrong, and raises
    return vetted.good


def _of_jobs(vetted: Vetted, config_dir: str | None, check: Check) -> list[Problem]:
    """What is wrong with the words and with jobs of a sweep: enough of them that each value of each list occurs, up to a limit."""
    values = [_values(word) for word in vetted.good]
    found = list(vetted.problems)
    for number in range(min(MOST_JOBS_CHECKED, max(map(len, values), default=0))):
        words = [each[min(number, len(each) - 1)] for each in values]
        try:
            _composed(replace(vetted, good=words), config_dir, check)
        except UserError as error:
            found += [problem for problem in error.problems if problem not in found]
    return found


def _values(word: str) -> list[str]:
    """An override once for each value of its list; itself where it has one value."""
    override = OverridesParser.create().parse_override(word)
    return (
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()] if override.is_sweep_override() else [word]
    )


def _composed(vetted: Vetted, config_dir: str | None, check: Check | None) -> Composed:
    """Compose the good words of a command line; raises UserError with their problems and those of the others."""
    options = group_options(config_dir)
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(config_dir=str(asset_dir("conf")), version_base="1.3", job_name="train"):
            config = hydra.compose("config", overrides=vetted.good, return_hydra_config=True)
            choices = config.hydra.runtime.choices
            OmegaConf.set_struct(config, False)
            del config["hydra"]
            recipe = _typed(config, tuple(vetted.good), choices, config_dir, check, vetted.problems)
    except COMPOSING_ERRORS as error:
        raise UserError(*vetted.problems, *problems_of(error, options, hydra_ext.RecipeSource.loaded)) from error
    if vetted.problems:
        raise UserError(*vetted.problems)
    return Composed(recipe=recipe, overrides=tuple(word for word in vetted.good if not word.lstrip("+").startswith("hydra")), run_dir=None)


def _typed(
    config: DictConfig, overrides: Sequence[str], choices: Any, config_dir: str | None, check: Check | None, told: Sequence[Problem] = ()
) -> RecipeConfig:
    """The composed values as dataclasses. Raises UserError with all that is wrong in them, as far as it does not follow from what was
    `told` of words that are not in them."""
    try:
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        raise UserError(*problems_of(error, group_options(config_dir))) from error
    _, problems = convert(RecipeConfig, values)
    files = [(file, "") for file in reversed(hydra_ext.RecipeSource.loaded)]
    if config_dir:
        options = ((Path(config_dir) / group / f"{option}.yaml", group) for group, option in choices.items() if isinstance(option, str))
        files = [(file, group) for file, group in options if file.is_file()] + files
    origins = Origins(overrides, files)
    values, doubtful = as_meant(values, [*told, *problems])
    recipe, left = convert(RecipeConfig, values)
    new = [problem for problem in left if problem not in problems]
    doubtful |= {problem.path.partition(".")[0] for problem in new}
    problems += new
    if check is not None and hydra_ext.GROUP not in doubtful:
        problems += [problem for problem in check(recipe) if problem.path.partition(".")[0] not in doubtful]
        if problems and not choices.get(hydra_ext.GROUP):
            names = ", ".join(group_options(config_dir)[hydra_ext.GROUP])
            problems.insert(0, Problem(path="recipe", got="none", expected=f"one of {names}, or a file of yours", fix="+recipe=quickstart"))
    problems = [origins.add(problem) for problem in problems]
    if problems:
        raise UserError(*problems)
    return recipe


def _register(options: Namespace) -> None:
    hydra_ext.register(to_dict(RecipeConfig()), options.config_dir)


@contextlib.contextmanager
def _process_state() -> Iterator[None]:
    """Hydra reads `sys.argv`, and hands exceptions on only when it is asked for a full error. Both are put back afterwards."""
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        sys.argv = argv
        del os.environ["HYDRA_FULL_ERROR"]
        if full is not None:
            os.environ["HYDRA_FULL_ERROR"] = full
