"""Golden traces: what a rank asks of its process groups in a training step, in which order among the blocks' computation, and how many
bytes it sends for it, on 8, 64 and 1,024 ranks. What is expected is written down here from the design, byte by byte.

Traced are rank 0 and the last rank, of process groups that move no data, with tensors that hold none. So a model of 8 billion parameters
can be traced on 1,024 ranks, and the peak of its model state be held against the plan's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from framework.config.schema import LlamaConfig
from framework.models.llama import Llama
from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine, ZeroModuleConfig, wire
from framework.zero.comm import Comm
from framework.zero.memory import state_bytes
from framework.zero.traffic import bytes_sent

Trace = list[tuple]
"""("gather" | "scatter" | "exchange" | "sum", ranks of the group, bytes that this rank sends), and ("forward" | "backward", number of a
block), which begins to compute."""


WORLD_SIZES = (8, 64, 1024)
MEMBERS = 8
"""Ranks of a shard group, in rows that have some: one group, 8 or 128."""


class Way(NamedTuple):
    """How parameters and their gradients travel. Between shard groups, where there are several, goes what is named so."""

    gathers: str
    """once: what is stale, at first use after a step; kept: each block in a forward, one ahead; twice: and again in its backward."""
    reduces: str
    """scatter, exchange (of int8 blocks) or sum (over all ranks)."""
    reduces_each: bool = False
    """Whether every micro-batch reduces, or the last one for all."""
    int8_gathers: bool = False
    between_gathers: str = "never"
    """In the first gather after a "step", or in every "forward"."""
    between_reduces: str = "sum"
    """sum: groups have the same; scatter, exchange (of int4 blocks): each has a part of it."""
    between_each: bool = False
    """Whether every micro-batch reduces between groups, or the last one for all."""


NEVER, ONCE = Way("never", "sum"), Way("once", "scatter")
STAGE_2, STAGE_3 = ONCE._replace(reduces_each=True), Way("twice", "scatter", reduces_each=True)
WORLD_OPTIMIZER = STAGE_3._replace(between_gathers="step", between_reduces="scatter")
SECONDARY = STAGE_3._replace(between_gathers="forward", between_reduces="scatter", between_each=True)


class Row(NamedTuple):
    """A row of the policy table, and what follows from it."""

    zero: ZeroConfig
    way: Way
    micro_batches: int = 1
    others: dict[str, Way] = {}
    """Ways of the parameters whose names begin so."""
    adapters: bool = False
    """Whether only they are trained, over a frozen base."""

    @property
    def members(self) -> int | None:
        return self.zero.secondary_shard_size or self.zero.shard_size


def stage_3(**settings) -> ZeroConfig:
    """With one block gathered ahead."""
    return ZeroConfig(stage=3, prefetch_bytes=1, **settings)


RULES = [
    ZeroModuleConfig(pattern="embed", stage=1),
    ZeroModuleConfig(pattern="blocks.1", stage=2),
    ZeroModuleConfig(pattern="blocks.2", reshard_after_forward=False),
]
RULED = {"embed": ONCE, "blocks.1": STAGE_2, "blocks.2": STAGE_3._replace(gathers="kept")}
ROWS = {
    "stage 0": Row(ZeroConfig(stage=0), NEVER),
    "stage 1": Row(ZeroConfig(stage=1), ONCE),
    "stage 2": Row(ZeroConfig(stage=2), STAGE_2),
    "stage 3": Row(stage_3(), STAGE_3),
    "stage 3, kept after forward": Row(stage_3(reshard_after_forward=False), STAGE_3._replace(gathers="kept")),
    "stage 1, adapters": Row(ZeroConfig(stage=1), ONCE, adapters=True),
    "stage 3, adapters": Row(stage_3(), STAGE_3, adapters=True),
    "stage 0, 2 micro-batches": Row(ZeroConfig(stage=0), NEVER, 2),
    "stage 1, 2 micro-batches": Row(ZeroConfig(stage=1), ONCE, 2),
    "stage 2, 2 micro-batches": Row(ZeroConfig(stage=2), STAGE_2, 2),
    "stage 3, 2 micro-batches": Row(stage_3(), STAGE_3, 2),
    "stage 2, groups": Row(ZeroConfig(stage=2, shard_size=MEMBERS), STAGE_2, 2),
    "HSDP": Row(stage_3(shard_size=MEMBERS), STAGE_3),
    "HSDP, 2 micro-batches": Row(stage_3(shard_size=MEMBERS), STAGE_3, 2),
    "HFSDP, 2 micro-batches": Row(stage_3(shard_size=MEMBERS, shard_optimizer="world"), WORLD_OPTIMIZER, 2),
    "hpZ": Row(stage_3(secondary_shard_size=MEMBERS), SECONDARY),
    "hpZ, 2 micro-batches": Row(stage_3(secondary_shard_size=MEMBERS), SECONDARY, 2),
    "some blocks stay gathered": Row(stage_3(keep_gathered_bytes=150_000), STAGE_3),
    "all that fits stays gathered": Row(stage_3(keep_gathered_bytes=600_000), STAGE_3, 2),
    "modules": Row(stage_3(modules=RULES), STAGE_3, others=RULED),
    "int8": Row(stage_3(gather_compression="int8", reduce_compression="int8"), STAGE_3._replace(int8_gathers=True, reduces="exchange")),
    "hpZ, int8 and int4 gradients": Row(
        stage_3(secondary_shard_size=MEMBERS, reduce_compression="int8"),
        SECONDARY._replace(reduces="exchange", between_reduces="exchange"),
    ),
}


class Block(nn.Module):
    def __init__(self, adapters: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(60, 250, bias=False), nn.Linear(250, 60, bias=False)
        self.last = nn.Linear(60, 60, bias=False)
        if adapters:
            self.up.requires_grad_(False)
            self.down.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.down(self.up(x)))


class Model(nn.Module):
    """Matrix products alone, which are quick on the meta device."""

    def __init__(self, adapters: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(24, 60, bias=False), nn.Linear(60, 100, bias=False)
        self.blocks = nn.ModuleList(Block(adapters) for _ in range(4))
        if adapters:
            self.embed.requires_grad_(False)
            self.head.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


# -- what is expected -------------------------------------------------------------------------------------------------------------


COMPUTE, MASTER = 2, 4
"""Bytes of a parameter in bf16, and of its gradient."""
Unit = int | str
"""The blocks by their number, and the root, which has the rest."""


@dataclass(eq=False)
class Flat:
    """Parameters of a unit that travel together: with one way, all trained or all frozen."""

    way: Way
    trained: bool
    total: int = 0
    """Elements; a parameter takes a multiple of 256."""
    is_whole: bool = False
    """Gathered and current, or on its way."""
    has_chunk: bool = False
    """Whether the rank's group has all that is current of it."""
    arriving: Trace = field(default_factory=list)
    """What is still to be asked for where a gather goes in two hops, when it is waited for."""


