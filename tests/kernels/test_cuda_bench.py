"""The table of the CUDA kernels' times: every case runs, on the emulator at small sizes, and no function of the library is without one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import framework.kernels.library as kernels
from framework.kernels.signatures import SIGNATURES
from tests.kernels.test_sanitizers import WITHOUT_A_KERNEL

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import cuda_kernels


def test_every_function_of_the_library_is_timed_beside_its_floor(emulated_library, monkeypatch):
    called = set()
    call = kernels.Library.call
    monkeypatch.setattr(kernels.Library, "call", lambda self, function, *args: (called.add(function), call(self, function, *args))[1])
    device = torch.device("cpu")
    timer = cuda_kernels.Timer(device, 1)
    with kernels.substitute("cpu", emulated_library):
        kernels.choose("compiled")
        try:
            machine = cuda_kernels.machine_of(device, timer)
            rows = [cuda_kernels.measure(case, timer, machine) for case in cuda_kernels.cases(device, small=True)]
        finally:
            kernels.choose("auto")
    assert called == SIGNATURES.keys() - WITHOUT_A_KERNEL
    assert len({row.name for row in rows}) == len(rows) and all(row.floor_ms > 0 and row.ours_ms > 0 for row in rows)
    printed = cuda_kernels.table(machine, rows)
    assert all(row.name in printed for row in rows)


def test_a_floor_is_the_larger_of_bytes_and_flops():
    machine = cuda_kernels.Machine(bytes_per_ms=10.0, flops_per_ms={"bf16": 100.0, "fp32": 10.0}, flops_from="here")
    case = {"name": "one", "moved_bytes": 50, "ours": lambda: None}
    timer = cuda_kernels.Timer(torch.device("cpu"), 1)
    of = lambda **more: cuda_kernels.measure(cuda_kernels.Case(**case, **more), timer, machine)  # noqa: E731
    assert (of().limited_by, of().floor_ms) == ("bytes", 5.0)
    assert (of(flops=1000).limited_by, of(flops=1000).floor_ms) == ("bf16 FLOPs", 10.0)
    assert of(flops=100, unit="fp32").floor_ms == 10.0


@pytest.mark.parametrize(
    "name, tflops",
    {
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H200": 989,
        "NVIDIA H200 NVL": 835,
        "NVIDIA B200": 2250,
        "NVIDIA GeForce RTX 4090": None,
    }.items(),
)
def test_a_chip_is_known_by_the_name_that_its_driver_gives(name: str, tflops: float | None):
    assert (cuda_kernels.peak_of(name) or [None])[0] == tflops
