"""A rank that torchrun, srun or mpirun has started: agrees with the others on one run and becomes a worker.

Each rank has composed the command line by itself. Rank 0 made the run directory; it hands the path and its resolved recipe to the others
through the store on which they will build their process group in a moment. That needs no shared file system: on a machine that does not
see rank 0's directory, one of the same path is made for the logs of the ranks there.

Unusual: ranks other than 0 are quiet. Their output goes to RUN/logs/rank_N.log; on the console they show an error of their own, but not the
echo of another rank's.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from framework.config.compose import Composed
from framework.config.errors import Problem, UserError
from framework.ranks import Place
from framework.train.run_dir import CONFIG, LOGS, config_yaml, write_run_dir

AGREE_SECONDS = 600
PR_SET_PDEATHSIG = 1
KEY = "framework/run"


def join_run(job: Composed, place: Place) -> Path:
    """The run directory of all ranks, which exists on this machine and holds the configuration. Sets torchrun's variables."""
    os.environ.update(place.variables())
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # torchrun itself was killed: nobody else would end this rank
    if place.rank == 0:
        return _offer(job, place)
    return _accept(place)


def _offer(job: Composed, place: Place) -> Path:
    try:
        write_run_dir(job.run_dir, job.recipe, overrides=job.overrides, command=sys.argv, sweep_job=job.sweep_job)
    except UserError as error:
        _publish(place, {"error": str(error)})
        raise
    _publish(place, {"run_dir": str(job.run_dir), "config": config_yaml(job.recipe)})
    return job.run_dir


def _accept(place: Place) -> Path:
    offer = json.loads(_store(place).get(KEY))
    if "error" in offer:
        raise SystemExit(2)  # rank 0 says what is wrong
    run_dir = Path(offer["run_dir"])
    try:
        (run_dir / LOGS).mkdir(parents=True, exist_ok=True)
        if not (run_dir / CONFIG).exists():
            (run_dir / CONFIG).write_text(offer["config"])
    except OSError as error:
        expected = "the run directory of rank 0, or room for one of the same path"
        raise UserError(Problem(path=str(run_dir), got=str(error), expected=expected, fix="runs_dir=FOLDER")) from error
    return run_dir


def _publish(place: Place, offer: dict[str, str]) -> None:
    if place.world_size > 1:
        _store(place).set(KEY, json.dumps(offer))


_stores = []  # rank 0's store answers for as long as it is alive


def _store(place: Place):
    from torch.distributed import rendezvous

    store, _, _ = next(iter(rendezvous("env://", rank=place.rank, world_size=place.world_size, timeout=timedelta(seconds=AGREE_SECONDS))))
    _stores.append(store)
    return store


def quiet_console(run_dir: Path, rank: int) -> TextIO:
    """Send stdout and stderr of ranks other than 0, also those of native code, into their log; returns the console for last words."""
    console = os.fdopen(os.dup(2), "w", buffering=1)
    if rank != 0:
        log = os.open(run_dir / LOGS / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    return console
