"""Our engine against DDP, FSDP2 and DeepSpeed: step time, memory and bytes sent, on the same small Llama, in one run.

    python scripts/bench/engine.py                       the tables of README.md, in less than 8 minutes
    python scripts/bench/engine.py --size tiny --quick   whether it works, in a minute
    python scripts/bench/engine.py --profile ours-3      where the time of a step goes
    python scripts/bench/engine.py --profile ours-3 --timeline timeline.json   when what runs: for chrome://tracing or ui.perfetto.dev

On a shared machine a median says little by itself. Peers take turns of a few steps, in changing order, and a ratio is the median of
the ratios of turns that were next to each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would otherwise look up the machine's name, which need not resolve
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from contestants import MODELS, REFERENCE, Task, deepspeed_is_installed  # noqa: E402
from measure import machine  # noqa: E402
from ranks import Ranks  # noqa: E402

from framework.progress import progress  # noqa: E402

PEERS = {
    "ours-0": ("ddp", "deepspeed-0"),
    "ours-1": ("deepspeed-1",),
    "ours-2": ("fsdp2-keep", "deepspeed-2"),
    "ours-3": ("fsdp2-reshard", "deepspeed-3"),
    "ours-2-offload": ("deepspeed-2-offload",),
    "ours-3-offload": ("deepspeed-3-offload",),
    "ours-3-offload-all": ("fsdp2-reshard-offload-all", "deepspeed-3-offload-all"),
}
"""Who is compared with whom: the same placement of parameters, gradients and optimizer state. FSDP2 that keeps parameters after forward
still frees them after backward, where stage 2 never does."""
PER_BLOCK = (REFERENCE, "ours-0", "ddp", "ours-1", "ours-2", "fsdp2-keep", "deepspeed-2", "ours-3", "fsdp2-reshard", "deepspeed-3")
"""Whose time per block is measured, on one rank and the `narrow` model, where neither computing nor sending takes any."""
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
COMPARED_STEPS = 10
"""Losses must agree in the first steps; later, what differs in the last bit has grown (plain torch in fp32 and fp64 part alike)."""
MIB = 2**20


@dataclass
class Row:
    """What was measured of one contestant in one group of peers."""

    name: str
    resting_bytes: int | None = None
    """In use after a step, by the C library; the most of any rank, like all bytes here."""
    peak_bytes: int | None = None
    """The most in use within a step; activations are part of it."""
    own_resting_bytes: int | None = None
    own_peak_bytes: int | None = None
    peak_by_formula: int | None = None
    """What `own_peak_bytes` and `own_sent_bytes` should be, see theory.py."""
    sent_by_theory: int | None = None
    losses: list[float] = field(default_factory=list)
    """Mean over the ranks, of every step."""
    turn_s: list[float] = field(default_factory=list)
    """Median step of each turn, of the slowest rank."""
    sent_bytes: float | None = None
    own_sent_bytes: float | None = None

    @property
    def step_s(self) -> float:
        return statistics.median(self.turn_s)


def main() -> None:
    args = parse_args()
    task = Task(args.size, args.precision, args.micro_batch, args.tokens_per_sample)
    if args.profile:
        print(run_profile(args.profile, task, args))
        return
    here = machine()
    print(heading(here, task, args), flush=True)
    groups = []
    for ours in (name for name in PEERS if int(name.split("-")[1]) in args.stages and (args.offload or "offload" not in name)):
        groups.append(run_group([REFERENCE, ours, *filter(is_installed, PEERS[ours])], task, args))
        print(table_rows(groups[-1]), flush=True)
    check_losses(groups, task)
    ratios = [ratio for group in groups for ratio in compare(group)]
    print(ratio_table(ratios))
    print(theory_table(groups), flush=True)
    per_block = run_per_block(task, args)
    print(per_block_table(per_block))
    if args.json:
        facts = {"date": str(date.today()), "machine": here, "settings": vars(args), "ratios": ratios}
        for name, measured in (("rows", [row for group in groups for row in group]), ("per_block", per_block)):
            facts[name] = [vars(row) | {"step_s": row.step_s} for row in measured]
        Path(args.json).write_text(json.dumps(facts, indent=1, default=str))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=MODELS, default="small")
    parser.add_argument(
        "--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3], help="ours, each with its peers (default all)"
    )
    parser.add_argument("--world-size", type=int, default=2, help="ranks, on this machine (default 2)")
    parser.add_argument("--precision", choices=LOSS_TOLERANCE, default="float32")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples per rank and step (default 1: the engine matters most)")
    parser.add_argument("--tokens-per-sample", type=int, default=64)
    parser.add_argument(
        "--offload", action=argparse.BooleanOptionalAction, default=True, help="with and without (default), or only without"
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns of every contestant (default 8)")
    parser.add_argument("--steps-per-turn", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each rank (default 1)")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 2 steps: the numbers mean nothing")
    parser.add_argument("--json", metavar="FILE", help="also write everything that was measured")
    parser.add_argument("--profile", metavar="CONTESTANT", help="profile this one (ours-0 ... ours-3, ddp, fsdp2-keep, ...) instead")
    parser.add_argument("--timeline", metavar="FILE", help="with --profile: write when what runs, in Chrome's trace format")
    args = parser.parse_args()
    if args.timeline and not args.profile:
        parser.error("--timeline shows the contestant that --profile names")
    if args.quick:
        args.rounds, args.steps_per_turn = 2, 2
    return args


def is_installed(name: str) -> bool:
    return deepspeed_is_installed() or not name.startswith("deepspeed")


def run_group(names: list[str], task: Task, args: argparse.Namespace) -> list[Row]:
    """Measure peers: memory of one after the other, then time in turns, all in processes of their own."""
    rows = {name: Row(name) for name in names}
    for name in progress(names, f"memory of {', '.join(names)}", unit="contestants"):
        with Ranks(name, task, args.world_size, args.threads) as ranks:
            counted = ranks.run("count_memory")
        for key in counted[0]:
            setattr(rows[name], key, max((one[key] for one in counted if one[key] is not None), default=None))
    take_turns(rows, task, args.world_size, args)
    return list(rows.values())


def run_per_block(task: Task, args: argparse.Namespace) -> list[Row]:
    """Time alone, of one rank each with the `narrow` model."""
    rows = {name: Row(name) for name in filter(is_installed, PER_BLOCK)}
    take_turns(rows, replace(task, size="narrow", tokens_per_sample=4), 1, args)
    return list(rows.values())


def take_turns(rows: dict[str, Row], task: Task, world_size: int, args: argparse.Namespace) -> None:
    names = list(rows)
    with ExitStack() as stack:
        waiting = {name: stack.enter_context(Ranks(name, task, world_size, args.threads)) for name in names}
        for ranks in waiting.values():
            ranks.run("build")
        for number in progress(range(args.rounds + 1), f"time of {', '.join(names)}", unit="rounds"):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                add_turn(rows[name], waiting[name].run("take_turn", args.steps_per_turn), is_warm_up=number == 0)


def add_turn(row: Row, turns: list[dict], *, is_warm_up: bool) -> None:
    row.losses += mean_over_ranks(turns)
    if is_warm_up:
        return
    row.turn_s.append(max(turn["median_s"] for turn in turns))
    row.sent_bytes = max((turn["sent_bytes"] for turn in turns if turn["sent_bytes"] is not None), default=None)
    row.own_sent_bytes = max((turn["own_sent_bytes"] for turn in turns if turn["own_sent_bytes"] is not None), default=None)


def mean_over_ranks(results: list[dict]) -> list[float]:
    return [statistics.fmean(losses) for losses in zip(*(one["losses"] for one in results), strict=True)]


def check_losses(groups: list[list[Row]], task: Task) -> None:
    """Nobody may be fast by doing something else. Raises AssertionError naming who differs."""
    rows = [row for group in groups for row in group if row.name != REFERENCE]
    expected, tolerance = rows[0], LOSS_TOLERANCE[task.precision]
    for row in rows[1:]:
        for step, (loss, wanted) in enumerate(zip(row.losses[:COMPARED_STEPS], expected.losses[:COMPARED_STEPS], strict=True), 1):
            assert abs(loss - wanted) <= tolerance * wanted, f"step {step}: {row.name} has loss {loss:.6f}, {expected.name} {wanted:.6f}"


def compare(group: list[Row]) -> list[dict]:
    """Ours over each peer of its group; below 1, ours needs less."""
    _, ours, *peers = group
    found = []
    for peer in peers:
        low, middle, high = statistics.quantiles(mine / theirs for mine, theirs in zip(ours.turn_s, peer.turn_s, strict=True))
        found.append(
            {
                "ours": ours.name,
                "peer": peer.name,
                "time": middle,
                "time_quartiles": (low, high),
                "resting": quotient(ours.resting_bytes, peer.resting_bytes),
                "peak": quotient(ours.peak_bytes, peer.peak_bytes),
                "sent": quotient(ours.sent_bytes, peer.sent_bytes),
            }
        )
    return found


def quotient(mine: float | None, theirs: float | None) -> float | None:
    return mine / theirs if mine and theirs else None


def heading(here: dict, task: Task, args: argparse.Namespace) -> str:
    """What the numbers depend on, and the head of the first table, in Markdown."""
    parameters = sum(p.numel() for p in task.model().parameters())
    lines = [
        f"{date.today()}, {here['cpu']}, {here['cores']} cores, load before the start {here['load']:.1f}, "
        f"Python {here['python']}, torch {here['torch']}",
        f"Llama with {parameters / 1e6:.1f}M parameters, {task.precision}, {args.world_size} ranks (gloo) with {args.threads} threads, "
        f"{task.micro_batch} x {task.tokens_per_sample} tokens per rank and step, {args.rounds} turns of {args.steps_per_turn} steps",
        "" if deepspeed_is_installed() else "DeepSpeed is not installed and left out.\n",
        "| contestant | step ms | over alone ms | at rest MiB | own meter | peak MiB | own meter | sent MiB | own count | last loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    return "\n".join(lines)


def table_rows(group: list[Row]) -> str:
    alone = group[0]
    lines = []
    for row in group:
        over = statistics.median(mine - base for mine, base in zip(row.turn_s, alone.turn_s, strict=True))
        cells = [
            row.name,
            f"{1e3 * row.step_s:.0f}",
            f"{1e3 * over:.0f}" if row is not alone else "",
            *map(mebibytes, (row.resting_bytes, row.own_resting_bytes, row.peak_bytes, row.own_peak_bytes)),
            *map(mebibytes, (row.sent_bytes, row.own_sent_bytes)),
            f"{row.losses[-1]:.5f}" if row is not alone else "(differs)",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio_table(ratios: list[dict]) -> str:
    lines = ["", "| ours / peer | step time | its quartiles | at rest | peak | sent |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for ratio in ratios:
        low, high = ratio["time_quartiles"]
        cells = [f"{ratio['time']:.2f}", f"{low:.2f}-{high:.2f}"]
        cells += [f"{ratio[key]:.2f}" if ratio[key] is not None else "" for key in ("resting", "peak", "sent")]
        lines.append(f"| {ratio['ours']} / {ratio['peer']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def theory_table(groups: list[list[Row]]) -> str:
    """Our own counts over what they should be."""
    lines = ["", "| ours / theory | bytes sent | peak of model state |", "| --- | ---: | ---: |"]
    for ours in (row for group in groups for row in group if row.sent_by_theory is not None):
        sent, peak = quotient(ours.own_sent_bytes, ours.sent_by_theory), quotient(ours.own_peak_bytes, ours.peak_by_formula)
        cells = ["" if sent is None else f"{sent:.6f}", "" if peak is None else f"{peak:.4f}"]
        lines.append(f"| {ours.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def per_block_table(rows: list[Row]) -> str:
    """What a step takes longer than the reference's, for each block and for the root."""
    alone, units = rows[0], MODELS["narrow"].num_hidden_layers + 1
    lines = ["", f"| {units} units, 1 rank | step ms | over alone, us per unit |", "| --- | ---: | ---: |"]
    for row in rows:
        over = statistics.median(mine - base for mine, base in zip(row.turn_s, alone.turn_s, strict=True))
        lines.append(f"| {row.name} | {1e3 * row.step_s:.1f} | {'' if row is alone else f'{1e6 * over / units:.0f}'} |")
    return "\n".join(lines)


def mebibytes(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:.1f}"


def run_profile(name: str, task: Task, args: argparse.Namespace) -> str:
    """Rank 0's profile; the other ranks are profiled, too, so that all are slowed down alike."""
    with Ranks(name, task, args.world_size, args.threads) as ranks:
        ranks.run("build")
        ranks.run("take_turn", 2)
        if args.timeline:
            trace = ranks.run("timeline", 2)[0]
            Path(args.timeline).write_text(json.dumps(trace))
            return f"{args.timeline}: {len(trace['traceEvents'])} events, for chrome://tracing or ui.perfetto.dev"
        return ranks.run("profile", 2 if args.quick else 10, 14)[0]


if __name__ == "__main__":
    main()
