"""Progress lines: nothing for what is quick, and a line in time for what is slow, also before its first item is there."""

from __future__ import annotations

import time

import pytest

import framework.progress
from framework.progress import busy, progress


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(framework.progress, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(framework.progress, "LOG_LINE_SECONDS", 0.1)


def slowly(items, seconds: float):
    for item in items:
        time.sleep(seconds)
        yield item


def test_quick_work_is_silent(capsys):
    assert list(progress(range(100), "counting")) == list(range(100))
    with busy("thinking"):
        pass
    assert capsys.readouterr().err == ""


def test_slow_items_are_counted_and_the_last_line_is_the_whole(capsys):
    assert list(progress(slowly("abcd", 0.1), "reading", total=4, unit="rows")) == list("abcd")
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("reading: 100% 4/4 rows, 0 s, ")
    assert len(lines) >= 3


def test_a_slow_first_item_is_announced(capsys):
    for _ in progress(slowly("a", 0.3), "tokenising", unit="rows"):
        assert capsys.readouterr().err.startswith("tokenising: 0 rows, 0 s")


def test_work_without_items_tells_its_time_and_what_fails_is_not_swallowed(capsys):
    with pytest.raises(ValueError, match="no"), busy("thinking"):
        time.sleep(0.25)
        raise ValueError("no")
    assert capsys.readouterr().err.startswith("thinking: 0 s\n")


def test_other_ranks_are_silent_and_an_abandoned_loop_stops_telling(capsys):
    for _ in progress(slowly("ab", 0.25), "reading", show=False):
        break
    assert capsys.readouterr().err == ""
    for _ in progress(slowly("ab", 0.25), "reading"):
        break
    capsys.readouterr()
    time.sleep(0.25)
    assert capsys.readouterr().err == ""
