"""Times of the CUDA kernels on this GPU, each beside the least time that it can take and torch's own way.

    python scripts/bench/cuda_kernels.py                 a table, and with --json FILE the same numbers
    python scripts/bench/cuda_kernels.py --emulated      on the CPU through the emulator, tiny sizes: shows that it runs, times mean nothing

`floor ms` is the larger of two: bytes / the bandwidth of a large device-to-device copy, which is measured first, and, where there are
matrix products, FLOPs / the chip's peak (`PEAKS`; of a chip that is not there, the rate of a large torch matmul). `of floor` is how close
the kernel comes to it. Times are medians of calls timed one by one with events, after other data filled the caches. What is timed:
`cuda_cases.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from cuda_cases import Case, cases

from framework.kernels import library as kernels

# Dense TFLOP/s of (bf16 tensor cores, fp32 without them) from NVIDIA's data sheets of the A100, H100, H200 and HGX B200 (an eighth of the
# board's), which give the former with sparsity, twice as much. By the name that the driver gives; the first that fits counts.
PEAKS = {
    "A100": (312, 19.5),
    "H100 PCIe": (756, 51),
    "H100 NVL": (835, 60),
    "H100": (989, 67),
    "H200 NVL": (835, 60),
    "H200": (989, 67),
    "B200": (2250, 75),
}
MATMUL_SIZE = 8192


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    megabytes: float
    gigaflops: float
    floor_ms: float
    limited_by: str
    ours_ms: float
    torch_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a floor is computed from."""

    bytes_per_ms: float
    flops_per_ms: dict[str, float]
    """By unit, `Case.unit`."""
    flops_from: str


class Timer:
    """Milliseconds of a call on `device`."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self.other_data = torch.zeros(2**28 if device.type == "cuda" else 1, dtype=torch.int8, device=device)

    def __call__(self, call: Callable[[], object]) -> float:
        times = []
        for turn in range(self.repeats + 2):
            self.other_data.zero_()  # evicts the L2 cache
            if self.device.type == "cuda":
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                call()
                stop.record()
                stop.synchronize()
                elapsed = start.elapsed_time(stop)
            else:
                begun = time.perf_counter()
                call()
                elapsed = (time.perf_counter() - begun) * 1e3
            if turn >= 2:
                times.append(elapsed)
        return sorted(times)[len(times) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("--emulated", action="store_true", help="on the CPU, with the emulated library")
    options = parser.parse_args()
    device = torch.device("cpu" if options.emulated else "cuda")
    with contextlib.ExitStack() as stack:
        if options.emulated:
            from tests.kernels.emulated import build

            stack.enter_context(kernels.substitute("cpu", kernels.Library("emulated", build("plain"))))
        kernels.choose("compiled")
        timer = Timer(device, 1 if options.emulated else 10)
        machine = machine_of(device, timer)
        rows = [measure(case, timer, machine) for case in cases(device, options.emulated)]
    print(table(machine, rows) + ("\nemulated: no number here means anything" if options.emulated else ""))
    if options.json:
        options.json.write_text(json.dumps({"machine": asdict(machine), "rows": [asdict(row) for row in rows]}, indent=2))
    return 0


def machine_of(device: torch.device, timer: Timer) -> Machine:
    """Bandwidth of a large copy, and peaks by the chip's name or measured."""
    numel = 2**30 if device.type == "cuda" else 2**20
    source = torch.zeros(numel, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    bytes_per_ms = 2 * numel / timer(lambda: target.copy_(source))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    peak = peak_of(name)
    if peak is not None:
        known = dict(zip(("bf16", "fp32"), (tflops * 1e9 for tflops in peak), strict=True))
        return Machine(bytes_per_ms=bytes_per_ms, flops_per_ms=known, flops_from=f"data sheet of {name}")
    measured = {unit: matmul_flops_per_ms(device, timer, dtype) for unit, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))}
    return Machine(bytes_per_ms=bytes_per_ms, flops_per_ms=measured, flops_from=f"matmuls on {name}")


def peak_of(name: str) -> tuple[float, float] | None:
    """Of the chip that the driver calls `name`."""
    return next((peak for chip, peak in PEAKS.items() if all(word in name.replace("-", " ").split() for word in chip.split())), None)


def matmul_flops_per_ms(device: torch.device, timer: Timer, dtype: torch.dtype) -> float:
    size = MATMUL_SIZE if device.type == "cuda" else 64
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / timer(lambda: a @ b)


def measure(case: Case, timer: Timer, machine: Machine) -> Row:
    floors = {"bytes": case.moved_bytes / machine.bytes_per_ms, f"{case.unit} FLOPs": case.flops / machine.flops_per_ms[case.unit]}
    limited_by = max(floors, key=floors.get)
    return Row(
        name=case.name,
        megabytes=case.moved_bytes / 1e6,
        gigaflops=case.flops / 1e9,
        floor_ms=floors[limited_by],
        limited_by=limited_by,
        ours_ms=timer(case.ours),
        torch_ms=timer(case.torchs) if case.torchs else None,
    )


def table(machine: Machine, rows: list[Row]) -> str:
    peaks = ", ".join(f"{unit} {rate / 1e9:,.1f} TFLOP/s" for unit, rate in machine.flops_per_ms.items())
    lines = [f"copy: {machine.bytes_per_ms / 1e9:.2f} TB/s; {peaks} ({machine.flops_from})"]
    head = f"{'kernel':<40}{'MB':>8}{'GFLOP':>9}{'floor ms':>10}  {'limit':<11}{'ours ms':>9}{'of floor':>9}"
    lines.append(f"{head}{'torch ms':>10}{'torch/ours':>12}")
    for row in rows:
        flops = f"{row.gigaflops:>9,.0f}" if row.gigaflops else f"{'-':>9}"
        of_torch = f"{row.torch_ms:>10.3f}{row.torch_ms / row.ours_ms:>11.2f}x" if row.torch_ms else f"{'-':>10}{'-':>12}"
        numbers = f"{row.megabytes:>8,.0f}{flops}{row.floor_ms:>10.3f}  {row.limited_by:<11}{row.ours_ms:>9.3f}"
        lines.append(f"{row.name:<40}{numbers}{row.floor_ms / row.ours_ms:>9.0%}{of_torch}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
