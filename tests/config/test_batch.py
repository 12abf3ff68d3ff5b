"""P30: micro x accumulate x ranks = global is solved for whatever is missing, and what cannot be solved names legal values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.config.batch import divisors, nearest_multiples, solve_batch
from framework.config.errors import UserError
from framework.config.schema import TrainerConfig

small = st.integers(1, 64)


def solved(world_size, micro=None, accumulate=None, total=None):
    plan = solve_batch(TrainerConfig(micro_batch_size=micro, accumulate=accumulate, global_batch_size=total), world_size)
    return plan.micro_batch_size, plan.accumulate, plan.global_batch_size


def problem(world_size, **sizes):
    with pytest.raises(UserError) as error:
        solved(world_size, **sizes)
    (only,) = error.value.problems
    return only


@given(micro=small, accumulate=small, world_size=small)
def test_p30_any_two_of_the_three_determine_the_third(micro, accumulate, world_size):
    total = micro * accumulate * world_size
    expected = (micro, accumulate, total)
    assert solved(world_size, micro=micro, accumulate=accumulate) == expected
    assert solved(world_size, micro=micro, total=total) == expected
    assert solved(world_size, accumulate=accumulate, total=total) == expected
    assert solved(world_size, micro=micro, accumulate=accumulate, total=total) == expected


def test_p30_a_single_number_means_no_accumulation():
    assert solved(4, micro=2) == (2, 1, 8)
    assert solved(4, total=8) == (2, 1, 8)


def test_p30_neither_micro_nor_global_is_a_problem():
    assert "at least one of them" in problem(2, accumulate=4).expected
    assert problem(2).fix == "trainer.global_batch_size=16"


def test_p30_a_global_batch_that_does_not_divide_shows_the_arithmetic_and_the_nearest_values():
    found = problem(2, micro=4, total=10)
    assert "10 / (4 micro_batch_size x 2 ranks) = 1.25 accumulate, not a whole number" in found.got
    assert "a multiple of 8: 8 or 16" in found.expected
    assert "trainer.micro_batch_size one of 1, 5" in found.expected
    assert found.fix == "trainer.global_batch_size=8"


@given(micro=small, world_size=small, total=st.integers(1, 2000))
def test_p30_the_proposed_global_batch_is_legal(micro, world_size, total):
    try:
        solved(world_size, micro=micro, total=total)
    except UserError as error:
        proposed = int(error.problems[0].fix.partition("=")[2])
        assert solved(world_size, micro=micro, total=proposed)[2] == proposed


def test_p30_three_numbers_that_disagree_show_their_product():
    found = problem(2, micro=4, accumulate=2, total=20)
    assert "20, but 4 micro x 2 accumulated x 2 ranks = 16" in found.got
    assert "trainer.global_batch_size=16" in found.fix


@pytest.mark.parametrize("name", ["micro", "accumulate", "total"])
def test_p30_sizes_below_one_are_refused(name):
    assert problem(1, **{"micro": 1, name: 0}).got == "0"


def test_nearest_multiples_never_include_zero():
    assert nearest_multiples(3, 8) == [8]
    assert nearest_multiples(13, 8) == [16, 8]


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
