"""Lion on flat shards, for every dtype and instruction set."""

from __future__ import annotations

import pytest
import torch

from framework.kernels.library import KernelError
from framework.kernels.lion import lion_, lion_reference_
from tests.kernels.shards import COPIES, DTYPES, EPSILON, ODD_SIZES, close, make_shard, rounded_copy, three_ranges

BETAS = (0.9, 0.99)


def check_step(numel: int, grad_dtype: torch.dtype, copy, function) -> None:
    shard, ranges = make_shard(numel, grad_dtype, copy, n_states=1), three_ranges(numel)
    before, g, m = shard.parameters().double(), shard.grad.double() * 0.125, shard.states[0].double()
    p, new_m, direction = before.clone(), m.clone(), BETAS[0] * m + (1 - BETAS[0]) * g
    for one in ranges:
        at = slice(one.start, one.stop)
        p[at] = p[at] * (1 - one.lr * one.weight_decay) - one.lr * direction[at].sign()
        new_m[at] = BETAS[1] * m[at] + (1 - BETAS[1]) * g[at]
    function(
        *(shard.master, shard.states[0], shard.grad, ranges),
        **{"betas": BETAS, "grad_factor": torch.tensor(0.125), "copies": shard.copies, "remainder": shard.remainder},
    )
    close(shard.states[0], new_m, m.abs() + g.abs(), ulps=3)
    clear = direction.abs() > 4 * EPSILON * (m.abs() + g.abs())  # the sign does not hang on rounding
    close(shard.parameters()[clear], p[clear], p[clear].abs() + before[clear].abs(), ulps=2)
    if isinstance(copy, torch.dtype):
        for one in ranges:
            at = slice(one.start, one.stop)
            assert torch.equal(shard.copies.data[at], rounded_copy(shard.master[at], copy))


@pytest.mark.parametrize("copy", COPIES, ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
def test_a_step_is_that_of_the_formula_in_fp64(isa, grad_dtype, copy):
    for numel in ODD_SIZES:
        check_step(numel, grad_dtype, copy, lion_)


@pytest.mark.parametrize("copy", COPIES, ids=str)
def test_so_is_a_step_of_the_reference(reference_only, copy):
    check_step(131, torch.bfloat16, copy, lion_reference_)


def test_a_direction_of_zero_changes_nothing_but_the_decay(isa):
    for function in (lion_, lion_reference_):
        p = torch.ones(5)
        function(p, torch.zeros(5), torch.zeros(5), three_ranges(5), betas=BETAS)
        assert p.tolist() == pytest.approx([1, 1, 1, 0.998, 0.998])  # lr 0.02, weight decay 0.1; without them before


def test_a_factor_that_is_not_finite_leaves_everything_as_it_was(isa):
    for function in (lion_, lion_reference_):
        shard, same = make_shard(131, torch.float32, None, 1), make_shard(131, torch.float32, None, 1)
        function(shard.master, *shard.states, shard.grad, three_ranges(131), betas=BETAS, grad_factor=torch.tensor(float("nan")))
        assert torch.equal(shard.master, same.master) and torch.equal(shard.states[0], same.states[0])


def test_what_is_not_contiguous_is_named():
    with pytest.raises(KernelError, match="exp_avg is not contiguous"):
        lion_(torch.zeros(3), torch.zeros(6)[::2], torch.zeros(3), [], betas=BETAS)
