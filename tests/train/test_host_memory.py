"""Free host memory: the least of what the machine and every control group above the process have left."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.train.host_memory import free_memory_bytes

MIB = 2**20


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 9999 kB\nMemAvailable: 8192 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(folder: str, limit: str, use: int, stat: str = "") -> dict[str, str]:
    return {f"{folder}/memory.max": f"{limit}\n", f"{folder}/memory.current": f"{use}\n", f"{folder}/memory.stat": stat}


def v1(folder: str, limit: int, use: int, stat: str = "") -> dict[str, str]:
    return {f"{folder}/memory.limit_in_bytes": f"{limit}\n", f"{folder}/memory.usage_in_bytes": f"{use}\n", f"{folder}/memory.stat": stat}


GROUPS = "sys/fs/cgroup"
IN_V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job/task\n0::/\n"}
IN_V2 = {"proc/self/cgroup": "0::/job/task\n"}


@pytest.mark.parametrize(
    ("files", "expected_mib"),
    [
        ({}, 8),
        (IN_V2, 8),
        (IN_V2 | v2(f"{GROUPS}/job/task", "max", 5 * MIB), 8),
        (IN_V2 | v2(f"{GROUPS}/job/task", str(6 * MIB), 2 * MIB), 4),
        (IN_V2 | v2(f"{GROUPS}/job/task", str(6 * MIB), 5 * MIB, f"anon 7\ninactive_file {MIB}\nactive_file {MIB}\n"), 3),
        (IN_V2 | v2(f"{GROUPS}/job/task", "max", MIB) | v2(f"{GROUPS}/job", str(6 * MIB), 5 * MIB), 1),
        (IN_V2 | v2(f"{GROUPS}/job/task", str(2 * MIB), 3 * MIB), 0),
        (IN_V2 | v2(f"{GROUPS}/job/task", str(99 * MIB), 3 * MIB), 8),
        ({"proc/self/cgroup": "0::/\n"} | v2(GROUPS, str(6 * MIB), 2 * MIB), 4),
        (IN_V1 | v1(f"{GROUPS}/memory/job/task", 6 * MIB, 2 * MIB), 4),
        (IN_V1 | v1(f"{GROUPS}/memory/job", 6 * MIB, 2 * MIB, f"total_inactive_file {MIB}\ninactive_file 7\n"), 5),
        (IN_V1 | v1(f"{GROUPS}/memory", 6 * MIB, 2 * MIB), 4),
        (IN_V1 | v1(f"{GROUPS}/memory", 9223372036854771712, 2 * MIB), 8),
    ],
)
def test_the_least_limit_counts_and_page_cache_is_free(tmp_path, files, expected_mib):
    assert free_memory_bytes(system(tmp_path, files)) == expected_mib * MIB


def test_a_system_that_does_not_tell(tmp_path):
    assert free_memory_bytes(tmp_path) is None


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="needs Linux")
def test_this_machine_has_some_left():
    assert 0 < free_memory_bytes() < 2**50
