"""Finding, loading and choosing the compiled kernels: what is there is used, what is missing is said, and nothing is needed."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import framework.kernels.library as kernels
from framework.kernels.cast import cast_
from framework.kernels.library import KernelError, library_for
from framework.kernels.signatures import SIGNATURES, TYPES, Copies, Range

ROOT = Path(__file__).parents[2]
HEADER = (ROOT / "csrc" / "include" / "framework_kernels.h").read_text()
LETTERS = {"int": "i", "int64_t": "q", "float": "f", "double": "d"}


@pytest.fixture
def nothing_loaded(monkeypatch):
    monkeypatch.setattr(kernels, "_loaded", {})
    yield
    kernels.choose("auto")


# ---- the header and its Python counterpart
def declared_functions() -> dict[str, str]:
    """name -> letters, as in SIGNATURES, read from the header."""
    code = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
    found = {}
    for name, arguments in re.findall(r"FW_API [\w ]+?\*? ?(fw_\w+)\(([^)]*)\);", code):
        letters = ""
        for argument in [] if arguments.strip() == "void" else arguments.split(","):
            if "const char*" in argument:
                letters += "s"
            else:
                letters += "p" if "*" in argument else LETTERS[argument.split()[-2]]
        found[name] = letters
    return found


def test_every_declared_function_has_the_signature_that_python_calls_it_with():
    assert declared_functions() == SIGNATURES


@pytest.mark.parametrize(("struct", "name"), [(Range, "fw_range"), (Copies, "fw_copies")])
def test_structures_have_the_members_of_the_header(struct, name):
    code = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
    body = re.search(r"typedef struct \{([^}]*)\} " + name, code)[1]
    members = []
    for statement in filter(str.strip, body.split(";")):
        kind, *names = statement.replace("*", " * ").split(maxsplit=1)
        for member in names[0].split(","):
            pointer = "*" in statement
            members.append((member.replace("*", "").strip(), ctypes.c_void_p if pointer else TYPES[LETTERS[kind]]))
    assert struct._fields_ == members


def test_the_abi_version_is_that_of_the_header():
    assert int(re.search(r"#define FW_ABI_VERSION (\d+)", HEADER)[1]) == kernels.ABI_VERSION


def test_the_cpu_library_has_every_function_that_is_not_for_the_gpu_alone(cpu_library):
    gpu_alone = {name for name in SIGNATURES if name.startswith(("fw_embedding", "fw_top_k", "fw_sparse_attention"))}
    assert [name for name in SIGNATURES.keys() - gpu_alone if not cpu_library.has(name)] == []


def test_the_library_needs_neither_torch_nor_python(cpu_library):
    needed = subprocess.run(["ldd", str(cpu_library.path)], capture_output=True, text=True).stdout
    assert "torch" not in needed and "python" not in needed


def test_the_description_names_instruction_set_and_compiler(cpu_library):
    assert re.fullmatch(r"cpu: (baseline|avx2|avx512), built with (gcc|clang) [\d.]+.*", cpu_library.description)


# ---- what is chosen
def test_without_a_library_everything_works_and_the_reason_is_told(nothing_loaded, monkeypatch, tmp_path):
    monkeypatch.setenv("FRAMEWORK_KERNELS_DIR", str(tmp_path))
    source, target = torch.randn(5), torch.empty(5, dtype=torch.bfloat16)
    assert torch.equal(cast_(target, source), source.bfloat16())
    rows = kernels.status()
    assert rows["kernels_cpu"] == f"no libframework_cpu was found in FRAMEWORK_KERNELS_DIR={tmp_path}"
    assert "no libframework_cuda was found" in rows["kernels_cuda"]


def test_compiled_without_a_library_is_an_error_that_says_what_to_do(nothing_loaded, monkeypatch, tmp_path):
    monkeypatch.setenv("FRAMEWORK_KERNELS_DIR", str(tmp_path))
    kernels.choose("compiled")
    with pytest.raises(KernelError, match=r"kernels=compiled, but fw_cast cannot be used: no libframework_cpu.*pip install \."):
        cast_(torch.empty(3), torch.empty(3))


def test_a_folder_of_the_users_own_is_used(nothing_loaded, monkeypatch, tmp_path, cpu_library):
    shutil.copy(cpu_library.path, tmp_path)
    monkeypatch.setenv("FRAMEWORK_KERNELS_DIR", str(tmp_path))
    assert library_for("fw_cast", torch.empty(3)).path.parent == tmp_path
    assert str(tmp_path) in kernels.status()["kernels_cpu"]


def test_a_library_of_another_abi_is_refused_with_a_message(nothing_loaded, monkeypatch, tmp_path):
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    source = tmp_path / "other.c"
    source.write_text("int fw_abi_version(void) { return 999; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libframework_cpu.so", source], check=True)
    monkeypatch.setenv("FRAMEWORK_KERNELS_DIR", str(tmp_path))
    assert library_for("fw_cast", torch.empty(3)) is None
    assert "has ABI version 999, and this installation needs 1. Build it again" in kernels.status()["kernels_cpu"]


def test_a_file_that_is_no_library_is_passed_over_with_a_reason(nothing_loaded, monkeypatch, tmp_path):
    (tmp_path / "libframework_cpu.so").write_text("not a library")
    monkeypatch.setenv("FRAMEWORK_KERNELS_DIR", str(tmp_path))
    assert library_for("fw_cast", torch.empty(3)) is None
    assert "cannot be used" in kernels.status()["kernels_cpu"]


@pytest.fixture
def checkout(nothing_loaded, monkeypatch, tmp_path, cpu_library):
    """A checkout of its own whose library was just built."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "build" / "kernels").mkdir(parents=True)
    shutil.copy(cpu_library.path, tmp_path / "build" / "kernels")
    monkeypatch.setattr(kernels, "CHECKOUT", tmp_path)
    monkeypatch.setenv("FRAMEWORK_KERNELS_DIR", str(tmp_path / "build" / "kernels"))
    return tmp_path


