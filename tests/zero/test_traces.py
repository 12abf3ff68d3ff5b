"""Golden traces: what a rank asks of its process groups in a training step, in which order among the blocks' computation, and how many
bytes it sends for it, on 8, 64 and 1,024 ranks. What is expected is written down here from the design, byte by byte.

Traced are rank 0 and the last rank, of a process group that moves no data, with tensors that hold none. So a model of 8 billion parameters
can be traced on 1,024 ranks, and the peak of its model state be held against the plan's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from framework.config.schema import LlamaConfig
from framework.models.llama import Llama
from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine
from framework.zero.comm import Comm
from framework.zero.memory import state_bytes

Trace = list[tuple]
"""("gather" | "scatter" | "sum", ranks of the group, bytes that this rank sends), and ("forward" | "backward", number of a block), which
begins to compute."""


WORLD_SIZES = (8, 64, 1024)


class Row(NamedTuple):
    """A row of the policy table, and what follows from it."""

    zero: ZeroConfig
    gathers: str
    """once: all that is stale, at first use after a step; kept: each block in a forward, one ahead; twice: and again in its backward."""
    reduces: str
    """scatter or sum."""
    micro_batches: int = 1
    reduces_each: bool = False
    """Whether every micro-batch reduces, or the last one for all."""
    adapters: bool = False
    """Whether only they are trained, over a frozen base."""


ONE_AHEAD = {"prefetch_bytes": 1}
ROWS = {
    "stage 0": Row(ZeroConfig(stage=0), "never", "sum"),
    "stage 1": Row(ZeroConfig(stage=1), "once", "scatter"),
    "stage 2": Row(ZeroConfig(stage=2), "once", "scatter"),
    "stage 3": Row(ZeroConfig(stage=3, **ONE_AHEAD), "twice", "scatter"),
    "stage 3, kept after forward": Row(ZeroConfig(stage=3, reshard_after_forward=False, **ONE_AHEAD), "kept", "scatter"),
    "stage 1, adapters": Row(ZeroConfig(stage=1), "once", "scatter", adapters=True),
    "stage 3, adapters": Row(ZeroConfig(stage=3, **ONE_AHEAD), "twice", "scatter", adapters=True),
    "stage 0, 2 micro-batches": Row(ZeroConfig(stage=0), "never", "sum", 2),
    "stage 1, 2 micro-batches": Row(ZeroConfig(stage=1), "once", "scatter", 2),
    "stage 2, 2 micro-batches": Row(ZeroConfig(stage=2), "once", "scatter", 2, reduces_each=True),
    "stage 3, 2 micro-batches": Row(ZeroConfig(stage=3, **ONE_AHEAD), "twice", "scatter", 2, reduces_each=True),
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


class Expected:
    """The trace of a step by the design. Units are the blocks by their number, and the root, which has the rest."""

    COMPUTE, MASTER = 2, 4
    """Bytes of a parameter in bf16, and of its gradient."""

    def __init__(self, row: Row, model: nn.Module, blocks: str, world_size: int) -> None:
        self.row, self.group, self.others = row, range(world_size), world_size - 1
        self.numels: dict[int | str, dict[bool, list[int]]] = {"root": {True: [], False: []}}
        for name, parameter in model.named_parameters():
            unit = int(name.removeprefix(blocks).split(".")[0]) if name.startswith(blocks) else "root"
            self.numels.setdefault(unit, {True: [], False: []})[parameter.requires_grad].append(parameter.numel())
        self.last_block = max(unit for unit in self.numels if unit != "root")

    def shard(self, unit: int | str, trained: bool) -> int:
        """Elements of a rank's share of `unit`: parameters and shares are multiples of 256 long."""
        total = sum(aligned(numel) for numel in self.numels[unit][trained])
        return aligned(-(-total // len(self.group)))

    def gather(self, unit: int | str) -> Trace:
        """Trained and frozen parameters apart; frozen ones only where they are sharded."""
        kinds = (True,) if self.row.gathers == "once" else (True, False)
        shards = [self.shard(unit, trained) for trained in kinds]
        return [("gather", self.group, self.others * shard * self.COMPUTE) for shard in shards if shard]

    def reduce(self, unit: int | str) -> Trace:
        if not (total := sum(aligned(numel) for numel in self.numels[unit][True])):
            return []
        if self.row.reduces == "sum":
            return [("sum", self.group, 2 * self.others * total * self.MASTER // len(self.group))]
        return [("scatter", self.group, self.others * self.shard(unit, True) * self.MASTER)]

    def step(self) -> Trace:
        trace = []
        for number in range(self.row.micro_batches):
            trace += self.forward(first=number == 0)
            trace += self.backward(reduces=self.row.reduces_each or number == self.row.micro_batches - 1)
        trained = sum(len(kinds[True]) for kinds in self.numels.values())
        sums = 7 + trained  # of squares, losses, tokens, requests (2), order of calls (2), and which parameters were used
        return [*trace, ("sum", self.group, 2 * self.others * sums * 8 // len(self.group))]

    def forward(self, *, first: bool) -> Trace:
        """A block is on its way before the one before it computes; the last one stays, and the one before it is called back."""
        trace, gathers, last = [], self.row.gathers, self.last_block
        if gathers == "once" and first:
            for unit in ("root", *range(last + 1)):
                trace += self.gather(unit)
        elif gathers in ("kept", "twice"):
            trace += self.gather("root") + self.gather(0)
        for block in range(last + 1):
            if gathers in ("kept", "twice") and block < last:
                trace += self.gather(block + 1)
            elif gathers == "twice":
                trace += self.gather(last - 1)
            trace.append(("forward", block))
        return trace

    def backward(self, *, reduces: bool) -> Trace:
        """A block's gradients are on their way, and the block before the next one, when the next one computes."""
        trace = []
        for block in range(self.last_block, -1, -1):
            if self.row.gathers == "twice" and 0 < block < self.last_block:
                trace += self.gather(block - 1)
            trace += [("backward", block), *(self.reduce(block) if reduces else [])]
        return trace + (self.reduce("root") if reduces else [])


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
    return range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])


def record_calls(trace: Trace, patch: pytest.MonkeyPatch) -> None:
    """What the engine asks of `Comm`, by its own count of bytes."""
    for original, kind in ((Comm.all_gather, "gather"), (Comm.reduce_scatter, "scatter"), (Comm.all_reduce, "sum")):

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

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            group = next(ranks_of(dist.ProcessGroup.unbox(arg)) for arg in args if isinstance(arg, torch.ScriptObject))
            others = len(group) - 1
            match func._opname:
                case "_allgather_base_":
                    self.trace.append(("gather", group, others * args[1].nbytes))
                case "_reduce_scatter_base_":
                    self.trace.append(("scatter", group, others * args[0].nbytes))
                case "allreduce_":
                    self.trace.append(("sum", group, 2 * others * args[0][0].nbytes // len(group)))
                case other:
                    self.trace.append((other, group))
        return func(*args, **(kwargs or {}))


def trace_second_step(row: Row, world_size: int, rank: int, patch: pytest.MonkeyPatch) -> tuple[Trace, Trace, Trace, int]:
    """(recorded, seen by the witness, expected, the engine's sum of bytes). The first step shows the order in which blocks are used."""
    with fake_rank(rank, world_size):
        with torch.device("meta"):
            model = Model(row.adapters)
            x = torch.zeros(2, 24, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters())
        engine = ZeroEngine(model, row.zero, PrecisionConfig(compute_dtype="bfloat16"), optimizer=optimizer, device="meta")
        trace: Trace = []
        record_calls(trace, patch)
        record_computing(trace, model.blocks, "last.weight")
        formula = state_bytes(
            engine.layouts,
            engine.policy,
            world_size,
            rank=rank,
            compute_itemsize=2,
            optimizer_itemsize=0,
            prefetch_bytes=row.zero.prefetch_bytes,
            micro_batches=row.micro_batches,
        )
        for mode in (nullcontext(), witness := Witness()):
            trace.clear()
            before = engine.world.bytes_sent
            with mode:
                for number in range(row.micro_batches):
                    engine.backward(engine.module(x), 8, last=number == row.micro_batches - 1)
                engine.step()
        assert engine.memory.peak == formula.total
        return list(trace), witness.trace, Expected(row, model, "blocks.", world_size).step(), engine.world.bytes_sent - before


def only_communication(trace: Trace) -> Trace:
    return [entry for entry in trace if len(entry) == 3]


@pytest.mark.parametrize("row", ROWS)
def test_first_and_last_rank_send_what_the_policy_says_in_its_order(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for world_size in WORLD_SIZES:
        for rank in (0, world_size - 1):
            with monkeypatch.context() as patch:
                recorded, witnessed, expected, sent = trace_second_step(ROWS[row], world_size, rank, patch)
            assert recorded == expected, (world_size, rank)
            assert witnessed == only_communication(expected), (world_size, rank)
            assert sent == sum(nbytes for _, _, nbytes in only_communication(expected))


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
            engine.backward(engine.module(ids, ids, trained_tokens=16), 16)
            engine.step()
        assert trace == Expected(Row(zero, "twice", "scatter"), model, "model.layers.", 1024).step()
        planned = state_bytes(
            engine.layouts, engine.policy, 1024, rank=1023, compute_itemsize=2, prefetch_bytes=zero.prefetch_bytes, messages=False
        )
    assert engine.memory.peak == planned.total
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert time.process_time() - began < 30
