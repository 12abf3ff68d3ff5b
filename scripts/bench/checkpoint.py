"""Our checkpoints against torch's distributed checkpoint (DCP, on FSDP2) and DeepSpeed: stall, saving, loading, export, in one run.

    python scripts/bench/checkpoint.py                        the tables of README.md, about 5 minutes
    python scripts/bench/checkpoint.py --size tiny --quick    whether it works, in seconds

The same small Llama with AdamW, sharded as ZeRO stage 3 over 2 ranks. Contestants take turns, the disk among them: as many bytes, written
plainly. All flush what they write to the disk, but for DeepSpeed as it is. Loads come from memory where the system still has the files
there, for all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import savers  # noqa: E402
from contestants import MODELS, Task, deepspeed_is_installed  # noqa: E402
from measure import machine  # noqa: E402
from ranks import Ranks  # noqa: E402

from framework.progress import progress  # noqa: E402

BYTES_PER_PARAMETER = 12
"""Masters and two moments in fp32; DeepSpeed writes bf16 or fp32 parameters besides."""


@dataclass(frozen=True)
class Way:
    """How a contestant saves and loads."""

    contestant: str
    save: Callable
    load: Callable | None = None
    """None: what it saves is loaded in another row."""
    background: bool = False
    export: Callable | None = None
    other_world: bool = False
    """Whether it loads what another number of ranks has saved, without a conversion."""


WAYS = {
    "ours": Way("ours-3", savers.save_ours, savers.load_ours, export=savers.export_ours, other_world=True),
    "ours, in the background": Way("ours-3", savers.save_ours, background=True),
    "DCP": Way("fsdp2-reshard", savers.save_dcp, savers.load_dcp, export=savers.export_dcp, other_world=True),
    "DCP async_save": Way("fsdp2-reshard", savers.save_dcp, background=True),
    "DeepSpeed": Way("deepspeed-3", savers.save_deepspeed, savers.load_deepspeed),
    "DeepSpeed, flushed": Way("deepspeed-3", savers.save_deepspeed_flushed),
}


@dataclass
class Row:
    """Seconds of the slowest rank, of each turn."""

    name: str
    stall: list[float] = field(default_factory=list)
    save: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    load_elsewhere: list[float] = field(default_factory=list)
    export: list[float] = field(default_factory=list)

    def median(self, key: str) -> float | None:
        return statistics.median(values) if (values := getattr(self, key)) else None


def main() -> None:
    args = parse_args()
    task = Task(args.size, "float32", 1, 64)
    nbytes = BYTES_PER_PARAMETER * sum(parameter.numel() for parameter in task.model().parameters())
    here = machine()
    print(
        f"{date.today()}, {here['cpu']}, {here['cores']} cores, load before the start {here['load']:.1f}, Python {here['python']}, "
        f"torch {here['torch']}\n{nbytes / 1e6:,.0f} MB of state, 2 ranks (gloo) with 1 thread, {args.rounds} turns\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.folder) as folder:
        rows = measure(task, nbytes, Path(folder), args.rounds)
    print(table(rows, nbytes))
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": here, "bytes": nbytes, "rows": [vars(row) for row in rows]}, indent=1))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=MODELS, default="small")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contestant (default 5)")
    parser.add_argument("--folder", help="on the disk that is measured (default: that of temporary files)")
    parser.add_argument("--quick", action="store_true", help="1 round: the numbers mean nothing")
    parser.add_argument("--json", metavar="FILE", help="also write everything that was measured")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
    return args


def measure(task: Task, nbytes: int, folder: Path, rounds: int) -> list[Row]:
    """The first row is that of the disk. A round before the first one, in which memory is allocated, does not count."""
    ways = {name: way for name, way in WAYS.items() if deepspeed_is_installed() or way.contestant != "deepspeed-3"}
    rows = {name: Row(name) for name in ("disk alone", *ways)}
    with ExitStack() as stack:
        pairs = {way.contestant: stack.enter_context(Ranks(way.contestant, task, 2, 1)) for way in ways.values()}
        alone = {way.contestant: stack.enter_context(Ranks(way.contestant, task, 1, 1)) for way in ways.values() if way.other_world}
        for ranks in (*pairs.values(), *alone.values()):
            ranks.run("build")
            ranks.run("take_turn", 1)  # the optimizer's state
        for number in progress(range(rounds + 1), "saving and loading", unit="rounds"):
            names = list(rows)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                row = rows[name] if number else Row(name)
                if name not in ways:
                    row.save.append(max(pairs["ours-3"].run("call", savers.plain_write, nbytes, folder)))
                else:
                    take_turn(row, ways[name], pairs[ways[name].contestant], alone.get(ways[name].contestant), folder / "checkpoint")
    return list(rows.values())


def take_turn(row: Row, way: Way, ranks: Ranks, alone: Ranks | None, folder: Path) -> None:
    """Save, load, load on one rank, export. What was saved must be what is loaded."""
    before = ranks.run("call", savers.digest) if way.contestant != "deepspeed-3" else None
    seconds = ranks.run("call", way.save, folder, way.background)
    row.stall.append(max(one["stall"] for one in seconds))
    row.save.append(max(one["save"] for one in seconds))
    if way.load is not None:
        if before is not None:
            ranks.run("take_turn", 1)  # so that loading has something to put back
        row.load.append(max(ranks.run("call", way.load, folder)))
        assert before is None or ranks.run("call", savers.digest) == before, f"{row.name} has not loaded what it saved"
    if way.other_world:
        row.load_elsewhere += alone.run("call", way.load, folder)
        (whole,) = alone.run("call", savers.digest)
        assert abs(whole - sum(before)) <= 1e-9 * whole, f"{row.name} has loaded something else on one rank"
    if way.export is not None:
        row.export.append(max(ranks.run("call", way.export, folder.with_name("export"))))
    ranks.run("call", savers.clear, folder)


def table(rows: list[Row], nbytes: int) -> str:
    """Medians; in brackets the medians of ours / theirs within a turn, where a like of ours is there."""
    lines = [
        "| contestant | stall s | save GB/s | of the disk | load GB/s | load on 1 rank GB/s | export s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    disk = rows[0].save
    for row in rows:
        share = statistics.median(plain / mine for plain, mine in zip(disk, row.save, strict=True))
        cells = [row.name, seconds(row.median("stall")), rate(nbytes, row.median("save")), f"{share:.2f}"]
        cells += [rate(nbytes, row.median("load")), rate(nbytes, row.median("load_elsewhere")), seconds(row.median("export"))]
        lines.append(f"| {' | '.join(cells)} |")
    named = {row.name: row for row in rows}
    lines += ["", "| ours / theirs | stall | save | load | load on 1 rank | export |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for ours, theirs in (
        ("ours", "DCP"),
        ("ours", "DeepSpeed"),
        ("ours", "DeepSpeed, flushed"),
        ("ours, in the background", "DCP"),
        ("ours, in the background", "DCP async_save"),
        ("ours, in the background", "DeepSpeed"),
    ):
        if theirs in named:
            cells = [ratio(named[ours], named[theirs], key) for key in ("stall", "save", "load", "load_elsewhere", "export")]
            lines.append(f"| {ours} / {theirs} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio(ours: Row, theirs: Row, key: str) -> str:
    pairs = list(zip(getattr(ours, key), getattr(theirs, key), strict=False))
    return f"{statistics.median(mine / other for mine, other in pairs):.2f}" if pairs else ""


def rate(nbytes: int, duration: float | None) -> str:
    return "" if duration is None else f"{nbytes / duration / 1e9:.2f}"


def seconds(duration: float | None) -> str:
    return "" if duration is None else f"{duration:.3f}"


if __name__ == "__main__":
    main()
