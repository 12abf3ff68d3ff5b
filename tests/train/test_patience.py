"""When a run has learned enough: series of validation losses, and the step after which they end it."""

from __future__ import annotations

import json
from math import inf, nan
from types import SimpleNamespace

import pytest

from framework.config.schema import EvalConfig
from framework.train.callbacks.patience import Patience


def ends_at(patience: Patience, losses: list[float], first: int = 1) -> int | None:
    """Shows the callback one validation a step; what it needs of a Trainer is a few attributes."""
    for step, loss in enumerate(losses, start=first):
        trainer = SimpleNamespace(
            val_dataloaders=SimpleNamespace(given_up=loss is None),
            global_step=step,
            max_steps=99,
            should_stop=False,
            is_global_zero=False,
            strategy=SimpleNamespace(broadcast=lambda value: value),
        )
        patience.on_validation_end(trainer, SimpleNamespace(last_validation=loss))
        if trainer.should_stop:
            return step
    return None


@pytest.mark.parametrize(
    ("losses", "patience", "min_delta", "end"),
    [
        ([3.0, 2.0, 1.0, 1.0], 1, 0.0, 4),
        ([3.0, 2.0, 2.5, 1.9, 2.0, 2.0], 2, 0.0, 6),
        ([3.0, 2.5, 2.0, 1.5], 2, 0.5, None),
        ([3.0, 2.75, 2.5, 2.25], 2, 0.5, None),
        ([3.0, 2.75, 2.625, 2.0], 2, 0.5, 3),
        ([3.0, None, 3.0, None, 3.0], 2, 0.0, 5),
        ([nan, 3.0, inf, nan], 2, 0.0, 4),
        ([nan, nan], 2, 0.0, 2),
        ([3.0] * 9, None, 0.0, None),
    ],
)
def test_the_validation_after_which_a_run_ends(losses, patience, min_delta, end):
    watched = Patience(EvalConfig(patience=patience, min_delta=min_delta))
    assert ends_at(watched, losses) == end
    assert (watched.ended is not None) == (end is not None)


def test_the_reason_names_the_best_validation():
    watched = Patience(EvalConfig(patience=2, min_delta=0.5))
    ends_at(watched, [3.0, 2.0, 1.75, 1.625])
    assert watched.ended == "2 validations in a row without a loss by 0.5 below 2.0000, that of step 2 (eval.patience=2)"


def test_what_was_seen_goes_on_with_a_checkpoint():
    losses = [3.0, 2.0, 2.5, 2.5, 2.5]
    for seen in range(len(losses)):
        before, after = Patience(EvalConfig(patience=3)), Patience(EvalConfig(patience=3))
        assert ends_at(before, losses[:seen]) is None
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert ends_at(after, losses[seen:], first=seen + 1) == 5
