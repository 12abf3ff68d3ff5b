"""Progress of whatever takes longer than two seconds: one rewritten line on a terminal, a line now and then in a log file.

    for row in progress(rows, "tokenising", unit="rows"): ...      tokenising: 41% 4,100/10,000 rows, 3 s, 1,367 rows/s
    with busy("reading the tokenizer"): ...                                   reading the tokenizer: 3 s

Unusual: a thread tells, so that a first item that takes minutes is not silent either.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
QUIET_SECONDS = 2.0
TERMINAL_LINE_SECONDS = 0.2
LOG_LINE_SECONDS = 10.0


def progress(items: Iterable[T], what: str, total: int | None = None, unit: str = "items", show: bool = True) -> Generator[T]:
    """Yield `items`; once `QUIET_SECONDS` have passed, say on stderr how many of `total` are done and how fast.

    `show=False` for the ranks that should stay silent.
    """
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type]
    count = 0

    def line(seconds: float) -> str:
        share = f"{100 * count / total:3.0f}% " if total else ""
        of = f"{count:,}/{total:,}" if total else f"{count:,}"
        return f"{what}: {share}{of} {unit}, {seconds:.0f} s, {count / max(seconds, 1e-9):,.0f} {unit}/s"

    with _telling(line, show):
        for item in items:
            yield item
            count += 1


@contextmanager
def busy(what: str, show: bool = True) -> Iterator[None]:
    """Around work that cannot be counted; once `QUIET_SECONDS` have passed, say on stderr for how long it has gone on."""
    with _telling(lambda seconds: f"{what}: {seconds:.0f} s", show):
        yield


@contextmanager
def loading_libraries(show: bool = True) -> Iterator[None]:
    """Around the first import of torch and what builds on it.

    The garbage collector waits meanwhile and leaves alone what was imported: looking at a million objects that never go, again and again,
    would cost two seconds here and two more when the process ends.
    """
    gc.disable()
    try:
        with busy("loading PyTorch and other libraries", show):
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _telling(line: Callable[[float], str], show: bool) -> Iterator[None]:
    """Write `line(seconds)` now and then, and once more at the end where it was written before."""
    if not show:
        yield
        return
    began, done, shown = time.monotonic(), threading.Event(), False
    start, end, pause = ("\r\033[K", "", TERMINAL_LINE_SECONDS) if sys.stderr.isatty() else ("", "\n", LOG_LINE_SECONDS)

    def tell(end: str) -> None:
        sys.stderr.write(f"{start}{line(time.monotonic() - began)}{end}")
        sys.stderr.flush()

    def keep_telling() -> None:
        nonlocal shown
        wait = QUIET_SECONDS
        while not done.wait(wait):
            shown, wait = True, pause
            tell(end)

    thread = threading.Thread(target=keep_telling, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if shown:
            tell("\n")
