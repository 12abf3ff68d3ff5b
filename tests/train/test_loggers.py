"""The dashboards: what they get, and what happens without a network or a package."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from framework.config.errors import UserError
from framework.config.schema import LoggerConfig, RecipeConfig
from framework.train.loggers import Answer, Tracker, build_tracker, check_logger
from framework.train.run_dir import write_run_dir


def recipe(tmp_path: Path, **logger) -> RecipeConfig:
    made = RecipeConfig(name="tiny", logger=LoggerConfig(**logger))
    write_run_dir(tmp_path, made, overrides=[], command=[])
    return made


def test_none_logs_nothing(tmp_path):
    tracker = build_tracker(recipe(tmp_path), tmp_path)
    tracker.log(1, {"train/loss": 1.0})
    tracker.finish()
    assert tracker.loggers == [] and Tracker().loggers == []


def test_tensorboard_gets_the_numbers_by_step_and_the_recipe_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = build_tracker(recipe(tmp_path, name="tensorboard"), tmp_path)
    for step in (1, 2, 5):
        tracker.log(step, {"train/loss": 1.0 / step, "tokens": 10 * step})
    tracker.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5), (5, pytest.approx(0.2))]
    assert [event.value for event in events.Scalars("tokens")] == [10, 20, 50]
    (config,) = events.Tensors("config/text_summary")
    assert b"name: tiny" in config.tensor_proto.string_val[0]


def test_tensorboard_shows_answers_letter_for_letter(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = build_tracker(recipe(tmp_path, name="tensorboard"), tmp_path)
    tracker.log_answers(7, [Answer("Who?", "# I\n*am*"), Answer("What?", "that")])
    tracker.finish()
    (event,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("answers/text_summary")
    assert event.step == 7
    assert event.tensor_proto.string_val[0].decode() == "    Who?\n\n---\n\n    # I\n    *am*\n\n    What?\n\n---\n\n    that"


@pytest.fixture
def no_wandb_account(monkeypatch, tmp_path):
    """No key, no server, nothing of the user's own."""
    import wandb

    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    yield
    wandb.teardown()


@pytest.mark.parametrize("key", ["", "0" * 40])
def test_wandb_without_a_key_or_a_server_is_written_offline_and_says_so(tmp_path, no_wandb_account, monkeypatch, capsys, key):
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    tracker = build_tracker(recipe(tmp_path, name="wandb"), tmp_path)
    try:
        tracker.log(1, {"train/loss": 1.0, "tokens": 10})
        run = tracker.loggers[0].experiment
        assert run.config["recipe"]["name"] == "tiny" and "git" in run.config.keys()
        assert tracker.run_id == run.id
    finally:
        tracker.finish()
    reason = "127.0.0.1 cannot be reached" if key else "no API key"
    assert f"wandb: {reason}" in capsys.readouterr().out
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))


def test_wandb_gets_answers_as_a_table(tmp_path, no_wandb_account):
    tracker = build_tracker(recipe(tmp_path, name="wandb"), tmp_path)
    tracker.log_answers(7, [Answer("Who?", "I am"), Answer("What?", "that")])
    tracker.finish()
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/answers_*.table.json")
    shown = json.loads(table.read_text())
    assert (shown["columns"], shown["data"]) == (["step", "prompt", "answer"], [[7, "Who?", "I am"], [7, "What?", "that"]])


def test_p39_a_resumed_run_goes_on_in_the_same_run_of_the_dashboard(tmp_path, no_wandb_account):
    tracker = build_tracker(recipe(tmp_path, name="wandb"), tmp_path, run_id="abcd1234")
    tracker.finish()
    assert tracker.run_id == "abcd1234"
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-abcd1234")
    assert list(folder.glob("*.wandb"))


@pytest.mark.parametrize(("key", "reason"), [("", "no API key"), ("0" * 40, "127.0.0.1 cannot be reached")])
def test_wandb_asked_to_be_online_where_it_cannot_is_the_users_to_mend(tmp_path, no_wandb_account, monkeypatch, key, reason):
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    with pytest.raises(UserError, match=rf"(?s)logger.mode: got online, but {reason}.*logger.mode=offline"):
        build_tracker(recipe(tmp_path, name="wandb", mode="online"), tmp_path)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_starts(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None)
    (problem,) = check_logger(LoggerConfig(name=name))
    assert (problem.path, problem.fix) == ("logger.name", f"pip install {name}, or logger=none")
    assert check_logger(LoggerConfig(name="none")) == []
