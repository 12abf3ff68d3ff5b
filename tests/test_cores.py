"""The cores of a rank: equal shares along NUMA nodes, near its GPU, and nothing where others have placed the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from framework.cores import gpu_node, node_of_cores, ordered, parse_cores, shares

ROOT = Path(__file__).parents[1]
NODES = {core: core // 4 % 2 for core in range(16)}  # 0-3 and 8-11 on node 0, the others on node 1

needs_two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores and a system that binds to them"
)


@pytest.fixture
def system(tmp_path) -> Path:
    """/sys/devices/system of two nodes; thread n of a core has a sibling n + 8."""
    for node, cores in enumerate(("0-3,8-11", "4-7,12-15")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(cores + "\n")
    for core in range(16):
        (tmp_path / f"cpu/cpu{core}/topology").mkdir(parents=True)
        (tmp_path / f"cpu/cpu{core}/topology/thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    return tmp_path


def test_cores_are_read_as_linux_lists_them():
    assert parse_cores("0-2,8") == [0, 1, 2, 8] and parse_cores("") == []


def test_a_share_has_whole_cores_of_one_node(system):
    assert node_of_cores(system) == NODES
    assert shares(ordered(set(range(16)), system), 4) == [[0, 8, 1, 9], [2, 10, 3, 11], [4, 12, 5, 13], [6, 14, 7, 15]]


def test_every_core_belongs_to_one_rank_also_where_they_do_not_divide():
    for ranks in range(1, 8):
        parts = shares(list(range(7)), ranks)
        assert sorted(core for part in parts for core in part) == list(range(7)) and {len(part) for part in parts} <= {
            7 // ranks,
            7 // ranks + 1,
        }


def test_more_ranks_than_cores_share_all():
    assert shares([0, 1], 3) is None


def test_ranks_are_near_their_gpus():
    cores = list(range(16))
    assert shares(cores, 2, gpu_nodes=[1, 0], node_of=NODES) == [[4, 5, 6, 7, 12, 13, 14, 15], [0, 1, 2, 3, 8, 9, 10, 11]]
    assert shares(cores, 3, gpu_nodes=[1, 1, 0], node_of=NODES)[:2] == [[4, 5, 6, 7], [12, 13, 14, 15]]


@pytest.mark.parametrize("gpu_nodes", [[0, None], [0], [5, 0]], ids=["one is not known", "too few are known", "no core there"])
def test_where_that_cannot_be_the_shares_are_equal(gpu_nodes):
    assert shares([0, 1, 2, 3], 2, gpu_nodes=gpu_nodes, node_of=NODES) == [[0, 1], [2, 3]]


def test_the_node_of_a_gpu_is_that_of_its_pci_address(tmp_path):
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("1\n")
    assert gpu_node(0, 0x3B, 0, tmp_path) == 1 and gpu_node(0, 0x5E, 0, tmp_path) is None
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("-1\n")
    assert gpu_node(0, 0x3B, 0, tmp_path) is None


# ---- real processes
RANK = """
import json, os, sys, threading
from framework.cores import settle
stop = threading.Event()
early = threading.Thread(target=stop.wait)  # as libraries start them when they are imported
early.start()
said = settle(int(sys.argv[1]), int(sys.argv[2]), inherited=sys.argv[3] == "inherited")
print(json.dumps([said, [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]]))
stop.set()
"""


def rank_of(local_rank: int, local_ranks: int, how: str = "inherited", cores: set[int] | None = None, **variables: str):
    """(what it says, the cores of each of its threads)"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", RANK, str(local_rank), str(local_ranks), how],
        env=environment | {"PYTHONPATH": str(ROOT)} | variables,
        preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    said, threads = json.loads(done.stdout)
    assert threads[0] == threads[1], "a thread was left behind"
    return said, threads[0]


@needs_two_cores
def test_each_rank_gets_cores_of_its_own_for_all_its_threads():
    first, second, *_ = usable = sorted(os.sched_getaffinity(0))
    two = {first, second}
    assert rank_of(0, 2, cores=two) == (f"{first} of {first}-{second}" if second == first + 1 else f"{first} of {first},{second}", [first])
    assert rank_of(1, 2, cores=two)[1] == [second]
    assert rank_of(0, 1)[1] == usable


@needs_two_cores
@pytest.mark.parametrize(
    "variables",
    [{"OMP_PROC_BIND": "false"}, {"GOMP_CPU_AFFINITY": "0"}, {"KMP_AFFINITY": "none"}, {"OMP_PLACES": "cores"}, {"OMP_NUM_THREADS": "99"}],
    ids=lambda variables: "=".join(*variables.items()),
)
def test_what_the_user_has_placed_stays(variables):
    assert rank_of(0, 2, **variables)[1] == sorted(os.sched_getaffinity(0))


@needs_two_cores
def test_what_a_launcher_has_bound_stays():
    one = {max(os.sched_getaffinity(0))}
    assert rank_of(0, 2, "bound by srun", cores=one)[1] == list(one)
    if len(os.sched_getaffinity(0)) > 2:
        some = set(sorted(os.sched_getaffinity(0))[:2])
        assert rank_of(0, 2, "bound by srun", cores=some)[1] == sorted(some)
