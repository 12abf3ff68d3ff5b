"""The cores of a rank: each of a machine's ranks computes on a share of its own, near its GPU where that is known. No torch.

Left to the system, the threads of several ranks wander, and away from the NUMA node on which they touched their memory first. `settle`
puts a rank's threads on its share: the cores that were given to all ranks, in equal parts along the NUMA nodes, with the hardware threads
of a core together.

Unusual: whoever has placed the ranks already is left alone. That is so where one of OMP_PROC_BIND, OMP_PLACES, GOMP_CPU_AFFINITY and
KMP_AFFINITY is set (OMP_PROC_BIND=false turns this off), where OMP_NUM_THREADS asks for more threads than a share has cores, and where a
launcher has bound its ranks to some of the machine's cores.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
PCI = Path("/sys/bus/pci/devices")
PLACED_BY_USER = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def settle(
    local_rank: int,
    local_ranks: int,
    *,
    inherited: bool,
    gpu_nodes: Sequence[int | None] = (),
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Put the threads of this process on the cores of its rank, and say for people where they are.

    inherited: this process's cores are those of all ranks, and not what a launcher has bound this one to. gpu_nodes: NUMA node of each
    local rank's GPU, if it is known (`gpu_node`).
    """
    if not hasattr(os, "sched_setaffinity"):
        return "chosen by the system"
    usable = os.sched_getaffinity(0)
    share = None
    if local_ranks > 1 and (inherited or len(usable) == os.cpu_count()) and not any(name in environment for name in PLACED_BY_USER):
        share = shares(ordered(usable), local_ranks, gpu_nodes=gpu_nodes, node_of=node_of_cores())
    if share is None or _wanted_threads(environment) > len(share[local_rank]):
        return _listed(usable)
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else [threading.get_native_id()]:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), share[local_rank])
    return f"{_listed(share[local_rank])} of {_listed(usable)}"


def shares(
    cores: Sequence[int], ranks: int, *, gpu_nodes: Sequence[int | None] = (), node_of: Mapping[int, int] | None = None
) -> list[list[int]] | None:
    """The cores of each rank: of its GPU's node if all nodes are known and have enough, else equal parts in the given order.

    None: fewer cores than ranks.
    """
    if len(cores) < ranks:
        return None
    equal = [_part(cores, rank, ranks) for rank in range(ranks)]
    if node_of is None or len(gpu_nodes) != ranks or None in gpu_nodes:
        return equal
    near: list[list[int]] = []
    for rank, node in enumerate(gpu_nodes):
        there, neighbours = [core for core in cores if node_of.get(core) == node], gpu_nodes.count(node)
        if len(there) < neighbours:
            return equal
        near.append(_part(there, gpu_nodes[:rank].count(node), neighbours))
    return near


def _part(cores: Sequence[int], index: int, count: int) -> list[int]:
    return list(cores[len(cores) * index // count : len(cores) * (index + 1) // count])


def ordered(cores: set[int], system: Path = SYSTEM) -> list[int]:
    """By NUMA node, and hardware threads of one core side by side."""
    node_of = node_of_cores(system)

    def key(core: int) -> tuple[int, int, int]:
        siblings = _read(system / f"cpu/cpu{core}/topology/thread_siblings_list")
        return node_of.get(core, 0), min(parse_cores(siblings), default=core), core

    return sorted(cores, key=key)


def node_of_cores(system: Path = SYSTEM) -> dict[int, int]:
    """NUMA node of each core; empty where the system does not tell."""
    nodes = {int(folder.name.removeprefix("node")): folder for folder in system.glob("node/node[0-9]*")}
    return {core: node for node, folder in sorted(nodes.items()) for core in parse_cores(_read(folder / "cpulist"))}


def gpu_node(domain: int, bus: int, device: int, pci: Path = PCI) -> int | None:
    """NUMA node of the GPU at a PCI address; None where it is not known."""
    text = _read(pci / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "numa_node")
    return int(text) if text and int(text) >= 0 else None


def parse_cores(text: str) -> list[int]:
    """Linux's `0-2,8` is [0, 1, 2, 8]."""
    ends = [part.split("-") for part in text.split(",") if part]
    return [core for end in ends for core in range(int(end[0]), int(end[-1]) + 1)]


def _listed(cores: Sequence[int] | set[int]) -> str:
    """[0, 1, 2, 8] is Linux's `0-2,8`."""
    runs = [[core for _, core in run] for _, run in groupby(enumerate(sorted(cores)), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _wanted_threads(environment: Mapping[str, str]) -> int:
    text = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(text) if text.isdigit() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
