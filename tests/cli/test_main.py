"""The command `framework`: its list of commands, and those that need no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from framework.cli import check, env
from framework.cli.main import COMMANDS, main
from framework.cli.reference import explain_group, explain_setting, overview
from framework.config.schema import RecipeConfig
from framework.config.typed import dataclass_in, hints_of, schema_paths


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_the_commands(capsys, arguments):
    assert status(*arguments) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("train", "check", "generate", "help", "env"))


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "framework", "--version"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and done.stdout.startswith("framework ")


@pytest.mark.parametrize("command", ["check", "help", "env"])
def test_every_command_explains_itself(capsys, command):
    assert status(command, "--help") == 0
    assert f"framework {command}" in capsys.readouterr().out


def test_an_unknown_command_names_the_one_that_was_meant(capsys):
    assert status("trian") == 2
    assert "framework train" in capsys.readouterr().err
    assert status("+recipe=quickstart") == 2
    assert "framework train +recipe=quickstart" in capsys.readouterr().err


def test_check_prints_all_problems_and_ends_with_status_2(capsys):
    assert status("check", "+recipe=llama_sft", "zero=7", "data.train=nowhere.jsonl", "trainer.epochs=0") == 2
    error = capsys.readouterr().err
    assert error.startswith("3 problems:") and all(path in error for path in ("zero", "data.train", "trainer.epochs"))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.train=[]", "data.train: got an empty list"),
        ("eval.prompts=[]", "eval.prompts: got an empty list"),
        ("eval.prompts=Who are you?", "write    \"eval.prompts=['Who are you?']\""),
        (f"eval.prompts={'What is 3.5 and more? ' * 20}", "write    \"eval.prompts=['What is 3.5 and more?"),
        ("eval.prompts='Who\\'s there'", "write    \"eval.prompts=['Who\\'s there']\""),
    ],
)
def test_a_value_that_is_empty_or_no_file_is_one_problem(word, said, capsys):
    assert status("check", "+recipe=quickstart", word) == 2
    error = capsys.readouterr().err
    assert error.startswith("1 problem:") and said in error


@pytest.mark.parametrize("command", ["train", "check", "prepare"])
def test_a_template_that_cannot_be_read_is_told_before_anything_is_loaded(command, capsys, tmp_path):
    (tmp_path / "latin.jinja").write_bytes("é".encode("latin-1"))
    assert status(command, "+recipe=quickstart", f"model.chat_template={tmp_path / 'latin.jinja'}") == 2
    error = capsys.readouterr().err
    assert error.startswith("1 problem:") and "latin.jinja (not UTF-8: byte 0)" in error and "Traceback" not in error


def test_check_prints_the_plan_of_a_sound_recipe(capsys, tmp_path):
    (tmp_path / "text.txt").write_text("Some words to train on, and some more. " * 500)
    settings = [f"data.train={tmp_path}/text.txt", "data.validation_fraction=0", "data.max_tokens=32", "trainer.devices=1"]
    assert status("check", "+recipe=llama_pretrain", *settings, "zero=2", "trainer.accelerator=cpu") == 0
    shown = capsys.readouterr().out
    assert "500 = " in shown and "wsd" in shown and "> zero=2" in shown


@pytest.mark.parametrize(
    ("settings", "ended", "said"),
    [
        (["kernels=compiled"], 2, "kernels: got compiled, but no libframework_cpu was found"),
        (["kernels=auto"], 0, "plain torch, because no libframework_cpu was found"),
        (["kernels=compiled", "precision=fp64"], 2, "kernels: got compiled, but the compiled kernels do not compute in float64"),
    ],
)
def test_kernels_that_cannot_be_used_are_said_to_be_missing(tmp_path, monkeypatch, capsys, settings, ended, said):
    (tmp_path / "text.txt").write_text("Some words to train on, and some more. " * 100)
    settings += [f"data.train={tmp_path}/text.txt", "data.validation_fraction=0", "data.max_tokens=32", "trainer.devices=1"]
    settings += ["trainer.accelerator=cpu"]
    from framework.kernels import library

    monkeypatch.setenv("FRAMEWORK_KERNELS_DIR", str(tmp_path))
    monkeypatch.setattr(library, "_loaded", {})  # as at the start of a process
    monkeypatch.setattr(library, "_mode", "auto")
    assert status("check", "+recipe=llama_pretrain", *settings) == ended
    shown = capsys.readouterr()
    assert said in shown.out + shown.err


def test_check_looks_at_one_job(capsys):
    assert check.main(["-m", "+recipe=quickstart", "zero=0,1"]) == 2
    assert "a sweep" in capsys.readouterr().err


def test_env_names_versions_and_machine(capsys):
    assert env.main(["--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["packages"]["torch"] and facts["usable_cores"] >= 1 and facts["framework"]
    assert env.main([]) == 0
    assert "torch" in capsys.readouterr().out


# ---- the reference
def test_the_overview_has_every_group_with_its_meaning_and_options():
    text = overview()
    for name, hint in hints_of(RecipeConfig).items():
        assert name in text
        if dataclass_in(hint):
            assert explain_group(name).partition("\n")[0] != f"{name}: ", f"{name} says what it is for"
    assert "0, 1, 2, 3" in text and "constant, cosine, linear, wsd" in text


def test_a_group_shows_options_keys_types_defaults_and_meanings():
    text = explain_group("zero")
    assert "zero=3  Optimizer state, gradients and parameters are sharded" in text
    assert "zero.stage  [0 | 1 | 2 | 3]  0" in text
    assert "so many bytes per rank" in text


def test_every_setting_can_be_explained():
    for path, hint in schema_paths().items():
        assert path in (explain_group(path) if dataclass_in(hint) else explain_setting(path))


def test_an_unknown_setting_names_the_one_that_was_meant(capsys):
    assert status("help", "optimizer.learning_rate") == 2
    assert "framework help optimizer.lr" in capsys.readouterr().err


def test_the_commands_are_described_in_one_line_each():
    assert all(len(purpose) < 90 and "\n" not in purpose for purpose in COMMANDS.values())
