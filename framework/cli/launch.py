"""The supervisor of a run's ranks on this machine: starts them, watches them, ends them, and says what went wrong first.

    outcome = launch([sys.executable, "-m", "framework.worker", config, run_dir], ranks=4, run_dir=run_dir)

Every rank gets the environment variables of torchrun. Rank 0 is on the console and in RUN/logs/rank_0.log, the others are in
RUN/logs/rank_N.log. The first failure ends all ranks; the outcome's message ends with the error of the rank that failed first. The
first Ctrl-C (or SIGTERM, SIGHUP) asks the ranks to stop after their current step and save, the second kills them at once.

Unusual: no torch here, so the parent stays light and a sweep's jobs leave nothing behind in it. Ranks are leaders of their own
sessions: a terminal's Ctrl-C reaches the supervisor only, which passes it on as SIGTERM. What the ranks started themselves dies with
them, also when the supervisor is killed with SIGKILL (`watchdog.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from framework.cli.console import Console
from framework.cli.rendezvous import rank_environment, reserved_port
from framework.cli.verdict import Ending, Outcome, Verdict, judge
from framework.cli.watchdog import JOB_VARIABLE, Watchdog, end_job
from framework.config.errors import Problem, UserError
from framework.train.failure import FailureReport, read_failure, report_path
from framework.train.run_dir import finishing_path, read_finishing, saving_path

POLL_SECONDS = 0.05
SETTLE_SECONDS = 1.0
"""After an echo of another rank's end, wait this long for that rank itself to show up."""
SECOND_SIGNAL_SECONDS = 1.0
"""Slurm, a terminal and a wrapper script may each deliver one request; within this time it is the same one."""
STACK_SECONDS = 0.3
"""Time for a stuck rank to write its stack into its log."""
PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(
    command: Sequence[str],
    *,
    ranks: int,
    run_dir: Path,
    stop_grace_seconds: float = 25.0,
    kill_grace_seconds: float = 10.0,
) -> Outcome:
    """Run `command` as `ranks` processes until all have ended, and return the exit status with what to tell the user.

    Args:
        command: program and arguments of a rank, the same for all.
        run_dir: holds `logs/`.
        stop_grace_seconds: after a request to stop, ranks that have not finished their step by then are killed. Ranks that
            write `logs/finishing.json` in time, or are saving then (`logs/saving`), may take as long as they need for it.
        kill_grace_seconds: after a failure, time for the other ranks to end by themselves.
    """
    supervisor = _Supervisor(run_dir=Path(run_dir), stop_grace_seconds=stop_grace_seconds, kill_grace_seconds=kill_grace_seconds)
    with reserved_port() as port, _signals_collected() as received:
        supervisor.received = received
        try:
            supervisor.start(command, ranks, port)
            supervisor.watch()
        finally:
            supervisor.clean_up()
    return supervisor.outcome()


