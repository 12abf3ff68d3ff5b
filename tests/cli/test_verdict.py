"""Which failure counts as the first cause, from facts alone: orders of events that real processes produce only now and then."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from framework.cli.verdict import Ending, judge
from framework.train.failure import FailureReport


@pytest.fixture
def ending(tmp_path):
    def make(rank: int, returncode: int | None, at: float, *, kind: str = "", sent: dict[int, float] | None = None, log: str = ""):
        path: Path = tmp_path / f"rank_{rank}.log"
        path.write_text(log)
        report = None
        if kind:
            report = FailureReport(rank=rank, time=at, kind=kind, type="RuntimeError", message=f"of rank {rank}", traceback="")
        return Ending(rank=rank, returncode=returncode, last_seen_running=at, signals_sent=sent or {}, report=report, log=path)

    return make


def causes(*endings: Ending, stop_asked: bool = False) -> list[int]:
    """Ranks that failed, first cause first."""
    return [failure.rank for failure in judge(list(endings), stop_asked=stop_asked).failures]


def test_an_error_of_its_own_comes_before_an_earlier_echo(ending):
    assert causes(ending(0, 1, 10.0, kind="communication"), ending(1, 1, 10.5, kind="error")) == [1, 0]


def test_death_by_a_signal_comes_before_an_earlier_echo(ending):
    assert causes(ending(0, 1, 10.0, kind="communication"), ending(1, -signal.SIGKILL, 10.5)) == [1, 0]


def test_of_two_causes_the_earlier_counts(ending):
    assert causes(ending(0, 1, 10.5, kind="error"), ending(1, 1, 10.0, kind="user")) == [1, 0]


def test_an_abort_of_nccls_watchdog_is_an_echo(ending):
    abort = ending(0, -signal.SIGABRT, 10.0, log="[rank0]: ProcessGroupNCCL watchdog caught collective operation timeout")
    assert causes(abort, ending(1, -signal.SIGSEGV, 10.5)) == [1, 0]
    assert causes(ending(0, -signal.SIGABRT, 10.0, log="free(): invalid pointer"), ending(1, 1, 10.5, kind="error")) == [0, 1]


def test_what_the_supervisor_did_is_no_failure(ending):
    sent = {signal.SIGTERM: 11.0, signal.SIGKILL: 21.0}
    first = ending(0, 1, 10.0, kind="communication")
    assert causes(first, ending(1, -signal.SIGKILL, 21.0, sent=sent)) == [0]
    assert causes(first, ending(1, 1, 12.0, kind="error", sent=sent)) == [0], "raised because it was told to end"
    assert causes(first, ending(1, 3, 12.0, sent=sent)) == [0]


def test_a_rank_that_reported_counts_before_it_has_ended(ending):
    assert causes(ending(0, None, 10.0), ending(1, None, 10.0, kind="error")) == [1]


def test_after_a_request_to_stop_only_errors_of_its_own_count(ending):
    sent = {signal.SIGTERM: 9.0}
    assert causes(ending(0, 1, 10.0, kind="communication", sent=sent), ending(1, -signal.SIGTERM, 9.0, sent=sent), stop_asked=True) == []
    assert causes(ending(0, 1, 10.0, kind="error", sent=sent), ending(1, 0, 10.0, sent=sent), stop_asked=True) == [0]
