"""Process groups of an engine at the size of a cluster: the fake backend, where one process is rank 0 of 1,024."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from framework import torch_private
from framework.zero import ZeroConfig, ZeroEngine
from framework.zero import comm as communication
from framework.zero.comm import Handle
from framework.zero.grid import Grid
from framework.zero.groups import Groups
from tests.zero import zoo

RANKS, MEMBERS, AT_MOST_SECONDS = 1024, 8, 0.2


@pytest.fixture
def cluster():
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, int, int]]:
    """(collective, id of the group, its size) in the order in which they are issued."""
    seen: list[tuple[str, int, int]] = []

    def watch(owner, name: str, kind: str):
        original = getattr(owner, name)

        def watched(*args, group=None, **kwargs):
            seen.append((kind, id(group), dist.get_world_size(group)))
            return original(*args, group=group, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(torch_private, "all_gather_single", "gather")
    watch(torch_private, "reduce_scatter_single", "reduce")
    watch(communication.dist, "all_reduce", "sum")
    return seen


def engine_of(zero: ZeroConfig) -> ZeroEngine:
    with torch.device("meta"):
        model = zoo.MODELS["Plain"]()
    zero = replace(zero, prefetch_bytes=1)  # one block ahead
    return ZeroEngine(model, zero, optimizer=torch.optim.AdamW(model.parameters()), device="meta")


SHAPES = {
    "flat": (ZeroConfig(stage=3), {("gather", RANKS), ("reduce", RANKS)}),
    "hsdp": (ZeroConfig(stage=3, shard_size=MEMBERS), {("gather", MEMBERS), ("reduce", MEMBERS), ("sum", RANKS // MEMBERS)}),
    "world": (
        ZeroConfig(stage=3, shard_size=MEMBERS, shard_optimizer="world"),
        {("gather", MEMBERS), ("gather", RANKS // MEMBERS), ("reduce", MEMBERS), ("reduce", RANKS // MEMBERS)},
    ),
    "secondary": (
        ZeroConfig(stage=3, secondary_shard_size=MEMBERS),
        {("gather", MEMBERS), ("gather", RANKS // MEMBERS), ("reduce", MEMBERS), ("reduce", RANKS // MEMBERS)},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_gathers_and_reductions_have_groups_of_their_own_and_a_gather_goes_before_a_reduction(cluster, calls, shape: str) -> None:
    zero, expected = SHAPES[shape]
    engine = engine_of(zero)
    for _ in range(2):  # the second step follows the order of the first
        for buffer in engine.trained:
            buffer.publish()  # as the optimizer's step does
        calls.clear()
        engine.module(torch.zeros(2, 5, dtype=torch.long, device="meta")).backward()
    assert {(kind, size) for kind, _, size in calls} == expected
    groups = {kind: {group for what, group, _ in calls if what == kind} for kind in ("gather", "reduce")}
    assert not groups["gather"] & groups["reduce"]
    whole = [kind for kind, _, size in calls if kind != "sum" and size == (RANKS if shape == "flat" else MEMBERS)]
    backward = whole[whole.index("reduce") - 1 :]
    # the last of three blocks is still gathered; while it runs backward the second one is fetched, and only then it is reduced
    assert backward == ["gather", "reduce", "gather", "reduce", "reduce", "reduce"]


def test_groups_of_a_thousand_ranks_are_made_in_a_moment_and_once(cluster) -> None:
    began = time.process_time()  # the machine may have other things to do
    first, second = (Groups(dist.group.WORLD, torch.device("meta")) for _ in range(2))
    for groups in (first, second):
        for direction in ("gather", "reduce"):
            groups.route(direction, Grid(RANKS // MEMBERS, MEMBERS, 0), across=True)
    assert time.process_time() - began < AT_MOST_SECONDS
    used = [{id(comm.group) for comm in groups.traffic.comms if comm.group is not None} for groups in (first, second)]
    assert used[0] == used[1] and len(used[0]) == 5


class Recorded(Handle):
    """A communication that writes down what happens to it."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__([], finish=lambda: log.append(f"{name} done"))
        log.append(f"{name} begun")


def test_the_second_of_two_communications_begins_with_the_result_of_the_first_or_never() -> None:
    log: list[str] = []
    both = Recorded("one", log).then(lambda: Recorded("two", log), None)
    both.wait()
    both.wait()
    assert log == ["one begun", "one done", "two begun", "two done"]
    log.clear()
    Recorded("one", log).then(lambda: Recorded("two", log), None).abandon()
    assert log == ["one begun"]


def test_the_second_begins_at_once_where_nothing_is_under_way() -> None:
    """So a sum between groups of one rank runs beside backward, as stage 0's does."""
    log: list[str] = []
    both = Handle([]).then(lambda: Recorded("two", log), None)
    assert log == ["two begun"]
    both.wait()
    assert log == ["two begun", "two done"]


def test_a_second_one_that_ctrl_c_interrupted_is_waited_for_before_anything_else_is_sent() -> None:
    log: list[str] = []

    class Interrupted(Recorded):
        def wait(self) -> None:
            raise KeyboardInterrupt

        def abandon(self) -> None:
            log.append("two abandoned")

    both = Recorded("one", log).then(lambda: Interrupted("two", log), None)
    with pytest.raises(KeyboardInterrupt):
        both.wait()
    both.abandon()
    assert log == ["one begun", "one done", "two begun", "two abandoned"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_both_are_queued_at_once_on_a_stream_that_waits() -> None:
    log: list[str] = []
    stream, x = torch.cuda.Stream(), torch.zeros(1 << 24, device="cuda")

    def second() -> Handle:
        assert torch.cuda.current_stream() == stream
        x.mul_(2)
        return Recorded("two", log)

    x.add_(1)
    both = Recorded("one", log).then(second, stream)
    assert log == ["one begun", "one done", "two begun"]
    torch.cuda.current_stream().wait_stream(stream)
    both.wait()
    assert log[-1] == "two done" and bool((x == 2).all())
