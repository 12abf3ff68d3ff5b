"""What a run's end means: from how each rank ended to the first cause, an exit status and the last words on the console.

The ranks of a run end almost together when one fails, so the order of their ends is not enough. A rank that was killed by a signal
or raised an error of its own is a cause; a rank that complains of a closed connection is an echo, and counts only when there is
nothing else. What ended because the supervisor ended it counts never. Among causes the earliest stands.

Unusual: pure functions of facts that the supervisor collected; no process is touched here.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from framework.train.failure import FailureReport, speaks_of_communication
from framework.train.run_dir import Finishing

TAIL_LINES = 30
TAIL_BYTES = 64 * 1024
STATUS_USER_MISTAKE = 2


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What the supervisor knows of one rank."""

    rank: int
    returncode: int | None
    """None while it runs; -N when signal N ended it."""
    last_seen_running: float
    """Seconds since the epoch; with polling, a rank ended at some time after this."""
    signals_sent: dict[int, float]
    """Signals that the supervisor sent it, and when."""
    report: FailureReport | None
    log: Path


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why one rank failed."""

    rank: int
    time: float
    is_echo: bool
    """It only noticed that another rank was gone or late."""
    is_user_mistake: bool
    summary: str
    """One line."""
    detail: str
    """Traceback or end of the log, several lines."""
    log: Path


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    status: int
    """Exit status: 0, 1 a failure, 2 a user's mistake, 130 Ctrl-C, 128 + N stopped by signal N (143: by one that only a rank got)."""
    message: str
    """What to show last; empty when all went well."""
    reason: str = ""
    """The same in one line."""
    signal: int | None = None
    """What asked the run to stop, also where it was done by then."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    failures: list[Failure]
    """The first cause first."""
    ranks: int
    all_succeeded: bool

    def outcome(self, stop_signal: signal.Signals | None, stuck: dict[int, Path], finishing: Finishing | None, killed: bool) -> Outcome:
        """`stop_signal`: what the user stopped the run with, `killed`: with a second one; `stuck`: ranks that had to be killed."""
        if self.failures:
            return self._failed(self.failures[0], stuck)
        if stop_signal is None and not (finishing is not None and finishing.stopped):
            return Outcome(status=0, message="")
        if finishing is not None and not finishing.stopped and self.all_succeeded:
            return Outcome(status=0, message=f"{stop_signal.name} came after the last step: the run is done", signal=stop_signal)
        message = "stopped by " + ("a signal to one of its ranks" if stop_signal is None else stop_signal.name)
        if finishing is not None:
            message += f" after step {finishing.step}"
        if stuck:
            message += f"; rank {_listed(stuck)} did not end in time and had to be killed"
        elif killed:
            message += "; killed by a second signal before everything was saved"
        return Outcome(status=128 + (stop_signal or signal.SIGTERM), message=message, reason=message, signal=stop_signal)

    def _failed(self, first: Failure, stuck: dict[int, Path]) -> Outcome:
        if first.is_user_mistake:
            return Outcome(status=STATUS_USER_MISTAKE, message=first.detail, reason=first.summary)
        lines = [first.detail.rstrip()] if first.detail else []
        if first.is_echo:
            for rank, log in stuck.items():
                lines.append(f"{log_tail(log)}\nrank {rank} hung there and had to be killed; log: {log}")
        reason = f"rank {first.rank} of {self.ranks} failed: {first.summary}"
        lines.append(f"error: {reason}")
        lines.append(f"log:   {first.log}")
        return Outcome(status=1, message="\n".join(lines), reason=reason)


def judge(endings: list[Ending], *, stop_asked: bool) -> Verdict:
    """The failures among `endings`, first cause first. After the user asked to stop, echoes and silent exits are no failures."""
    failures = [failure for ending in endings if (failure := _failure(ending, stop_asked)) is not None]
    return Verdict(
        failures=sorted(failures, key=lambda failure: (failure.is_echo, failure.time, failure.rank)),
        ranks=len(endings),
        all_succeeded=all(ending.returncode == 0 for ending in endings),
    )


def _failure(ending: Ending, stop_asked: bool) -> Failure | None:
    ended_by_us = min(ending.signals_sent.values(), default=float("inf"))
    if ending.report is not None:
        return _reported(ending, ending.report, after_our_signal=ending.report.time > ended_by_us, stop_asked=stop_asked)
    if ending.returncode in (None, 0) or -ending.returncode in ending.signals_sent:
        return None
    if ending.returncode < 0:
        return _killed(ending, signal.Signals(-ending.returncode))
    if ending.last_seen_running > ended_by_us:
        return None
    return Failure(
        rank=ending.rank,
        time=ending.last_seen_running,
        is_echo=False,
        is_user_mistake=ending.returncode == STATUS_USER_MISTAKE,
        summary=f"exit status {ending.returncode}",
        detail=_unseen_tail(ending),
        log=ending.log,
    )


def _reported(ending: Ending, report: FailureReport, *, after_our_signal: bool, stop_asked: bool) -> Failure | None:
    is_echo = report.kind == "communication"
    if after_our_signal and (is_echo or not stop_asked):
        return None  # it failed because it was told to end; but an error while saving after Ctrl-C is the user's business
    return Failure(
        rank=ending.rank,
        time=report.time,
        is_echo=is_echo,
        is_user_mistake=report.kind == "user",
        summary=report.summary,
        detail=report.message if report.kind == "user" else report.traceback,
        log=ending.log,
    )


def _killed(ending: Ending, number: signal.Signals) -> Failure:
    summary = f"killed by {number.name} (signal {int(number)})"
    if number == signal.SIGKILL:
        summary += ", often because the machine ran out of memory"
    return Failure(
        rank=ending.rank,
        time=ending.last_seen_running,
        is_echo=number == signal.SIGABRT and speaks_of_communication(log_tail(ending.log)),  # NCCL's watchdog aborts the ranks that wait
        is_user_mistake=False,
        summary=summary,
        detail=_unseen_tail(ending),
        log=ending.log,
    )


def _unseen_tail(ending: Ending) -> str:
    """The end of the rank's log, unless it is what the console shows anyway."""
    return log_tail(ending.log) if ending.rank != 0 else ""


def log_tail(path: Path) -> str:
    """The last lines of a log."""
    with open(path, "rb") as log:
        log.seek(0, 2)
        log.seek(max(0, log.tell() - TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
