"""The compiled kernels, built from the sources at hand, for every test in this folder: for the CPU, and CUDA emulated on the CPU.

A library of these very sources that the package finds is taken as it is. Else one is compiled (half a minute) in a build folder of the
checkout, which is kept. Without a compiler the references are tested alone.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import framework.kernels.library as kernels
from framework.kernels.library import Library
from tests.kernels.emulated import build as build_emulated

ROOT = Path(__file__).parents[2]
ISAS = ("baseline", "avx2", "avx512")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers in every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def cpu_library() -> Library:
    """The library, used for CPU tensors by whatever follows in the test that asks for it (through `isa`)."""
    found = kernels._load("cpu")
    if isinstance(found, Library) and not found.stale:
        return found
    if not shutil.which("cmake") or not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no CMake or no C++ compiler: the kernels cannot be built here")
    build = ROOT / "build" / "tests"
    configure = ["cmake", "-S", ROOT / "csrc", "-B", build, "-DFRAMEWORK_CUDA=OFF"]
    if shutil.which("ninja") and not (build / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja"]
    build.mkdir(parents=True, exist_ok=True)
    with open(build / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of pytest may start at once
        for command in (configure, ["cmake", "--build", build, "--parallel", "2"]):
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    return Library("cpu", next(build.glob("libframework_cpu.*")))


@pytest.fixture(params=ISAS)
def isa(request, cpu_library) -> str:
    """The test runs once with every instruction set that this processor has, the compiled function required."""
    try:
        cpu_library.call("fw_choose_isa", request.param.encode())
    except kernels.KernelError:
        pytest.skip(f"this processor has no {request.param}")
    with kernels.substitute("cpu", cpu_library):
        kernels.choose("compiled")
        yield request.param
        kernels.choose("auto")
    cpu_library.call("fw_choose_isa", b"auto")


@pytest.fixture
def reference_only():
    """Plain torch, for tests of the references themselves."""
    kernels.choose("reference")
    yield
    kernels.choose("auto")


@pytest.fixture(scope="session")
def emulated_library() -> Library:
    """The CUDA library built for the CPU over csrc/emulator."""
    return Library("emulated", build_emulated("plain"))


@pytest.fixture(params=["emulated", "cuda"])
def device(request) -> torch.device:
    """The CUDA kernels required: emulated on CPU tensors, and for real where there is a GPU."""
    if request.param == "cuda":
        yield from _on_cuda()
    else:
        yield from _on_cpu(request.getfixturevalue("emulated_library"))


@pytest.fixture(params=["emulated", "cpu", "cuda"])
def layer_device(request) -> torch.device:
    """As `device`, and the CPU library where it has the module's FUNCTION."""
    if request.param == "cuda":
        yield from _on_cuda()
        return
    library = request.getfixturevalue(f"{request.param}_library")
    if not library.has(request.module.FUNCTION):
        pytest.skip(f"the CPU library leaves {request.module.FUNCTION} to plain torch")
    yield from _on_cpu(library)


def _on_cpu(library: Library):
    with kernels.substitute("cpu", library):
        kernels.choose("compiled")
        yield torch.device("cpu")
        kernels.choose("auto")


def _on_cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    kernels.choose("compiled")  # says so if the CUDA library was not built
    yield torch.device("cuda")
    kernels.choose("auto")
