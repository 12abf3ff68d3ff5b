"""Where the ranks of one machine meet: their environment variables (those of torchrun) and a free TCP port.

Unusual: the port is chosen before any rank listens on it. It lies below the range from which the system hands out ports by itself, so
that no connection made in the meantime takes it, and an abstract socket of its name keeps other supervisors off it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PORTS = 12_000
"""How many ports to choose from."""
TRIES = 200


def rank_environment(inherited: Mapping[str, str], rank: int, ranks: int, port: int) -> dict[str, str]:
    """`inherited` with the variables of `rank` of `ranks` on one machine, and the framework importable from anywhere."""
    checkout = str(Path(__file__).resolve().parents[2])
    defaults = {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks))}
    if "OMP_WAIT_POLICY" not in inherited:  # GNU OpenMP: threads wait awake for a short while only, and stand in nobody's way
        defaults["GOMP_SPINCOUNT"] = "10000"
    if sys.platform == "linux":
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would look up the machine's own name, which need not resolve
    return {
        **defaults,
        **inherited,
        "PYTHONPATH": os.pathsep.join(filter(None, [checkout, inherited.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody listens on and that no other supervisor gets while this context lasts."""
    highest = _lowest_automatic_port()
    candidates = range(max(1024, highest - PORTS), highest)
    for port in random.SystemRandom().sample(candidates, min(TRIES, len(candidates))):
        with contextlib.ExitStack() as stack:
            claim = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener = stack.enter_context(socket.socket())
            try:
                if sys.platform == "linux":
                    claim.bind(f"\0framework-port-{port}")
                listener.bind(("", port))
            except OSError:  # taken
                continue
            listener.close()
            yield port
            return
    raise OSError(f"{TRIES} TCP ports between {candidates.start} and {candidates.stop} were tried and none was free")


def _lowest_automatic_port() -> int:
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux
        return 32768
    return lowest if lowest > 2048 else 65536
