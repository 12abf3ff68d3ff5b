"""Ctrl-C, or any other exception, in any line: what follows `reset` is exact, or refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
import torch.distributed as dist

from framework.config.schema import OffloadConfig
from framework.zero import ZeroConfig, ZeroEngine
from framework.zero.comm import Comm
from tests.zero import zoo

MICROS = zoo.micro_batches(1, 2)[0]
EVERYTHING = OffloadConfig(optimizer="cpu", params="cpu")


def make(stage: int, offload: OffloadConfig | None = None) -> ZeroEngine:
    model = zoo.make("Plain", torch.float32)
    return ZeroEngine(model, ZeroConfig(stage=stage, prefetch_bytes=1), offload=offload, optimizer=zoo.adamw(model))


def accumulate(engine: ZeroEngine) -> None:
    for index, ids in enumerate(MICROS):
        engine.backward(engine.module(ids), zoo.count_tokens(ids), last=index == len(MICROS) - 1)


def step(engine: ZeroEngine) -> float:
    accumulate(engine)
    return float(engine.step().loss)


def interrupted(function: Callable[[], object], at: int | None = None) -> int:
    """Run `function`, with a Ctrl-C in the engine's line number `at`, counted as they are executed; how many there were."""
    lines = 0

    def count(frame: FrameType, event: str, _: object):
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return count

    sys.settrace(lambda frame, *_: count if "/framework/zero/" in frame.f_code.co_filename else None)
    try:
        function()
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.parametrize(
    ("stage", "offload"), [(0, None), (1, None), (2, None), (3, None), (3, EVERYTHING)], ids=["0", "1", "2", "3", "3-offloaded"]
)
def test_ctrl_c_in_any_line_of_forward_and_backward_leaves_no_trace(stage: int, offload: OffloadConfig | None) -> None:
    expected = [step(engine) for engine in [make(stage, offload)] for _ in range(3)]
    engine = make(stage, offload)
    step(engine)
    lines = interrupted(lambda: accumulate(engine))
    for part in range(12):
        at = 1 + (97 * part + stage) * lines // (97 * 12 + 3)
        engine = make(stage, offload)
        step(engine)
        with pytest.raises(KeyboardInterrupt):
            interrupted(lambda engine=engine: accumulate(engine), at)
        engine.reset()
        assert [step(engine), step(engine)] == expected[1:], f"line {at} of {lines}"
        assert engine.memory.by_kind.get("gathered", 0) == 0


@pytest.mark.parametrize("stage", [0, 3])
def test_an_update_that_was_cut_in_two_is_never_trained_on_or_saved(stage: int) -> None:
    expected = [step(engine) for engine in [make(stage)] for _ in range(2)]
    engine = make(stage)
    step(engine)
    saved = engine.state_dict()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    hook = engine.optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        step(engine)
    hook.remove()
    engine.reset()
    for use in (lambda: step(engine), engine.state_dict, lambda: next(engine.full_tensors())):
        with pytest.raises(RuntimeError, match="in the middle of the update of step 2"):
            use()
    engine.reset()
    engine.load_state_dict(saved)
    assert step(engine) == expected[1]


def fails_in_a_hook_of_the_second_micro_batch(stage: int, error: type[BaseException]) -> None:
    """On both ranks, while gathers ahead are under way and the first micro-batch has been added up."""
    expected = [step(engine) for engine in [make(stage)] for _ in range(3)][1:]
    for where in ("forward", "backward"):
        engine = make(stage)
        step(engine)
        seen = []

        def fail(*_: object, seen=seen) -> None:
            seen.append(1)
            if len(seen) == 2:
                raise error("here")

        def fail_later(module, args, out, fail=fail) -> None:
            out.register_hook(fail)

        block = engine.module.blocks[1].down
        handle = block.register_forward_hook(fail if where == "forward" else fail_later)
        with pytest.raises(error):
            accumulate(engine)
        handle.remove()
        engine.reset()
        assert [step(engine), step(engine)] == expected, where


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_failure_in_the_second_micro_batch_forgets_the_first(ranks, error: type[BaseException]) -> None:
    for stage in (1, 2, 3):
        ranks(2, fails_in_a_hook_of_the_second_micro_batch, stage, error)


class Interrupted:
    """A message that Ctrl-C comes upon while it is waited for."""

    def __init__(self, work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()
        raise KeyboardInterrupt

    def is_completed(self) -> bool:
        return self._work.is_completed()


def waits_and_sends_that_are_interrupted() -> tuple[list[float], list[float]]:
    comm, values = Comm(dist.new_group()), []
    for number in range(2):
        out, shard = torch.zeros(2), torch.full((1,), 10.0 * number + dist.get_rank())
        handle = comm.all_gather(out, shard, tag=0)
        if number == 0:
            handle._works[-1] = Interrupted(handle._works[-1])
            with pytest.raises(KeyboardInterrupt):
                handle.wait()
            comm.abandon(handle)
        else:
            handle.wait()
        values.append(out.tolist())
    send, dist.isend = dist.isend, _interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            comm.all_gather(out, shard, tag=0)
    finally:
        dist.isend = send
    with pytest.raises(RuntimeError, match="left them at different points"):
        comm.all_gather(out, shard, tag=0)
    return values


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_between_messages_loses_none_or_refuses_to_go_on(ranks) -> None:
    for first, second in ranks(2, waits_and_sends_that_are_interrupted):
        assert first == [0.0, 1.0] and second == [10.0, 11.0]


def by_hand(engine: ZeroEngine) -> None:
    with engine.manual():
        for ids in MICROS:
            engine.backward(engine.module(ids), zoo.count_tokens(ids))


@pytest.mark.parametrize("stage", [0, 3])
def test_ctrl_c_in_any_of_the_first_lines_of_a_manual_step_leaves_no_trace(stage: int) -> None:
    expected = [step(engine) for engine in [make(stage)] for _ in range(2)]
    engine = make(stage)
    step(engine)
    for at in range(1, 121):
        with pytest.raises(KeyboardInterrupt):
            interrupted(lambda: by_hand(engine), at)
        engine.reset()
        assert engine.by_hand is None and not any(unit.keepers for unit in engine.units), f"line {at}"
    assert step(engine) == expected[1]
