"""How much host memory a process can still have: of the machine, and of the control groups (containers, batch systems) that it is in.

Unusual: the kernel ends a process that goes beyond its control group's limit, however much the machine has left. A limit may be set at any
level of the hierarchy, and counts the page cache, which gives way; so that is free memory here, as it is in MemAvailable.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("memory.max", "memory.current", "")
"""Files with limit and use; how the lines of memory.stat begin that count what is below a group, too."""


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """What can be had without swapping; None where the system does not tell. `root`: where proc and sys are mounted."""
    lines = _lines(root / "proc/meminfo")
    machine = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min((*machine, *_free_in_groups(root)), default=None)


def _free_in_groups(root: Path) -> Iterator[int]:
    """Of each group that this process is in and that has a limit."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount, files = (root / "sys/fs/cgroup/memory", V1) if controllers else (root / "sys/fs/cgroup", V2)
        group = mount / name.lstrip("/")
        for folder in (group, *group.parents):  # in a container the first ones may not be there: its own group is the mount
            if (free := _free_in_group(folder, *files)) is not None:
                yield free
            if folder == mount:
                break


def _free_in_group(folder: Path, limit_file: str, use_file: str, stat_prefix: str) -> int | None:
    limit, use = _lines(folder / limit_file), _lines(folder / use_file)
    if not limit or not use or limit == ["max"]:
        return None
    stat = dict(line.split() for line in _lines(folder / "memory.stat"))
    page_cache = sum(int(stat.get(f"{stat_prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return max(0, int(limit[0]) - int(use[0]) + page_cache)


def _lines(file: Path) -> list[str]:
    """None of them where there is no such file, or it may not be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
