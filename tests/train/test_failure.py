"""Which errors are a rank's own and which only echo another rank's end."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from framework.config.errors import Problem, UserError
from framework.train.failure import is_communication, read_failure, report_failure


def break_off() -> bool:
    """Rank 1 leaves its process group while rank 0 waits for it in a group of their own; whether rank 0's error is an echo."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        return True
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except Exception as error:
        return is_communication(error)
    return False


def test_what_gloo_says_of_a_rank_that_does_not_come_is_an_echo(ranks):
    assert ranks(2, break_off) == [True, True]


def test_what_torch_says_of_a_store_that_is_not_there_is_an_echo():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(dist.DistError) as caught:
            dist.TCPStore("127.0.0.1", unused.getsockname()[1], is_master=False, timeout=timedelta(seconds=1))
    assert is_communication(caught.value)


@pytest.mark.parametrize("error", [ValueError("boom"), RuntimeError("CUDA out of memory"), KeyError("nccl"), OSError("gloo/x")])
def test_other_errors_are_a_ranks_own(error):
    assert not is_communication(error)


def test_an_error_raised_from_an_echo_is_one():
    try:
        try:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:10139")
        except RuntimeError as cause:
            raise ValueError("reducing gradients failed") from cause
    except ValueError as error:
        assert is_communication(error)


def test_the_first_report_of_a_rank_stands(tmp_path):
    report_failure(tmp_path, 3, ValueError("first"))
    report_failure(tmp_path, 3, RuntimeError("while tearing down"))
    report = read_failure(tmp_path, 3)
    assert (report.rank, report.kind, report.message) == (3, "error", "first")
    assert read_failure(tmp_path, 0) is None
    assert os.listdir(tmp_path / "logs") == ["rank_3.error.json"]


def test_a_users_mistake_keeps_its_text(tmp_path):
    error = UserError(Problem(path="data.train", got="x", expected="a file"))
    report_failure(tmp_path, 0, error)
    assert (read_failure(tmp_path, 0).kind, read_failure(tmp_path, 0).message) == ("user", str(error))
