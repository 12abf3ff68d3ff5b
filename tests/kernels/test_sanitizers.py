"""Every CUDA kernel on the emulator under the address, undefined-behaviour and thread sanitizers, and planted faults they must find."""

from __future__ import annotations

import re
import subprocess

import pytest

from framework.kernels.signatures import SIGNATURES
from tests.kernels.emulated import HERE, build

WITHOUT_A_KERNEL = {"fw_abi_version", "fw_describe", "fw_sources", "fw_choose_isa", "fw_set_threads", "fw_move_like_adamw"}

# Fault: which build reports it, and how.
CAUGHT = {
    ("missing_syncthreads", "tsan"): "data race",
    ("missing_syncwarp", "tsan"): "data race",
    ("race_of_blocks", "tsan"): "data race",
    ("out_of_bounds_global", "asan"): "heap-buffer-overflow",
    ("out_of_bounds_shared", "asan"): "index 64 out of bounds",
    ("misaligned", "asan"): "misaligned address",
    ("int_overflow", "asan"): "signed integer overflow",
    ("uninitialised_shared", "asan"): "wrong values",
    ("uninitialised_shared", "tsan"): "wrong values",
    ("divergent_barrier", "asan"): "divergent __syncthreads",
    ("divergent_barrier", "tsan"): "divergent __syncthreads",
    ("mask_with_absent_lanes", "asan"): "deadlock",
    ("mask_with_absent_lanes", "tsan"): "deadlock",
}


def run(variant: str, *arguments: str) -> tuple[int, str]:
    # Leaks: threads of an abandoned launch never return. Location of races: seconds of symbolising.
    environment = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "exitcode=66", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([str(build(variant)), *arguments], env=environment, capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer of this compiler does not start on this kernel (vm.mmap_rnd_bits)")
    return done.returncode, done.stdout + done.stderr


def test_the_program_for_the_sanitizers_calls_every_function_with_a_kernel():
    called = set(re.findall(r"RUN\((fw_\w+)\(", (HERE / "every_kernel.cpp").read_text()))
    assert called == SIGNATURES.keys() - WITHOUT_A_KERNEL


@pytest.mark.parametrize("variant", ["asan", "tsan"])
def test_every_kernel_is_clean(variant: str):
    code, output = run(variant)
    assert code == 0, output[-5000:]
    assert "0 failures" in output


@pytest.mark.parametrize("fault, variant", CAUGHT, ids="-".join)
def test_a_planted_fault_is_caught(fault: str, variant: str):
    code, output = run(variant, fault)
    assert code != 0 and CAUGHT[fault, variant] in output, output[-5000:]


@pytest.mark.parametrize("variant", ["asan", "tsan"])
def test_a_kernel_without_fault_is_not_accused(variant: str):
    assert run(variant, "nothing_wrong") == (0, "")
