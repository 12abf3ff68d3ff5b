"""Our CPU kernels against torch, DeepSpeed's CPU Adam and the machine's memory: the same tensors, in one process, taking turns.

    python scripts/bench/kernels.py                     1M and 16M elements, about a minute
    python scripts/bench/kernels.py --sizes 1 16 256    256M needs 7 GB of memory
    python scripts/bench/kernels.py --quick             whether it works, in seconds

Two jobs are timed. `update`: AdamW on fp32 gradients. `pipeline`: what a training step needs, from bf16 gradients to bf16 parameters,
with the gradients multiplied by one factor (loss scale and clipping); torch and DeepSpeed do it in several passes. `same bytes` is a loop
that moves exactly what ours moves (with a whole master) and computes next to nothing. Contestants take turns in changing order, and a ratio
is the median of the ratios within rounds: on a shared machine a median of times says little by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch  # noqa: E402
from measure import machine  # noqa: E402

from framework.kernels.adamw import adamw_  # noqa: E402
from framework.kernels.cast import cast_  # noqa: E402
from framework.kernels.library import Library, choose, library_for  # noqa: E402
from framework.kernels.quantize import quantize, quantize_reference  # noqa: E402
from framework.kernels.shard import Arguments, ShardCopies, adam_range  # noqa: E402
from framework.kernels.square_sum import square_sum  # noqa: E402
from framework.progress import progress  # noqa: E402

LR, BETAS, EPS, WEIGHT_DECAY, STEP = 1e-6, (0.9, 0.95), 1e-8, 0.1, 5
BYTES_PER_ELEMENT = 28
"""fp32 parameter and two moments read and written, and either an fp32 gradient, or a bf16 gradient and a bf16 copy."""
MEBI = 2**20
OURS = "ours"
REMAINDER = "ours, master as bf16 and remainder"
"""`precision.master_weights=remainder`: the same bits in 26 bytes moved per element."""


@dataclass
class Contest:
    """One job and who does it; the first contestant is ours, and all ratios are to it."""

    job: str
    bytes_moved: int
    contestants: dict[str, Callable[[], object]]
    seconds: dict[str, list[float]] = field(default_factory=dict)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    choose("compiled")
    library = library_for("fw_adamw", torch.empty(0))
    here = machine()
    print(heading(here, library, args), flush=True)
    results = []
    for size in args.sizes:
        numel = int(size * MEBI)
        for contest in contests(numel, library, args):
            measure(contest, args.rounds)
            results.append(summary(contest, numel))
            print(table_rows(results[-1]), flush=True)
    if args.json:
        facts = {"date": str(date.today()), "machine": here, "library": library.description, "settings": vars(args)}
        Path(args.json).write_text(json.dumps(facts | {"results": results}, indent=1))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 16], help="elements of a shard in units of 2^20 (default 1 16)")
    parser.add_argument("--rounds", type=int, default=31, help="turns of every contestant (default 31)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="default: the cores of this process")
    parser.add_argument("--isa", choices=("baseline", "avx2", "avx512", "auto"), default="auto")
    parser.add_argument("--jobs", nargs="+", choices=("adamw", "flat"), default=["adamw", "flat"])
    parser.add_argument("--quick", action="store_true", help="2^16 elements, 3 rounds: the numbers mean nothing")
    parser.add_argument("--json", metavar="FILE", help="also write everything that was measured")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.rounds = [2**16 / MEBI], 3
    return args


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- who does what
def contests(numel: int, library: Library, args: argparse.Namespace) -> list[Contest]:
    library.call("fw_choose_isa", args.isa.encode())
    found = []
    if "adamw" in args.jobs:
        shard = Shard(numel)
        found += [update_contest(shard, library), pipeline_contest(shard, library)]
    if "flat" in args.jobs:
        found += flat_contests(numel)
    return found


class Shard:
    """Parameters, moments and gradients of one rank, shared by all contestants: what they write does not change what they have to do."""

    def __init__(self, numel: int) -> None:
        self.master, self.grad = torch.empty(numel), torch.empty(numel, dtype=torch.bfloat16)
        self.exp_avg, self.exp_avg_sq, self.grad_fp32 = torch.empty(numel), torch.empty(numel), torch.empty(numel)
        self.copy = torch.zeros(numel, dtype=torch.bfloat16)
        for at in range(0, numel, 4 * MEBI):  # in pieces, so that making the numbers needs no memory of its own
            part = slice(at, min(numel, at + 4 * MEBI))
            self.master[part].normal_()
            self.exp_avg[part].normal_(std=0.1)
            self.exp_avg_sq[part].uniform_(0.1, 1.1)
            self.grad_fp32[part].normal_()
            self.grad[part] = self.grad_fp32[part]
        self.ranges = [adam_range(0, numel, lr=LR, weight_decay=WEIGHT_DECAY, step=STEP, betas=BETAS)]
        self.copies, self.remainder = ShardCopies(data=self.copy), torch.zeros(numel, dtype=torch.int16)
        self.factor = torch.tensor(0.125)
        self.parameter = torch.nn.Parameter(self.master)
        self.parameter.grad = self.grad_fp32
        self.optimizer = torch.optim.AdamW([self.parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
        self.optimizer.state[self.parameter] = {
            "step": torch.tensor(float(STEP)),
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
        }

    def adamw(self, grad: torch.Tensor, copies: ShardCopies | None, factor: torch.Tensor | None, *, split: bool = False) -> None:
        """`split`: the master is `copies` and 16 more bits."""
        master, remainder = (None, self.remainder) if split else (self.master, None)
        options = {"betas": BETAS, "eps": EPS, "grad_factor": factor, "copies": copies, "remainder": remainder}
        adamw_(master, self.exp_avg, self.exp_avg_sq, grad, self.ranges, **options)

    def move(self, library: Library, grad: torch.Tensor, grad_dtype: int, copies: ShardCopies | None) -> None:
        addresses = [tensor.data_ptr() for tensor in (self.master, self.exp_avg, self.exp_avg_sq, grad)]
        library.call("fw_move_like_adamw", *addresses, grad_dtype, Arguments(copies, []).copies, grad.numel(), None)


def update_contest(shard: Shard, library: Library) -> Contest:
    contestants = {
        OURS: lambda: shard.adamw(shard.grad_fp32, None, None),
        "same bytes": lambda: shard.move(library, shard.grad_fp32, 0, None),
        "torch fused": shard.optimizer.step,
    }
    if (adam := deepspeed_adam()) is not None:
        contestants["DeepSpeedCPUAdam"] = lambda: adam(shard)
    return Contest("AdamW, update", BYTES_PER_ELEMENT * shard.master.numel(), contestants)


def pipeline_contest(shard: Shard, library: Library) -> Contest:
    scale = 1 / shard.factor

    def torch_pipeline() -> None:
        shard.grad_fp32.copy_(shard.grad)
        shard.optimizer.grad_scale = scale
        shard.optimizer.step()
        shard.optimizer.grad_scale = None
        shard.copy.copy_(shard.master)

    contestants = {
        OURS: lambda: shard.adamw(shard.grad, shard.copies, shard.factor),
        REMAINDER: lambda: shard.adamw(shard.grad, shard.copies, shard.factor, split=True),
        "same bytes": lambda: shard.move(library, shard.grad, 1, shard.copies),
        "torch fused": torch_pipeline,
    }
    if (adam := deepspeed_adam()) is not None:

        def deepspeed_pipeline() -> None:
            shard.grad_fp32.copy_(shard.grad)
            shard.grad_fp32.mul_(shard.factor)
            adam(shard)
            shard.copy.copy_(shard.master)

        contestants["DeepSpeedCPUAdam"] = deepspeed_pipeline
    return Contest("AdamW, pipeline", BYTES_PER_ELEMENT * shard.master.numel(), contestants)


_deepspeed: list[Callable[[Shard], object] | None] = []


def deepspeed_adam() -> Callable[[Shard], object] | None:
    """The function below DeepSpeedCPUAdam.step, which DeepSpeed compiles at first use; None where that cannot be done."""
    if not _deepspeed:
        _deepspeed.append(_load_deepspeed())
    return _deepspeed[0]


def _load_deepspeed() -> Callable[[Shard], object] | None:
    try:
        from deepspeed.ops.op_builder import CPUAdamBuilder

        module = CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # whatever goes wrong in its build, the benchmark goes on without it
        print(f"DeepSpeed is left out: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr)
        return None
    module.create_adam(0, LR, *BETAS, EPS, WEIGHT_DECAY, True, False)

    def step(shard: Shard) -> None:
        tensors = (shard.master, shard.grad_fp32, shard.exp_avg, shard.exp_avg_sq)
        module.adam_update(0, STEP, LR, *BETAS, EPS, WEIGHT_DECAY, True, *tensors)

    return step


def flat_contests(numel: int) -> list[Contest]:
    fp32, bf16 = torch.randn(numel), torch.randn(numel).bfloat16()
    to_fp32, to_bf16 = torch.empty(numel), torch.empty(numel, dtype=torch.bfloat16)
    out = torch.empty((), dtype=torch.float64)
    q, scales = quantize(bf16)
    return [
        Contest("bf16 to fp32", 6 * numel, {OURS: lambda: cast_(to_fp32, bf16), "torch": lambda: to_fp32.copy_(bf16)}),
        Contest("fp32 to bf16", 6 * numel, {OURS: lambda: cast_(to_bf16, fp32), "torch": lambda: to_bf16.copy_(fp32)}),
        Contest(
            "sum of squares, fp32",
            4 * numel,
            {OURS: lambda: square_sum(fp32, out=out), "torch (sums in fp32)": lambda: torch.linalg.vector_norm(fp32)},
        ),
        Contest(
            "sum of squares, bf16",
            2 * numel,
            {
                OURS: lambda: square_sum(bf16, out=out),
                "torch (sums in fp32)": lambda: torch.linalg.vector_norm(bf16, dtype=torch.float32),
            },
        ),
        Contest(
            "quantise bf16 to int8",
            3 * numel,
            {OURS: lambda: quantize(bf16, out=(q, scales)), "torch": lambda: quantize_reference(bf16)},
        ),
    ]


# ---- measuring and telling
def measure(contest: Contest, rounds: int) -> None:
    names = list(contest.contestants)
    contest.seconds = {name: [] for name in names}
    for function in contest.contestants.values():
        function()
    for number in progress(range(rounds), contest.job, unit="rounds"):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            began = time.perf_counter()
            contest.contestants[name]()
            contest.seconds[name].append(time.perf_counter() - began)


def summary(contest: Contest, numel: int) -> dict:
    rows, ours = [], contest.seconds[OURS]
    for name, seconds in contest.seconds.items():
        ratios = [theirs / mine for theirs, mine in zip(seconds, ours, strict=True)]
        rows.append(
            {
                "contestant": name,
                "median_s": statistics.median(seconds),
                "least_s": min(seconds),
                "over_ours": statistics.median(ratios),
                "over_ours_quartiles": statistics.quantiles(ratios)[::2],
                "over_ours_at_best": min(seconds) / min(ours),
            }
        )
    return {"job": contest.job, "elements": numel, "bytes": contest.bytes_moved, "rows": rows}


def heading(here: dict, library: Library, args: argparse.Namespace) -> str:
    lines = [
        f"{date.today()}, {here['cpu']}, {here['cores']} cores, load before the start {here['load']:.1f}, "
        f"Python {here['python']}, torch {here['torch']}",
        f"{library.description}, {args.threads} threads, {args.rounds} turns each",
        "",
        "| job | Mi elements | contestant | median ms | least ms | GB/s at least | time / ours | its quartiles | at best |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    return "\n".join(lines)


def table_rows(result: dict) -> str:
    lines = []
    for row in result["rows"]:
        low, high = row["over_ours_quartiles"]
        cells = [
            result["job"],
            f"{result['elements'] / MEBI:g}",
            row["contestant"],
            f"{1e3 * row['median_s']:.3f}",
            f"{1e3 * row['least_s']:.3f}",
            f"{result['bytes'] / row['least_s'] / 1e9:.1f}",
            f"{row['over_ours']:.2f}" if row["contestant"] != OURS else "",
            f"{low:.2f}-{high:.2f}" if row["contestant"] != OURS else "",
            f"{row['over_ours_at_best']:.2f}" if row["contestant"] != OURS else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
