"""`train`: a command line becomes a run.

    main     compose and check the recipe (framework/config), once or once per job of a sweep
    start    write the run directory, start the ranks and watch them; under torchrun, Slurm or MPI: be one of the ranks

Unusual: everything down to `start` runs without torch. The ranks are processes of their own (`framework/worker.py`).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from framework.checkpoint.folder import checkpoints, is_done, newest_run, resolve, run_of, step_of, what_is_missing
from framework.cli.check import check_everything
from framework.cli.external import join_run, quiet_console
from framework.cli.launch import launch
from framework.config.compose import Composed, hydra_main
from framework.progress import busy, loading_libraries
from framework.ranks import Place, launched, local_ranks
from framework.train.failure import read_failure
from framework.train.run_dir import SUMMARY, TOKENS, read_config, write_run_dir, write_summary
from framework.worker import working

RANK_COMMAND = (sys.executable, "-m", "framework.worker")
STATUS_STOPPED = 128


def main() -> None:
    """The command `train.py`."""
    sys.exit(hydra_main(start, check=check_everything))


def start(job: Composed) -> int:
    """Run one job on the ranks of this machine, or as one rank of a launcher's; the exit status."""
    place = launched(os.environ)
    return supervise(job) if place is None else work(job, place)


def supervise(job: Composed, rank_command: Sequence[str] = RANK_COMMAND) -> int:
    """Write the run directory, start this machine's ranks as `rank_command CONFIG RUN_DIR`, and say how they ended."""
    job = with_checkpoint(job)
    config = write_run_dir(job.run_dir, job.recipe, overrides=job.overrides, command=sys.argv, sweep_job=job.sweep_job)
    ranks = local_ranks(job.recipe.trainer)
    print(f"run directory: {job.run_dir}" + (f" ({ranks} ranks)" if ranks > 1 else ""), flush=True)
    outcome = launch(
        [*rank_command, str(config), str(job.run_dir)],
        ranks=ranks,
        run_dir=job.run_dir,
        stop_grace_seconds=job.recipe.trainer.stop_grace_seconds,
    )
    shutil.rmtree(job.run_dir / TOKENS, ignore_errors=True)
    if 0 < outcome.status < STATUS_STOPPED and checkpoints(job.run_dir):
        print(f"go on:   the same command with resume={job.run_dir}", file=sys.stderr, flush=True)
    if outcome.message:
        print(outcome.message, file=sys.stderr, flush=True)
    if outcome.status and not (job.run_dir / SUMMARY).exists():  # no rank came to write it
        ended = "stopped" if outcome.status > STATUS_STOPPED else "failed"
        write_summary(job.run_dir, ended=ended, status=outcome.status, reason=outcome.reason)
    if outcome.status > STATUS_STOPPED:
        raise SystemExit(outcome.status)  # what stops a run stops the sweep
    if outcome.signal is not None and job.sweep_job is not None:
        raise SystemExit(STATUS_STOPPED + outcome.signal)
    return outcome.status


def work(job: Composed, place: Place) -> int:
    """Be the rank at `place` of a run that a launcher has started."""
    if place.rank == 0:
        job = with_checkpoint(job)
    with busy("meeting the other ranks", show=place.rank == 0):
        run_dir = join_run(job, place)
    try:
        with working(run_dir, console=quiet_console(run_dir, place.rank)):
            with loading_libraries(show=place.rank == 0):
                from framework.cli.fit import run  # torch

            run(read_config(run_dir), run_dir)
    except SystemExit as end:
        if place.local_rank == 0:
            shutil.rmtree(run_dir / TOKENS, ignore_errors=True)
        if place.rank == 0 and not (run_dir / SUMMARY).exists():
            _summarise_failure(run_dir, place.world_size, end.code)
        raise
    return 0


def with_checkpoint(job: Composed) -> Composed:
    """The job with the checkpoint that `resume` means by its full path; says so before anything else."""
    recipe = job.recipe
    if recipe.resume == "none":
        return job
    folder = resolve(recipe.resume, Path(recipe.runs_dir), recipe.name)
    if folder is not None:
        print(f"resuming from {folder}", flush=True)
        run = run_of(folder)
        for newer in [] if run is None else checkpoints(run):
            if step_of(newer) > step_of(folder) and (missing := what_is_missing(newer)):
                print(f"not from {newer}: {missing}", flush=True)
    elif (done := newest_run(Path(recipe.runs_dir), recipe.name)) is not None and is_done(done):
        print(f"resume=auto: {done} is done; a new start (to go on with it: resume={done})", flush=True)
    else:
        print(f"resume=auto: {Path(recipe.runs_dir) / recipe.name} has no checkpoint; a new start", flush=True)
    return replace(job, recipe=replace(recipe, resume="none" if folder is None else str(folder)))


def _summarise_failure(run_dir: Path, world_size: int, status: int) -> None:
    """What the supervisor writes where there is one: the first error that is more than an echo of another rank's end."""
    reports = [report for rank in range(world_size) if (report := read_failure(run_dir, rank)) is not None]
    first = min(reports, key=lambda report: (report.kind == "communication", report.time), default=None)
    ended = "stopped" if status > STATUS_STOPPED else "failed"
    reason = "" if first is None else f"rank {first.rank} of {world_size} failed: {first.summary}"
    write_summary(run_dir, ended=ended, status=status, reason=reason)