class Expected:
    """The trace of a step by the design."""

    def __init__(self, row: Row, model: nn.Module, blocks: str, world_size: int, rank: int) -> None:
        self.row, self.world = row, range(world_size)
        self.members = row.members or world_size
        first = rank // self.members * self.members
        self.inside = range(first, first + self.members)
        self.between = range(rank % self.members, world_size, self.members)
        self.units: dict[Unit, list[Flat]] = {"root": []}
        for name, parameter in model.named_parameters():
            unit = int(name.removeprefix(blocks).split(".")[0]) if name.startswith(blocks) else "root"
            own = next((way for prefix, way in row.others.items() if name.startswith(prefix)), row.way)
            self.flat(unit, own, parameter.requires_grad).total += aligned(parameter.numel())
        for unit in self.units:
            self.units[unit] = [flat for flat in self.units[unit] if flat.total]
        self.trained = sum(parameter.requires_grad for parameter in model.parameters())
        self.last_block = max(unit for unit in self.units if unit != "root")
        self.keep_gathered(row.zero.keep_gathered_bytes)
        self.trace: Trace = []
        self.under_way: list[Trace] = []
        """Of reductions, what is still to be asked for when they are waited for."""

    def flat(self, unit: Unit, way: Way, trained: bool) -> Flat:
        """Trained ones come first, those with a way of their own last."""
        flats = self.units.setdefault(unit, [])
        if not flats:
            flats += [Flat(self.row.way, True), Flat(self.row.way, False)]
        if not (found := [flat for flat in flats if (flat.way, flat.trained) == (way, trained)]):
            flats.append(found := Flat(way, trained))
            return found
        return found[0]

    def keep_gathered(self, room: int) -> None:
        """Units that fit are gathered once: blocks in their order, and the root at the end."""
        for unit in (*range(self.last_block + 1), "root"):
            nbytes = sum(self.members * self.chunk(flat) * COMPUTE for flat in self.units[unit])
            if nbytes <= room:
                room -= nbytes
                for flat in self.units[unit]:
                    flat.way = flat.way._replace(gathers="once")

    def part(self, flat: Flat) -> int:
        """Elements of a rank's masters, a multiple of 256."""
        return aligned(-(-flat.total // (self.members * self.parts(flat))))

    def chunk(self, flat: Flat) -> int:
        """Elements of a rank's share of what its group has."""
        return self.part(flat) * self.parts(flat)

    def parts(self, flat: Flat) -> int:
        return 1 if flat.way.between_reduces == "sum" else len(self.between)

    def step(self) -> Trace:
        """After another one."""
        for flat in (flat for flats in self.units.values() for flat in flats):
            flat.is_whole = flat.way.gathers == "never" or (flat.way.gathers == "once" and not flat.trained)
            flat.has_chunk = flat.way.between_gathers == "step" and not flat.trained
        for number in range(self.row.micro_batches):
            self.micro_batch(last=number == self.row.micro_batches - 1)
        sums = 7 + self.trained  # of squares, losses, tokens, requests (2), order of calls (2), and which parameters were used
        return [*self.trace, *send("sum", self.world, sums, 8)]

    def micro_batch(self, *, last: bool) -> None:
        blocks = [*range(self.last_block + 1)]
        order = ["root", *blocks, "root", *reversed(blocks)]
        for at, unit in enumerate(order):
            self.use(order, at)
            if unit != "root":
                is_forward = at <= len(blocks)
                self.trace.append(("forward" if is_forward else "backward", unit))
                if not is_forward:
                    self.reduce(unit, last)
                if not is_forward or unit != self.last_block:  # whose backward comes next
                    self.release(unit, before_backward=is_forward)
        self.reduce("root", last)
        self.wait_for_reductions(0)
        self.release("root", before_backward=False)

    def use(self, order: list[Unit], at: int) -> None:
        """All up to the next block that is released again is on its way when a unit begins."""
        for place, unit in enumerate(order[at:]):
            is_released = unit != "root" and any(flat.way.gathers in ("kept", "twice") for flat in self.units[unit])
            if place > 2 and unit == order[at] and is_released:
                break  # it is released before; the last block is not, with only the root between its two uses
            for flat in self.units[unit]:
                self.gather(flat)
            if place and is_released and unit != order[at]:
                break
        for flat in self.units[order[at]]:
            self.trace += flat.arriving
            flat.arriving = []

    def gather(self, flat: Flat) -> None:
        if flat.is_whole:
            return
        flat.is_whole = True
        inside = send("gather", self.inside, self.members * self.chunk(flat), COMPUTE, 8 * flat.way.int8_gathers)
        if flat.way.between_gathers == "never" or flat.has_chunk or len(self.between) == 1:
            self.trace += inside
        else:
            self.trace += send("gather", self.between, self.chunk(flat), COMPUTE)
            flat.arriving = inside
        flat.has_chunk = flat.way.between_gathers == "step"

    def release(self, unit: Unit, *, before_backward: bool) -> None:
        for flat in self.units[unit]:
            if flat.way.gathers == "twice" or (flat.way.gathers == "kept" and not before_backward):
                flat.is_whole = False
                flat.has_chunk = flat.has_chunk or (before_backward and flat.way.between_gathers == "forward")

    def reduce(self, unit: Unit, last: bool) -> None:
        for flat in self.units[unit]:
            way = flat.way
            if not flat.trained or not (last or way.reduces_each):
                continue
            self.wait_for_reductions(1)
            between = []
            if way.reduces == "sum":
                self.trace += send("sum", self.world, flat.total, MASTER)
            else:
                self.trace += send(way.reduces, self.inside, self.members * self.chunk(flat), MASTER, 8)
                if last or way.between_each:
                    between = send(way.between_reduces, self.between, self.chunk(flat), MASTER, 4)
            self.under_way.append(between)

    def wait_for_reductions(self, under_way: int) -> None:
        """But for so many, the newest."""
        while len(self.under_way) > under_way:
            self.trace += self.under_way.pop(0)


def send(kind: str, ranks: range, numel: int, itemsize: int, bits: int = 0) -> Trace:
    """`numel` elements over `ranks`. What is exchanged, and gathered in `bits`, goes as blocks of 64 with an fp32 scale each."""
    others = len(ranks) - 1
    if not others:
        return []
    if kind == "sum":
        return [(kind, ranks, 2 * others * numel * itemsize // len(ranks))]
    if kind == "exchange" or (kind == "gather" and bits):
        return [(kind, ranks, others * (numel * bits // 8) // len(ranks)), (kind, ranks, others * (numel // 64 * 4) // len(ranks))]
    return [(kind, ranks, others * numel * itemsize // len(ranks))]


def aligned(numel: int) -> int:
    return -(-numel // 256) * 256


# -- what happens -----------------------------------------------------------------------------------------------------------------


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """This process is `rank` of a group that communicates nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ranks_of(group: dist.ProcessGroup) -> range:
    ranks = dist.get_process_group_ranks(group)
    evenly = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
    assert ranks == list(evenly)
    return evenly


def record_calls(trace: Trace, patch: pytest.MonkeyPatch) -> None:
    """What the engine asks of `Comm`, by its own count of bytes."""
    kinds = {Comm.all_gather: "gather", Comm.reduce_scatter: "scatter", Comm.exchange: "exchange", Comm.all_reduce: "sum"}
    for original, kind in kinds.items():

        def call(comm: Comm, *args, original=original, kind: str = kind, **options):
            before = comm.bytes_sent
            handle = original(comm, *args, **options)
            if comm.size > 1:
                trace.append((kind, ranks_of(comm.group), comm.bytes_sent - before))
            return handle

        patch.setattr(Comm, original.__name__, call)


def record_computing(trace: Trace, blocks: nn.ModuleList, last: str) -> None:
    """When blocks compute. `last`: a parameter that a block uses last in forward, so that backward computes its gradient first."""
    for number, block in enumerate(blocks):
        forward, backward = ("forward", number), ("backward", number)
        block.register_forward_pre_hook(lambda module, args, mark=forward: trace.append(mark))
        block.get_parameter(last).register_hook(lambda grad, mark=backward: trace.append(mark))


class Witness(TorchDispatchMode):
    """What torch is asked for, told from the tensors alone."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: Trace = []
        self.groups: dict[str, set[str]] = {}
        """Names of the process groups that were asked, by kind."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            asked = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            group = ranks_of(asked)
            others = len(group) - 1
            match func._opname:
                case "_allgather_base_":
                    seen = ("gather", group, others * args[1].nbytes)
                case "_reduce_scatter_base_":
                    seen = ("scatter", group, others * args[0].nbytes)
                case "alltoall_base_":
                    seen = ("exchange", group, others * args[1].nbytes // len(group))
                case "allreduce_":
                    seen = ("sum", group, 2 * others * args[0][0].nbytes // len(group))
                case other:
                    seen = (other, group)
            self.trace.append(seen)
            self.groups.setdefault(seen[0], set()).add(asked.group_name)
        return func(*args, **(kwargs or {}))


def sum_without_values(
    q: torch.Tensor, scales: torch.Tensor, numel: int, *, sum_dtype: torch.dtype, **_
) -> tuple[None, None, torch.Tensor]:
    """The shape of what `dequantize_sum_quantize` adds up: plain torch takes seconds for 1,024 parts, although they hold nothing."""
    return None, None, q.new_empty(numel, dtype=sum_dtype)


class Traced(NamedTuple):
    recorded: Trace
    witness: Witness
    expected: Trace
    sent_bytes: int
    """By the engine's sum."""
    formula_bytes: int


def trace_second_step(row: Row, world_size: int, rank: int, patch: pytest.MonkeyPatch) -> Traced:
    """The first step shows the order in which blocks are used."""
    with fake_rank(rank, world_size):
        with torch.device("meta"):
            model = Model(row.adapters)
            x = torch.zeros(2, 24, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters())
        engine = ZeroEngine(model, row.zero, PrecisionConfig(compute_dtype="bfloat16"), optimizer=optimizer, device="meta")
        trace: Trace = []
        patch.setattr(wire, "dequantize_sum_quantize", sum_without_values)
        record_calls(trace, patch)
        record_computing(trace, model.blocks, "last.weight")
        shape = {"group_size": row.members, "compute_itemsize": 2, "micro_batches": row.micro_batches, "compression": row.zero}
        state = state_bytes(
            engine.layouts, engine.policy, world_size, rank=rank, optimizer_itemsize=0, prefetch_bytes=row.zero.prefetch_bytes, **shape
        )
        formula = bytes_sent(engine.layouts, engine.policy, world_size, inputs_need_grad=not row.adapters, **shape)
        for mode in (nullcontext(), witness := Witness()):
            trace.clear()
            before = engine.bytes_sent
            with mode:
                for number in range(row.micro_batches):
                    engine.backward(engine.module(x), 8, last=number == row.micro_batches - 1)
                engine.step()
        assert engine.memory.peak == state.total, (world_size, rank)
        expected = Expected(row, model, "blocks.", world_size, rank).step()
        return Traced(list(trace), witness, expected, engine.bytes_sent - before, formula)


def only_communication(trace: Trace) -> Trace:
    return [entry for entry in trace if len(entry) == 3]


@pytest.mark.parametrize("row", ROWS)
def test_first_and_last_rank_send_what_the_policy_says_in_its_order(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for world_size in WORLD_SIZES:
        for rank in (0, world_size - 1):
            with monkeypatch.context() as patch:
                traced = trace_second_step(ROWS[row], world_size, rank, patch)
            assert traced.recorded == traced.expected, (world_size, rank)
            assert traced.witness.trace == only_communication(traced.expected), (world_size, rank)
            nbytes = sum(nbytes for _, _, nbytes in only_communication(traced.expected))
            assert traced.sent_bytes == traced.formula_bytes == nbytes, (world_size, rank)
            gathers, scatters, exchanges = (traced.witness.groups.get(kind, set()) for kind in ("gather", "scatter", "exchange"))
            assert not gathers & (scatters | exchanges), "a gather would wait for a reduction"


LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)


def test_a_model_of_8_billion_parameters_on_1024_ranks_follows_trace_and_plan_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.process_time()
    zero = ZeroConfig(stage=3)
    with fake_rank(1023, 1024):
        with torch.device("meta"):
            model = Llama(LLAMA_3_8B)
            ids = torch.zeros(1, 16, dtype=torch.long)
        engine = ZeroEngine(
            model, zero, PrecisionConfig(compute_dtype="bfloat16"), optimizer=torch.optim.AdamW(model.parameters()), device="meta"
        )
        trace: Trace = []
        record_calls(trace, monkeypatch)
        record_computing(trace, model.model.layers, "mlp.down_proj.weight")
        for _ in range(2):
            trace.clear()
            before = engine.bytes_sent
            engine.backward(engine.module(ids, ids, trained_tokens=16), 16)
            engine.step()
        assert trace == Expected(Row(zero, STAGE_3), model, "model.layers.", 1024, 1023).step()
        planned = state_bytes(engine.layouts, engine.policy, 1024, rank=1023, compute_itemsize=2, prefetch_bytes=zero.prefetch_bytes)
        assert engine.bytes_sent - before == bytes_sent(engine.layouts, engine.policy, 1024, compute_itemsize=2)
    assert engine.memory.peak == planned.total
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert time.process_time() - began < 30
