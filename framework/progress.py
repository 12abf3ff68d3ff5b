"""Progress of whatever takes longer than two seconds: one rewritten line on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
QUIET_SECONDS = 2.0
LOG_LINE_SECONDS = 10.0


def progress(items: Iterable[T], what: str, total: int | None = None, unit: str = "items", show: bool = True) -> Iterator[T]:
    """Yield `items`; once `QUIET_SECONDS` have passed, say on stderr how many of `total` are done and how fast.

    `show=False` for the ranks that should stay silent.
    """
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type]
    terminal = sys.stderr.isatty()
    began = time.monotonic()
    shown_at, count, shown = began + QUIET_SECONDS, 0, False
    for item in items:
        yield item
        count += 1
        now = time.monotonic()
        if show and now >= shown_at:
            shown, shown_at = True, now + (0.2 if terminal else LOG_LINE_SECONDS)
            _show(what, count, total, unit, now - began, end="" if terminal else "\n")
    if shown:
        _show(what, count, total, unit, time.monotonic() - began, end="\n")


def _show(what: str, count: int, total: int | None, unit: str, seconds: float, end: str) -> None:
    share = f"{100 * count / total:3.0f}% " if total else ""
    of = f"{count:,}/{total:,}" if total else f"{count:,}"
    start = "\r\033[K" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{start}{what}: {share}{of} {unit}, {seconds:.0f} s, {count / max(seconds, 1e-9):,.0f} {unit}/s{end}")
    sys.stderr.flush()
