"""SGD on flat shards, against torch.optim.SGD in fp64, for every dtype and instruction set."""

from __future__ import annotations

import pytest
import torch

from framework.kernels.library import KernelError
from framework.kernels.sgd import sgd_, sgd_reference_
from framework.kernels.shard import ShardRange
from tests.kernels.shards import COPIES, DTYPES, close, make_shard, rounded_copy

SETTINGS = (
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.3},
)


def check_steps(numel: int, grad_dtype: torch.dtype, copy, settings: dict, function) -> None:
    shard = make_shard(numel, grad_dtype, copy, n_states=1)
    buffer = shard.states[0] if settings["momentum"] else None
    parameter = torch.nn.Parameter(shard.parameters().double())
    optimizer = torch.optim.SGD([parameter], lr=0.05, weight_decay=0.1, **settings)
    size = parameter.detach().abs() + shard.grad.double().abs()
    for number in range(3):
        parameter.grad = shard.grad.double() * 0.125
        optimizer.step()
        function(
            *(shard.master, buffer, shard.grad, [ShardRange(start=0, stop=numel, lr=0.05, weight_decay=0.1)]),
            **settings,
            **{"first_step": number == 0, "grad_factor": torch.tensor(0.125), "copies": shard.copies, "remainder": shard.remainder},
        )
    close(shard.parameters(), parameter.detach(), size, ulps=9)
    if buffer is not None:
        close(buffer, optimizer.state[parameter]["momentum_buffer"], size, ulps=9)
    if isinstance(copy, torch.dtype):
        assert torch.equal(shard.copies.data, rounded_copy(shard.master, copy))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
def test_three_steps_are_those_of_torch_in_fp64(isa, grad_dtype, settings):
    for copy in COPIES:
        for numel in (1, 17, 131, 70001):
            check_steps(numel, grad_dtype, copy, settings, sgd_)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_so_are_those_of_the_reference(reference_only, settings):
    for copy in COPIES:
        check_steps(131, torch.bfloat16, copy, settings, sgd_reference_)


def test_momentum_without_a_buffer_is_refused():
    with pytest.raises(KernelError, match=r"momentum=0\.9 needs a momentum_buffer"):
        sgd_(torch.zeros(3), None, torch.zeros(3), [], momentum=0.9)


def test_a_factor_that_is_not_finite_leaves_everything_as_it_was(isa):
    for function in (sgd_, sgd_reference_):
        p, buffer = torch.ones(17), torch.ones(17)
        ranges, factor = [ShardRange(start=0, stop=17, lr=0.1)], torch.tensor(float("inf"))
        function(p, buffer, torch.ones(17), ranges, momentum=0.9, grad_factor=factor)
        assert (p == 1).all() and (buffer == 1).all()