@dataclass(kw_only=True)
class _Rank:
    rank: int
    process: subprocess.Popen
    log: Path
    seen_running: float
    ended: float | None = None
    sent: dict[int, float] = field(default_factory=dict)
    """Signals of ours and when they were first sent."""

    def send(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.sent.setdefault(number, time.time())
            self.process.send_signal(number)


@dataclass(kw_only=True)
class _Supervisor:
    run_dir: Path
    stop_grace_seconds: float
    kill_grace_seconds: float
    received: list[signal.Signals] = field(default_factory=list)
    job: str = field(default_factory=lambda: uuid.uuid4().hex)
    ranks: list[_Rank] = field(default_factory=list)
    console: Console | None = None
    watchdog: Watchdog | None = None

    stop_signal: signal.Signals | None = None
    """What the user asked to stop with."""
    stop_asked: float = 0.0
    first_failure: float | None = None
    ending: bool = False
    """The other ranks were told to end because of a failure."""
    deadline: float | None = None
    stuck: list[int] = field(default_factory=list)
    """Ranks that had to be killed."""
    killed: bool = False
    """A second signal killed ranks at work."""

    # ---- start
    def start(self, command: Sequence[str], ranks: int, port: int) -> None:
        logs = self.run_dir / "logs"
        with contextlib.ExitStack() as stack:
            try:
                logs.mkdir(parents=True, exist_ok=True)
                for left_over in (finishing_path(self.run_dir), saving_path(self.run_dir)):
                    left_over.unlink(missing_ok=True)
                for rank in range(ranks):
                    report_path(self.run_dir, rank).unlink(missing_ok=True)
                files = [stack.enter_context(open(logs / f"rank_{rank}.log", "wb")) for rank in range(ranks)]
            except OSError as error:
                raise UserError(
                    Problem(path=str(logs), got=str(error), expected="a folder that can be written", fix="runs_dir=FOLDER")
                ) from error
            self.watchdog = Watchdog(self.job)
            self.console = Console(logs / "rank_0.log")
            for rank, file in enumerate(files):
                output = self.console.rank_end if rank == 0 else file.fileno()
                process = subprocess.Popen(
                    command,
                    env=rank_environment(os.environ, rank, ranks, port) | {JOB_VARIABLE: self.job},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,  # safe: no thread of ours runs yet
                )
                self.ranks.append(_Rank(rank=rank, process=process, log=Path(file.name), seen_running=time.time()))
                self.watchdog.guard(process.pid)
        self.console.start()

    # ---- watch
    def watch(self) -> None:
        while any(rank.ended is None for rank in self.ranks):
            while self.received:
                self._on_signal(self.received.pop(0))
            self._note_ends()
            self._on_failure()
            self._on_deadline()
            time.sleep(POLL_SECONDS)

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR1:  # a scheduler's early warning: the ranks know what to do, nothing is timed here
            return self._send_all(number)
        if self.stop_signal is None:
            self.stop_signal, self.stop_asked = number, time.time()
            self._say(f"\n{number.name}: stopping after the current step and saving. Once more to stop at once.")
            if self.first_failure is None:
                self._send_all(signal.SIGTERM)
                self.deadline = time.monotonic() + self.stop_grace_seconds
        elif time.time() - self.stop_asked > SECOND_SIGNAL_SECONDS:
            self.killed = any(rank.process.poll() is None for rank in self.ranks)
            self._send_all(signal.SIGKILL)

    def _note_ends(self) -> None:
        for rank in self.ranks:
            if rank.ended is None:
                if rank.process.poll() is None:
                    rank.seen_running = time.time()
                else:
                    rank.ended = time.time()

    def _on_failure(self) -> None:
        """Give the cause a moment to show when only its echo was seen, then ask the other ranks to end."""
        if self.ending:
            return
        failures = self._verdict().failures
        if not failures:
            return
        if self.first_failure is None:
            self.first_failure = time.monotonic()
        if failures[0].is_echo and time.monotonic() < self.first_failure + SETTLE_SECONDS:
            return
        self.ending = True
        if any(rank.ended is None for rank in self.ranks) and not failures[0].is_user_mistake:
            self._say(f"\nrank {failures[0].rank} failed ({failures[0].summary}); ending the other ranks")
        self._send_all(signal.SIGTERM)
        self.deadline = time.monotonic() + self.kill_grace_seconds

    def _on_deadline(self) -> None:
        if self.deadline is None or time.monotonic() < self.deadline:
            return
        if not self.ending and saving_path(self.run_dir).exists():
            self.deadline = time.monotonic() + self.stop_grace_seconds  # for the step that follows
            return
        finishing = read_finishing(self.run_dir)
        if not self.ending and finishing is not None:  # all ranks have made their last step and are saving: let them
            self._say(f"step {finishing.step} was the last one; still saving. Ctrl-C to give that up.")
            self.deadline = None
            return
        self.stuck = [rank.rank for rank in self.ranks if rank.ended is None]
        self._send_all(signal.SIGUSR2)  # workers write where they hang into their log (faulthandler)
        time.sleep(STACK_SECONDS)
        self._send_all(signal.SIGKILL)
        self.deadline = None

    def _send_all(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            rank.send(number)

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    # ---- finish
    def clean_up(self) -> None:
        """Nothing of the job is left after this, whatever happened before."""
        end_job(self.job, [rank.process.pid for rank in self.ranks])
        for rank in self.ranks:
            rank.process.wait()
        if self.console is not None:
            self.console.finish()
        if self.watchdog is not None:
            self.watchdog.dismiss()

    def outcome(self) -> Outcome:
        verdict = self._verdict()
        report = self._report(0)
        if report is not None:  # rank 0 leaves the console to our last message: its log still gets its own error
            with contextlib.suppress(OSError), open(self.ranks[0].log, "a") as log:  # a full disk must not hide the failure itself
                log.write(report.message + "\n" if report.kind == "user" else report.traceback)
        stuck = {rank: self.ranks[rank].log for rank in self.stuck}
        return verdict.outcome(self.stop_signal, stuck, finishing=read_finishing(self.run_dir), killed=self.killed)

    def _verdict(self) -> Verdict:
        endings = [
            Ending(
                rank=rank.rank,
                returncode=rank.process.returncode if rank.ended is not None else None,
                last_seen_running=rank.seen_running,
                signals_sent=rank.sent,
                report=self._report(rank.rank),
                log=rank.log,
            )
            for rank in self.ranks
        ]
        return judge(endings, stop_asked=self.stop_signal is not None)

    def _report(self, rank: int) -> FailureReport | None:
        return read_failure(self.run_dir, rank)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


_LIBC = ctypes.CDLL(None)


@contextlib.contextmanager
def _signals_collected() -> Iterator[list[signal.Signals]]:
    """Signals to this process land in a list instead of interrupting it; the previous handlers come back afterwards."""
    received: list[signal.Signals] = []
    previous = {}
    for number in (*STOP_SIGNALS, signal.SIGUSR1):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores that one on purpose
            previous[number] = signal.signal(number, lambda n, _frame: received.append(signal.Signals(n)))
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
