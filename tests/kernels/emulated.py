"""Builds the CUDA sources for the CPU, over csrc/emulator: a library for the Python tests, and programs for the sanitizers.

A build is kept under `build/emulated/` by the hash of everything that goes into it, so only the first session after a change waits for it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CSRC = ROOT / "csrc"
HERE = Path(__file__).parent

FLAGS = ["-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]

# Of the undefined behaviour those kinds that a kernel can have; all of them take four times as long to compile.
SANITIZERS = "address,alignment,bounds,signed-integer-overflow,shift,integer-divide-by-zero"

# Name: flags of the kernels, flags of the runtime, which is never instrumented, and whether it is a program.
VARIANTS = {
    "plain": (["-O1", "-fvisibility=hidden"], [], False),
    "asan": (["-O0", "-g1", f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all"], ["-DFW_EMULATOR_ASAN"], True),
    # A CUDA thread costs the thread sanitizer milliseconds: two warps a block are enough to race.
    "tsan": (["-O1", "-g1", "-fsanitize=thread", "-DFW_BLOCK_THREADS=64"], ["-DFW_EMULATOR_TSAN"], True),
}


def sources() -> list[Path]:
    return sorted((CSRC / "cuda").glob("*.cu"))


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        pytest.skip("needs g++: the CUDA sources are compiled for the CPU here")
    if os.uname().machine != "x86_64":
        pytest.skip("the emulator switches stacks with x86-64 instructions")
    return found


def build(variant: str) -> Path:
    """The library or program of a variant, compiled if it is not there yet."""
    kernel_flags, runtime_flags, is_program = VARIANTS[variant]
    inputs = sorted(path for folder in ("cuda", "emulator", "include") for path in (CSRC / folder).iterdir() if path.is_file())
    inputs += [HERE / "every_kernel.cpp", HERE / "planted_faults.cu", Path(__file__)]
    digest = hashlib.sha256(compiler().encode() + b"".join(path.name.encode() + path.read_bytes() for path in inputs)).hexdigest()[:16]
    folder = ROOT / "build" / "emulated" / f"{variant}-{digest}"
    target = folder / ("every_kernel" if is_program else "libframework_emulated.so")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two sessions may start at once
        if target.exists():
            return target
        everything = folder / "every_source.cu"  # one unit: most of the time goes into headers
        everything.write_text("".join(f'#include "{path}"\n' for path in sources()))
        units = [(everything, kernel_flags)]
        units += [(path, ["-O2", "-fvisibility=hidden", *runtime_flags]) for path in sorted((CSRC / "emulator").glob("*.cpp"))]
        units.append((HERE / "planted_faults.cu", kernel_flags))
        if is_program:
            units.append((HERE / "every_kernel.cpp", kernel_flags))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(lambda unit: _compile(*unit, folder), units))
        link = [flag for flag in kernel_flags if flag.startswith("-fsanitize")] + ([] if is_program else ["-shared"])
        _run(compiler(), *link, *objects, "-o", folder / "partial")
        for made in objects:
            Path(made).unlink()
        (folder / "partial").rename(target)
    return target


def schedule(library: Path, order: str, seed: int = 1) -> None:
    """In which order the emulator runs blocks and threads from now on: forwards, backwards or random."""
    ctypes.CDLL(str(library)).fw_emulator_schedule(("forwards", "backwards", "random").index(order), ctypes.c_uint(seed))


def report(library: Path) -> str:
    """What the emulator found wrong with the last launch that failed."""
    function = ctypes.CDLL(str(library)).fw_emulator_report
    function.restype = ctypes.c_char_p
    return function().decode()


def _compile(source: Path, flags: list[str], folder: Path) -> str:
    made = str(folder / f"{source.stem}.o")
    _run(compiler(), *FLAGS, *flags, "-x", "c++", "-c", source, "-o", made)
    return made


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, " ".join(map(str, command)) + "\n" + done.stdout + done.stderr
