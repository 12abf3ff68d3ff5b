"""Rank 0 on the console and in its log at once.

Rank 0 writes into a pipe, or into a terminal of its own (a pty) when the supervisor's console is one, so that progress lines go on
rewriting themselves. A thread copies every byte to the console as it comes and every finished line to the log.

Unusual: the log gets a rewritten line only in its last form, and a console that goes away (`| head`, a closed window) does not end
the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import sys
import termios
import threading
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 64 * 1024
CLEAR_TO_END_OF_LINE = b"\033[K"


class Console:
    """`rank_end` is the file descriptor that rank 0 gets as stdout and stderr; `start` once the rank has it."""

    def __init__(self, log: Path) -> None:
        self._log = open(log, "wb")  # closed by finish()
        if sys.stdout.isatty():
            self._our_end, self.rank_end = pty.openpty()
            _be_like_our_terminal(self.rank_end)
        else:
            self._our_end, self.rank_end = os.pipe()
        self._thread = threading.Thread(target=self._copy, name="console", daemon=True)

    def start(self) -> None:
        os.close(self.rank_end)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the last bytes; every holder of `rank_end` has ended."""
        if self._thread.ident is None:  # nothing was started
            os.close(self.rank_end)
        else:
            self._thread.join()
        os.close(self._our_end)
        self._log.close()

    def _copy(self) -> None:
        console: BinaryIO | None = sys.stdout.buffer
        log: BinaryIO | None = self._log
        unfinished = b""
        while chunk := self._read():
            if console is not None and (console := _written(console, chunk)) is None:
                _send_nowhere(sys.stdout.fileno())  # else Python fails at exit for what is still in its buffer
            *lines, unfinished = (unfinished + chunk).split(b"\n")
            if lines:
                log = _written(log, b"".join(_last_form(line) + b"\n" for line in lines))
        if unfinished:
            _written(log, _last_form(unfinished) + b"\n")

    def _read(self) -> bytes:
        try:
            return os.read(self._our_end, CHUNK_BYTES)
        except OSError:  # a pty whose other end is closed says EIO where a pipe says end of file
            return b""


def _written(target: BinaryIO | None, data: bytes) -> BinaryIO | None:
    """`target`, or None from the moment it cannot be written any more: output is lost then, the run is not."""
    if target is None:
        return None
    try:
        target.write(data)
        target.flush()
        return target
    except OSError:
        return None


def _send_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _last_form(line: bytes) -> bytes:
    """What a terminal would show of a line that was rewritten with carriage returns."""
    return line.rstrip(b"\r").split(b"\r")[-1].replace(CLEAR_TO_END_OF_LINE, b"")


def _be_like_our_terminal(terminal: int) -> None:
    """Same size as the console; bytes go through as they are (the console translates line ends itself)."""
    attributes = termios.tcgetattr(terminal)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
