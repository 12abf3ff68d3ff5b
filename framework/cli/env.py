"""`framework env`: what this machine and this installation are, for reports. The same facts as RUN/env.json, what torch sees, and which
compiled kernels there are (or why not)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from framework import __version__
from framework.config.paths import PACKAGE
from framework.cores import node_of_cores
from framework.train.run_dir import environment

HELP = """Print versions, GPUs, cores, memory, compiled kernels and the git revision.

  framework env           as a table
  framework env --json    as JSON
"""


def main(arguments: Sequence[str]) -> int:
    """Print the facts and return 0."""
    if "--help" in arguments or "-h" in arguments:
        print(HELP)
        return 0
    facts = {"framework": __version__, "installed_at": str(PACKAGE)} | environment() | machine_facts()
    if "--json" in arguments:
        print(json.dumps(facts, indent=2))
        return 0
    rows = [row for name, value in facts.items() for row in (value.items() if isinstance(value, dict) else [(name, value)])]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {_shown(value)}")
    return 0


def machine_facts() -> dict[str, Any]:
    """Cores, memory, the GPUs that torch can use, and the compiled kernels; imports torch (a second or two)."""
    import torch

    from framework.kernels import library as kernels

    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "numa_nodes": len(set(node_of_cores().values())) or None,
        "memory_gib": _memory_gib(),
        "torch_built_for_cuda": torch.version.cuda,
        "torch_gpus": [f"{device.name} ({device.total_memory / 2**30:.0f} GiB)" for device in devices],
        **kernels.status(),
    }


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (ValueError, OSError):  # not POSIX
        return None


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
