"""The end of a job, even when its supervisor is gone: kills every process that belongs to it.

A rank may start processes of its own (tokenising workers, a dashboard's uploader), and some of those leave the rank's process
group. All of them inherit `FRAMEWORK_JOB`, so `end_job` finds them by that mark. The supervisor calls it when a run is over; run as
a script, this file is the small process that waits beside the supervisor and does the same when the supervisor dies.

Unusual: run by path with `python -I -S`, so it starts in about 15 ms and imports only the standard library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

JOB_VARIABLE = "FRAMEWORK_JOB"
DONE = b"done\n"
PASSES = 100
PASS_SECONDS = 0.02


class Watchdog:
    """Holds a pipe to a waiting copy of this file; when the pipe closes without `done`, that copy ends the job."""

    def __init__(self, job: str) -> None:
        command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), job]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True, cwd="/")

    def guard(self, pid: int) -> None:
        """Add a rank, the leader of its process group."""
        self._tell(f"{pid}\n".encode())

    def dismiss(self) -> None:
        """The job is over and cleaned up."""
        self._tell(DONE)
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: bytes) -> None:
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:  # someone killed the watchdog: the run itself goes on
            pass


def end_job(job: str, groups: list[int]) -> None:
    """SIGKILL the process groups of the ranks and whatever else carries the job's mark, until nothing is left."""
    for _ in range(PASSES):
        found = _marked(job)
        for group in groups:
            _kill(os.killpg, group)
        for pid in found:
            _kill(os.kill, pid)
        if not found:
            return
        time.sleep(PASS_SECONDS)


def _kill(kill, number: int) -> None:
    try:
        kill(number, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # gone meanwhile, or a number that is another user's by now
        pass


def _marked(job: str) -> list[int]:
    """Running processes with the job's mark in their environment (Linux; elsewhere the process groups have to do)."""
    mark = f"{JOB_VARIABLE}={job}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # ended while we looked, or not ours
            continue
    return found


def _wait_beside_supervisor(job: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = sys.stdin.buffer.readlines()  # returns when the supervisor closes the pipe or dies
    if DONE not in lines:
        end_job(job, [int(line) for line in lines])


if __name__ == "__main__":
    _wait_beside_supervisor(sys.argv[1])
