"""Which rank failed first: each rank leaves a report of its exception, written before anything is torn down.

When one rank raises, the others fail too, a few milliseconds later and with a message about a closed connection. The order in which
processes end says little (a teardown may take seconds), so a rank writes `RUN/logs/rank_N.error.json` at once, and `is_communication`
tells errors that only echo another rank's end. The supervisor (`cli/launch.py`) reads the reports and shows the first cause last.

Unusual: no torch here, because the supervisor has none; torch's errors are recognised by name and text.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from framework.config.errors import UserError

# Lower case; gloo and NCCL raise a plain RuntimeError or one of torch's Dist*Error with these words in it.
COMMUNICATION_WORDS = (
    "gloo/",
    "nccl",
    "processgroup",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket timeout",
    "tcpstore",
    "timed out waiting",
    "wait timeout",
    "monitoredbarrier",
)


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """One rank's exception."""

    rank: int
    time: float
    """Seconds since the epoch."""
    kind: Literal["user", "error", "communication"]
    """A mistake of the user's; an error of its own; an echo of another rank's end."""
    type: str
    message: str
    traceback: str
    is_written: bool = True
    """False: the disk did not take it, and the rank itself must say what happened."""

    @property
    def summary(self) -> str:
        """One line."""
        first_line = self.message.strip().split("\n")[0]
        return f"{self.type}: {first_line}" if first_line else self.type


def report_failure(run_dir: Path, rank: int, error: BaseException) -> FailureReport:
    """Write this rank's report and return it. The first one stands: what is raised later, in tearing down, changes nothing."""
    report = FailureReport(
        rank=rank,
        time=time.time(),
        kind=_kind(error),
        type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )
    path = report_path(run_dir, rank)
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps(asdict(report), indent=1))
            os.replace(partial, path)  # the supervisor never reads half a report
        except OSError:
            return replace(report, is_written=False)
    return report


def read_failure(run_dir: Path, rank: int) -> FailureReport | None:
    """The report of `rank`, if it left one."""
    try:
        return FailureReport(**json.loads(report_path(run_dir, rank).read_text()))
    except FileNotFoundError:
        return None


def report_path(run_dir: Path, rank: int) -> Path:
    return Path(run_dir) / "logs" / f"rank_{rank}.error.json"


def _kind(error: BaseException) -> Literal["user", "error", "communication"]:
    if isinstance(error, UserError):
        return "user"
    return "communication" if is_communication(error) else "error"


def is_communication(error: BaseException | None) -> bool:
    """Whether `error`, or what it was raised from, says that another rank is gone or late."""
    while error is not None:
        if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError", "ConnectionResetError"):
            return True
        if isinstance(error, RuntimeError) and speaks_of_communication(str(error)):
            return True
        error = error.__cause__
    return False


def speaks_of_communication(text: str) -> bool:
    return any(word in text.lower() for word in COMMUNICATION_WORDS)
