"""P23-P25: numbers of steps, and the learning rate over them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.config.errors import UserError
from framework.config.schedule import lr_factor, plan_steps, warmup_steps
from framework.config.schema import ScheduleConfig, TrainerConfig

NAMES = ["constant", "linear", "cosine", "wsd"]
FALLING = ["linear", "cosine", "wsd"]


def curve(total, **settings):
    schedule = ScheduleConfig(**settings)
    return [lr_factor(schedule, step, total) for step in range(total)]


def test_the_curves_by_hand():
    assert curve(5, name="constant", warmup_steps=2) == [0.5, 1, 1, 1, 1]
    assert curve(5, name="linear", warmup_steps=1) == [1, 0.75, 0.5, 0.25, 0]
    assert curve(6, name="linear", warmup_steps=2, min_lr_ratio=0.2) == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2])
    assert curve(5, name="cosine") == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0])
    assert curve(10, name="wsd", warmup_steps=2, decay_ratio=0.4) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


@pytest.mark.parametrize("name", FALLING)
@given(total=st.integers(2, 300), warmup_share=st.floats(0, 0.99), floor=st.floats(0, 1))
def test_p25_the_rate_ends_exactly_at_its_floor_and_reaches_exactly_its_peak(name, total, warmup_share, floor):
    warmup = min(int(warmup_share * total), total - 1)
    factors = curve(total, name=name, warmup_steps=warmup, min_lr_ratio=floor)
    assert factors[-1] == floor
    assert max(factors) == 1.0
    assert factors[max(warmup, 1) - 1] == 1.0
    assert all(factor > 0 for factor in factors[:-1]), "no step but the last is spent on a rate of zero"


@pytest.mark.parametrize("name", NAMES)
@given(total=st.integers(1, 300), share=st.floats(0, 0.99))
def test_p25_the_rate_rises_during_warmup_and_never_afterwards(name, total, share):
    warmup = min(int(share * total), total - 1)
    factors = curve(total, name=name, warmup_steps=warmup)
    assert all(a < b for a, b in zip(factors[:warmup], factors[1:warmup], strict=False))
    peak = max(warmup, 1) - 1
    assert all(a >= b for a, b in zip(factors[peak:], factors[peak + 1 :], strict=False))


@pytest.mark.parametrize("name", NAMES)
def test_p25_warmup_of_zero_starts_at_the_peak(name):
    assert curve(10, name=name, warmup_steps=0)[0] == 1.0
    assert curve(10, name=name)[0] == 1.0


@pytest.mark.parametrize("warmup", [10, 11])
def test_p25_a_warmup_as_long_as_the_run_is_an_error(warmup):
    with pytest.raises(UserError, match="shorter than the run: 0 to 9 steps"):
        curve(10, name="cosine", warmup_steps=warmup)


def test_p25_a_run_of_one_step_uses_the_peak():
    for name in NAMES:
        assert curve(1, name=name) == [1.0]


def test_a_step_past_the_end_keeps_the_floor():
    assert lr_factor(ScheduleConfig(name="linear", min_lr_ratio=0.1), 12, 10) == 0.1


def test_warmup_can_be_a_share_of_the_run():
    assert warmup_steps(ScheduleConfig(warmup_ratio=0.1), 30) == 3
    assert curve(30, name="linear", warmup_ratio=0.1) == curve(30, name="linear", warmup_steps=3)


def test_p23_the_short_last_batch_of_an_epoch_is_a_step():
    plan = plan_steps(TrainerConfig(epochs=3), samples=101, global_batch=10)
    assert (plan.steps_per_epoch, plan.total_steps, plan.epochs) == (11, 33, 3.0)


def test_p23_fractional_epochs_round_up_to_whole_steps():
    assert plan_steps(TrainerConfig(epochs=0.5), 101, 10).total_steps == 6
    assert plan_steps(TrainerConfig(epochs=0.1), 300, 10).total_steps == 3, "not 4: 0.1 * 30 is a little more than 3 in floating point"
    assert plan_steps(TrainerConfig(epochs=0.001), 5, 10).total_steps == 1


def test_steps_can_be_given_directly():
    plan = plan_steps(TrainerConfig(max_steps=25), samples=100, global_batch=10)
    assert (plan.total_steps, plan.steps_per_epoch, plan.epochs) == (25, 10, 2.5)


@pytest.mark.parametrize(("max_steps", "total"), [(5, 5), (1000, 30)])
def test_of_steps_and_epochs_the_first_to_come_ends_the_run(max_steps, total):
    assert plan_steps(TrainerConfig(max_steps=max_steps, epochs=3.0), samples=100, global_batch=10).total_steps == total


@pytest.mark.parametrize(("trainer", "samples"), [({"max_steps": 0}, 10), ({"epochs": 0.0}, 10), ({}, 10), ({"epochs": 1.0}, 0)])
def test_p24_a_run_without_steps_is_an_error(trainer, samples):
    with pytest.raises(UserError, match="0 optimizer steps|neither"):
        plan_steps(TrainerConfig(**trainer), samples, 4)
