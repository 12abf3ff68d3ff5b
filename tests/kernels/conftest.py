"""The compiled CPU kernels, built from the sources at hand, for every test in this folder.

The build folder is one of the checkout and kept, so that only the first session compiles (half a minute). Without a compiler the references
are tested alone.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import framework.kernels.library as kernels
from framework.kernels.library import Library

ROOT = Path(__file__).parents[2]
ISAS = ("baseline", "avx2", "avx512")


@pytest.fixture(scope="session")
def cpu_library() -> Library:
    """The library, used for CPU tensors by whatever follows in the test that asks for it (through `isa`)."""
    if not shutil.which("cmake") or not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no CMake or no C++ compiler: the kernels cannot be built here")
    build = ROOT / "build" / "tests"
    configure = ["cmake", "-S", ROOT / "csrc", "-B", build, "-DFRAMEWORK_CUDA=OFF"]
    if shutil.which("ninja") and not (build / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja"]
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
