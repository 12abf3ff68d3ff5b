"""One rank of a run: `python -m framework.worker CONFIG_YAML RUN_DIR [train | eval]`, started by the supervisor (`cli/launch.py`).

`working` is the frame around a rank's work, whoever started it: library noise is turned down, and an exception is reported before the
process ends, so that the first cause can be told from its echoes (`train/failure.py`). Exit status: 0 done or stopped on request,
2 a user's mistake, 1 anything else.

Unusual: under the supervisor, rank 0 prints no traceback; the supervisor shows the first failure of all ranks as the last thing.
A rank that hangs while it ends after a failure writes its stack and exits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from framework.cli.verdict import STATUS_USER_MISTAKE
from framework.cli.watchdog import JOB_VARIABLE
from framework.progress import loading_libraries
from framework.train.failure import report_failure

EXIT_SECONDS = 10.0
"""A failed rank that has not ended by then (a process group that waits for the others) is cut short."""
TORCHRUNS_REPORT = "TORCHELASTIC_ERROR_FILE"
"""torchrun shows the earliest of these files of its ranks as the root cause, after everything else."""


def main() -> None:
    config_path, run_dir = map(Path, sys.argv[1:3])
    work = sys.argv[3] if len(sys.argv) > 3 else "train"
    with working(run_dir):
        with loading_libraries(show=int(os.environ["RANK"]) == 0):
            if work == "eval":
                from framework.cli.measure import measure as run
            else:
                from framework.cli.fit import run
            from framework.train.run_dir import read_config

        run(read_config(config_path), run_dir)


@contextlib.contextmanager
def working(run_dir: Path, console: TextIO | None = None) -> Iterator[None]:
    """Around everything that a rank does; exceptions become reports and exit statuses.

    `console`: where there is no supervisor, what this rank shows of its own failure goes there too.
    """
    rank = int(os.environ["RANK"])
    faulthandler.enable()
    if is_supervised():
        faulthandler.register(signal.SIGUSR2, all_threads=True)  # the supervisor asks a stuck rank where it is
    quiet_libraries()
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if not is_supervised():  # torchrun ends the ranks that are left: this one is ending, and has to say how
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report = report_failure(run_dir, rank, error)
        text = f"[rank {rank}] " + (str(error) if report.kind == "user" else traceback.format_exc())
        if rank != 0 or not report.is_written:
            print(text, file=sys.stderr, flush=True)  # into its log; of rank 0, the supervisor shows it
        if console is not None and (rank == 0 or report.kind != "communication"):
            print(text, file=console, flush=True)
        if TORCHRUNS_REPORT in os.environ and not is_supervised() and report.kind != "communication":
            message = report.message if report.kind == "user" else report.traceback
            Path(os.environ[TORCHRUNS_REPORT]).write_text(json.dumps({"message": message, "timestamp": int(report.time)}))
        faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)
        sys.exit(STATUS_USER_MISTAKE if report.kind == "user" else 1)


def is_supervised() -> bool:
    """Whether `cli/launch.py` started this process."""
    return JOB_VARIABLE in os.environ


def quiet_libraries() -> None:
    """Keep what libraries say about themselves off the console; their warnings about a run stay, once each."""
    for name in ADVISERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in LIBRARY_NOISE:
        warnings.filterwarnings("ignore", message=text)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else tokenizers warn whenever a process forks after using them


# The loggers that advice really comes from: Lightning puts the levels of their parents back when it is imported.
ADVISERS = ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero", "lightning_utilities.core.rank_zero")

# Warnings that do not apply here (regular expressions, matched at the start).
LIBRARY_NOISE = (
    r".*does not have many workers",
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated",
    r".*smaller than the logging interval",
    r".*srun` command is available on your system but is not used",
    r".*It is recommended to use `self.log\('val_loss'",  # it is the loss over all ranks already
    r".*anonymous setting has no effect",
    r"You defined a `validation_step` but have no `val_dataloader`",  # the plan says "validation none"
)


if __name__ == "__main__":
    main()
