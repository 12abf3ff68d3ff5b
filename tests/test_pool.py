"""The worker pool: results in rank order, clean state for every call, and failures that name every rank and spoil nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import RanksFailed

ROOT = Path(__file__).parent.parent


def rank_and_sum(addend: torch.Tensor) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total + addend


def process_id() -> int:
    return os.getpid()


def one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unwell")
    dist.all_reduce(torch.ones(1))


def one_dies() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def one_exits() -> None:
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.all_reduce(torch.ones(1))


def one_sleeps() -> None:
    print(f"output of {dist.get_rank()}")
    if dist.get_rank() == 1:
        time.sleep(600)


def one_makes_a_collective_more() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def litter() -> None:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    os.environ["LITTER"] = "1"
    del os.environ["WORLD_SIZE"]
    os.chdir("/")
    random.seed(99)
    dist.new_group([0])


def surroundings() -> tuple:
    flags = torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    environment = os.environ.get("LITTER"), os.environ["WORLD_SIZE"], os.environ["RANK"]
    return flags, environment, os.getcwd(), random.random(), torch.rand(1).item()


def destroy_the_group() -> None:
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_is_in_a_group_of_that_world_size_and_results_come_in_rank_order(ranks, world_size):
    results = ranks(world_size, rank_and_sum, torch.tensor([0.5]))
    total = sum(range(world_size)) + 0.5
    assert [(rank, world, value.item()) for rank, world, value in results] == [(rank, world_size, total) for rank in range(world_size)]


def test_processes_are_kept_between_calls_and_a_call_costs_milliseconds(ranks):
    first = ranks(2, process_id)
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        assert ranks(2, process_id) == first
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.5  # about 5 ms on an idle machine; an import of torch takes seconds


def test_a_call_finds_nothing_that_an_earlier_one_left_in_global_state(ranks):
    before = ranks(2, surroundings)
    ranks(2, litter)
    assert ranks(2, surroundings) == before
    flags, environment, directory, *_ = before[1]
    assert flags == (True, torch.float32, False)
    assert environment == (None, "2", "1")
    assert directory == os.getcwd()


def test_a_call_may_destroy_the_process_group(ranks):
    ranks(2, destroy_the_group)
    assert ranks(2, process_id)


def test_an_exception_fails_the_call_at_once_with_the_traceback_of_every_rank_first_failure_first(ranks):
    began = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        ranks(2, one_raises)
    assert time.monotonic() - began < 20  # the other rank does not wait for its timeout
    report = str(failed.value)
    assert "rank 1 of 2 raised ValueError" in report and "rank one is unwell" in report
    assert "rank 0 of 2" in report and report.count("in one_raises") == 2
    assert report.index("rank 1 of 2") < report.index("rank 0 of 2")


def test_a_killed_rank_fails_the_call_at_once_and_is_named_with_its_signal(ranks):
    with pytest.raises(RanksFailed, match="rank 0 of 2 died of signal SIGKILL"):
        ranks(2, one_dies)


def test_a_rank_that_exits_fails_the_call(ranks):
    with pytest.raises(RanksFailed, match="rank 1 of 2 raised SystemExit"):
        ranks(2, one_exits)


def test_a_hang_shows_the_stack_and_the_output_of_every_rank(ranks):
    ranks(2, process_id)
    began = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        ranks(2, one_sleeps, timeout=1)
    assert time.monotonic() - began < 20
    report = str(failed.value)
    assert report.count("did not return within 1 s") == 2  # rank 0 waits for rank 1
    assert "in one_sleeps" in report and "output of 0" in report and "output of 1" in report


def test_a_collective_that_only_one_rank_makes_is_found_in_the_call_that_made_it(ranks):
    with pytest.raises(RanksFailed):
        ranks(2, one_makes_a_collective_more, timeout=2)


@pytest.mark.parametrize("failure", [one_raises, one_dies, one_exits])
def test_after_a_failure_the_next_call_works_in_new_processes(ranks, failure):
    before = ranks(2, process_id)
    with pytest.raises(RanksFailed):
        ranks(2, failure)
    after = ranks(2, process_id)
    assert not set(before) & set(after)
    assert not [pid for pid in before if _alive(pid)]


def test_a_function_that_cannot_be_sent_fails_in_the_caller_and_the_next_call_works(ranks):
    with pytest.raises(Exception, match="pickle|local object"):
        ranks(2, lambda: None)
    assert ranks(2, process_id)


RUN = """
import os, sys, time
sys.path.insert(0, {root!r})
from tests import test_pool
from tests.pool import Pool
if __name__ == "__main__":
    pool = Pool()
    print(*pool.run(2, test_pool.process_id), flush=True)
    pool.run(2, time.sleep, 600, timeout=600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_a_run_that_is_interrupted_or_killed_in_a_call(tmp_path, number):
    script = tmp_path / "run.py"
    script.write_text(RUN.format(root=str(ROOT)))
    run = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in run.stdout.readline().split()]
    assert len(workers) == 2 and all(_alive(pid) for pid in workers)
    time.sleep(0.3)  # into the second call
    run.send_signal(number)
    run.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(_alive(pid) for pid in workers):
        time.sleep(0.05)
    assert not [pid for pid in workers if _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
