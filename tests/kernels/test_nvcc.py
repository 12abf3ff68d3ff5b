"""nvcc compiles every kernel for every architecture, with everything in registers: no stack, no spills, no more registers than stated."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kernels.emulated import CSRC, ROOT, sources

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]

# Registers per thread at most. 64: four blocks of 256 threads on a multiprocessor, enough to keep its memory busy.
CAPS = {"AdamW": 80, "rms_norm_backward": 85, "sparse_attention": 128}
DEFAULT_CAP = 64


def ptxas_report(architecture: str) -> list[dict] | None:
    """Per kernel what ptxas says of it; None if this nvcc does not know the architecture. Kept under build/ by the hash of the sources."""
    nvcc = shutil.which("nvcc")
    inputs = [*sources(), *sorted((CSRC / "cuda").glob("*.h")), CSRC / "include" / "framework_kernels.h", Path(__file__)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs) + nvcc.encode()).hexdigest()[:16]
    kept = ROOT / "build" / "ptxas" / f"{architecture}-{digest}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        everything = kept.with_suffix(".cu")
        everything.write_text("".join(f'#include "{path}"\n' for path in sources()))
        number = architecture.removeprefix("sm_")
        command = [nvcc, "-O3", "-std=c++17", f"-gencode=arch=compute_{number},code={architecture}", "-Xptxas", "-v", "-cubin"]
        done = subprocess.run([*command, str(everything), "-o", os.devnull], capture_output=True, text=True)
        if "Unsupported gpu architecture" in done.stderr or "not defined for option" in done.stderr:
            return None
        assert done.returncode == 0, done.stdout + done.stderr
        kept.write_text(json.dumps(parse(done.stdout + done.stderr)))
    return json.loads(kept.read_text())


def kernels_in_the_sources() -> list[str]:
    """The names of all kernels; mangled ones have the length before the name."""
    text = "".join(path.read_text() for path in [*sources(), *sorted((CSRC / "cuda").glob("*.h"))])
    return sorted(set(re.findall(r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(", text)))


def parse(report: str) -> list[dict]:
    pattern = (
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers"
    )
    names = "kernel", "stack", "stores", "loads", "registers"
    found = re.findall(pattern, report, flags=re.DOTALL)
    return [dict(zip(names, (name, *map(int, numbers)), strict=True)) for name, *numbers in found]


@pytest.fixture(scope="module")
def reports() -> dict[str, list[dict] | None]:
    """By architecture; compiled at the same time, for each takes half a minute of one core."""
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc (the CUDA toolkit): whether the kernels compile for GPUs was not looked at")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(ARCHITECTURES, pool.map(ptxas_report, ARCHITECTURES), strict=True))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_live_in_registers(reports, architecture: str):
    found = reports[architecture]
    if found is None:
        pytest.skip(f"this nvcc does not know {architecture}")
    mangled = " ".join(kernel["kernel"] for kernel in found)
    assert [name for name in kernels_in_the_sources() if f"{len(name)}{name}" not in mangled] == [], "kernels are missing from the report"
    wrong = []
    for kernel in found:
        cap = next((cap for name, cap in CAPS.items() if name in kernel["kernel"]), DEFAULT_CAP)
        if kernel["stack"] or kernel["stores"] or kernel["loads"] or kernel["registers"] > cap:
            wrong.append(f"{kernel} (at most {cap} registers)")
    assert not wrong, "\n".join(wrong)
