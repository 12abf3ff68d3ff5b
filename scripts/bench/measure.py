"""Two meters that know nothing of any engine: bytes in use by the C library's allocator, and bytes sent by the kernel's count.

Both look below the libraries, so that one rule holds for all contestants: a storage that is resized, a bucket made in C++, a tensor that
a thread of gloo frees and a message of a collective count like any other. (Torch's profiler counts memory per thread and misses what
others free.)
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TCP_INFO_BYTES_SENT = 200
"""Offset of `tcpi_bytes_sent`, u64, in Linux's `struct tcp_info` (since 4.19)."""


class _MallInfo2(ctypes.Structure):
    """glibc's `struct mallinfo2` (since 2.33)."""

    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]


class Census(TorchDispatchMode):
    """Bytes in use by malloc in this process above those at its beginning, looked at before and after every torch operator within."""

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self._begin_bytes = _bytes_in_use()
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._look()
        result = func(*args, **(kwargs or {}))
        self._look()
        return result

    def held_bytes(self) -> int:
        gc.collect()
        return _bytes_in_use() - self._begin_bytes

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, _bytes_in_use() - self._begin_bytes)


def memory_can_be_counted() -> bool:
    return _mallinfo2 is not None


def _load_mallinfo2() -> Callable[[], _MallInfo2] | None:
    try:
        found = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # another C library
        return None
    found.restype = _MallInfo2
    return found


_mallinfo2 = _load_mallinfo2()


def _bytes_in_use() -> int:
    info = _mallinfo2()
    return info.uordblks + info.hblkhd  # on heaps, and mapped one by one


def bytes_sent() -> int | None:
    """Bytes that this process has sent over the TCP sockets it holds now; None where the kernel does not tell (not Linux)."""
    if sys.platform != "linux":
        return None
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, TCP_INFO_BYTES_SENT)[0]
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return total


def machine() -> dict[str, str | int | float]:
    """What the numbers depend on; `load`: processes of others that compete for the cores, when nothing of ours runs yet."""
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        cpu = next((line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count() or 1,
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
