"""Two meters that know nothing of any engine: bytes of tensors by torch's allocator, and bytes sent by the kernel's count.

Both look below the libraries, so that one rule holds for all contestants: a storage that is resized, a bucket made in C++ and a message
of a collective inside gloo count like any other.
"""

from __future__ import annotations

import os
import platform
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

TCP_INFO_BYTES_SENT = 200
"""Offset of `tcpi_bytes_sent`, u64, in Linux's `struct tcp_info` (since 4.19)."""
WINDOW = "bench: measured steps"


@dataclass(frozen=True)
class TensorBytes:
    """CPU tensor memory of one process, in bytes, of all that was allocated since the census began."""

    resting: int
    """After the last step."""
    peak: int
    """The most within the measured steps; activations are part of it."""


def tensor_census(prepare: Callable[[], None], steps: Callable[[], None]) -> TensorBytes:
    """Run `prepare`, then `steps`, and count every allocation and release of torch's CPU allocator in both; `peak` is of `steps`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        prepare()
        with record_function(WINDOW):
            steps()
    events = profiler.profiler.kineto_results.events()
    window = next(event for event in events if event.name() == WINDOW)
    begin, end = window.start_ns(), window.start_ns() + window.duration_ns()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for when, nbytes in changes:
        if when > end:
            break
        held += nbytes
        if when >= begin:
            peak = max(peak, held)
    return TensorBytes(resting=held, peak=peak)


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