def test_a_library_knows_the_sources_that_it_was_built_from(checkout, cpu_library):
    assert cpu_library.sources == kernels.sources_at_hand("cpu")
    assert "STALE" not in kernels.status()["kernels_cpu"]


@pytest.mark.parametrize("changed", ["cpu/flat_loops.h", "include/framework_kernels.h", "cpu/new.h", "CMakeLists.txt"])
def test_a_library_older_than_the_sources_beside_it_is_told_and_not_taken_for_compiled(checkout, changed):
    with open(checkout / "csrc" / changed, "a") as file:
        file.write("\n")
    said = f"not built from the sources in {checkout / 'csrc'}. Build it again: pip install -e {checkout}"
    assert said in kernels.status()["kernels_cpu"] and said in kernels.used_on("cpu")
    assert library_for("fw_cast", torch.empty(3)) is not None and kernels.missing("cpu") is None  # auto: the same functions as ever
    kernels.choose("compiled")
    assert said in kernels.missing("cpu")
    with pytest.raises(KernelError, match="kernels=compiled, but fw_cast cannot be used: .*not built from the sources in"):
        library_for("fw_cast", torch.empty(3))


def test_a_folder_that_cmake_built_is_built_again_by_cmake(checkout):
    (checkout / "build" / "kernels" / "CMakeCache.txt").touch()
    (checkout / "csrc" / "cpu" / "loops.cpp").unlink()
    assert f"Build it again: cmake --build {checkout / 'build' / 'kernels'}" in kernels.status()["kernels_cpu"]


def test_other_files_do_not_make_a_library_old(checkout):
    for other in ("README.md", "cuda/adamw.cu", "emulator/fiber.cpp"):
        (checkout / "csrc" / other).unlink()
    assert "STALE" not in kernels.status()["kernels_cpu"]


def test_without_sources_beside_the_package_nothing_is_compared(checkout):
    shutil.rmtree(checkout / "csrc")
    assert kernels.sources_at_hand("cpu") is None and "STALE" not in kernels.status()["kernels_cpu"]


def test_the_mode_decides(cpu_library):
    with kernels.substitute("cpu", cpu_library):
        try:
            assert kernels.mode() == "auto" and library_for("fw_cast", torch.empty(3)) is cpu_library
            kernels.choose("reference")
            assert library_for("fw_cast", torch.empty(3)) is None
            kernels.choose("compiled")
            assert library_for("fw_cast", torch.empty(3)) is cpu_library
        finally:
            kernels.choose("auto")
    with pytest.raises(KernelError, match="got 'fast', expected auto, reference or compiled"):
        kernels.choose("fast")


def test_double_precision_takes_the_reference_and_compiled_refuses_it(cpu_library):
    x = torch.empty(3, dtype=torch.float64)
    with kernels.substitute("cpu", cpu_library):
        assert library_for("fw_cast", x=x) is None
        kernels.choose("compiled")
        try:
            with pytest.raises(KernelError, match=r"x is torch\.float64, and the kernels know torch\.float32"):
                library_for("fw_cast", x=x)
        finally:
            kernels.choose("auto")


@pytest.mark.parametrize("mode", ["auto", "reference"])
def test_a_tensor_that_is_not_contiguous_is_named_whatever_the_mode(mode):
    kernels.choose(mode)
    try:
        with pytest.raises(KernelError, match=r"fw_cast: src is not contiguous \(shape \[2, 3\], strides \[1, 2\]\)"):
            cast_(torch.empty(6), torch.empty(3, 2).t())
    finally:
        kernels.choose("auto")


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(KernelError, match="fw_cast: got a on cpu, b on meta, expected one device"):
        library_for("fw_cast", a=torch.empty(1), b=torch.empty(1, device="meta"))


def test_a_refused_call_says_so(cpu_library):
    with pytest.raises(KernelError, match=r"fw_cast \(cpu\) returned 10001: it refuses these arguments"):
        cpu_library.call("fw_cast", None, 7, None, 0, 1, None)


def test_the_number_of_threads_follows_torch(cpu_library):
    x = torch.randn(1 << 18)
    before = torch.get_num_threads()
    try:
        sums = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with kernels.substitute("cpu", cpu_library):
                cast_(torch.empty_like(x), x)
            sums.append(cpu_library._threads)
        assert sums == [1, 2, 3]
    finally:
        torch.set_num_threads(before)


def test_importing_the_package_loads_nothing(tmp_path):
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    code = "import framework.kernels.adamw, framework.kernels.library as kernels; print(kernels._loaded)"
    code += "; print('libframework' in open('/proc/self/maps').read())"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.stdout.split() == ["{}", "False"], done.stderr
