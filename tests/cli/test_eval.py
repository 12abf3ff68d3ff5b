"""`framework eval`: the losses of training's validation and of transformers, on data of a run or of the user's; mistakes; lm-eval."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from framework.checkpoint.source import find_source
from framework.cli import eval as command
from framework.cli import harness
from framework.cli.measure import measure
from framework.config.errors import UserError
from framework.config.schema import PeftConfig, RecipeConfig
from framework.train.metrics import read_metrics, series
from framework.train.run_dir import EXPORT, METRICS
from tests.cli import test_fit_lora
from tests.cli.test_fit import be_launched, recipe  # noqa: F401  a fixture
from tests.cli.test_fit_eval import exact_losses, run, sources  # noqa: F401  a fixture

lora = test_fit_lora.recipe


@pytest.fixture(scope="module")
def trained(ranks, recipe, tmp_path_factory) -> Path:  # noqa: F811
    """A run that held out a part of its data."""
    return run(ranks, 1, recipe, tmp_path_factory.mktemp("runs") / "run")


def measured(ranks, world_size: int, folder: Path, *words: str) -> dict:
    """What the ranks of the command leave for it."""
    folder.mkdir(exist_ok=True)
    ranks(world_size, measure_here, command.recipe_of(command.parser().parse_intermixed_args(words)), folder, timeout=120)
    return json.loads((folder / command.RESULT).read_text())


def measure_here(recipe: RecipeConfig, folder: Path) -> None:  # noqa: F811
    """Be one rank of an evaluation."""
    be_launched()
    measure(recipe, folder)


@pytest.mark.parametrize("words", [("zero=3", "trainer.micro_batch_size=5"), ("precision=fp64",)])
def test_p19_a_run_is_measured_on_its_own_validation_data_as_it_was_in_training(ranks, trained, tmp_path, words) -> None:
    result = measured(ranks, 2, tmp_path, str(trained), *words)
    assert result["loss"] == pytest.approx(series(read_metrics(trained / METRICS), "val_loss")[1][-1], rel=1e-6)
    assert ([source["source"] for source in result["sources"]], result["samples"]) == (["rows"], 2)


def test_a_run_that_made_an_adapter_is_measured_with_it(ranks, lora, sources, tmp_path) -> None:  # noqa: F811
    data = dataclasses.replace(lora.data, validation=sources[0])
    adapted = run(ranks, 1, lora, tmp_path / "run", data=data, peft=PeftConfig(method="lora", rank=4))
    result = measured(ranks, 1, tmp_path / "result", str(adapted))
    assert result["loss"] == pytest.approx(series(read_metrics(adapted / METRICS), "val_loss")[1][-1], rel=1e-5)


def test_p19_the_command_measures_any_model_on_any_data_as_transformers_does(trained, recipe, sources, tmp_path) -> None:  # noqa: F811
    words = [str(trained / EXPORT), f"data.validation=[{','.join(sources)}]", "data.max_tokens=64", "trainer.accelerator=cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "framework", "eval", *words, "--json", str(tmp_path / "result.json")],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    all_rows = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, validation_fraction=0))
    expected, of_all = exact_losses(all_rows, sources, trained / EXPORT)
    assert {source["source"]: source["loss"] for source in result["sources"]} == pytest.approx(expected, rel=1e-6)
    assert (result["loss"], result["perplexity"]) == (pytest.approx(of_all, rel=1e-6), math.exp(result["loss"]))
    assert [source["samples"] for source in result["sources"]] == [7, 4]
    lines = done.stdout.splitlines()[-4:]
    assert [line.split()[0] for line in lines] == ["source", "short", "long", "total"] and f"{result['loss']:.6f}" in lines[-1]


def refused(capsys, *words: str) -> str:
    assert command.main(words) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    return shown


def test_all_mistakes_are_told_at_once_and_without_torch(trained, tmp_path) -> None:
    words = [str(tmp_path / "nowhere"), "data.validation=nowhere.jsonl", "optimizer.lr=1", "data.max_tokns=3", "precision=bf17"]
    program = (
        "import sys; from framework.cli import eval\n"
        f"status = eval.main({words!r})\n"
        "assert not {'torch', 'transformers', 'lightning'} & set(sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2, done.stderr
    for expected in ("nowhere, which does not exist", "optimizer.lr: got a setting that an evaluation does not have", "data.max_tokens=3"):
        assert expected in done.stderr
    assert "precision=bf16" in done.stderr and "Traceback" not in done.stderr


def test_what_is_wrong_with_the_data_is_told_before_anything_starts(trained, capsys, tmp_path) -> None:
    model = str(trained / EXPORT)
    assert "data.validation: got nothing" in refused(capsys, model)
    assert "write    data.validation=/path/to/file.jsonl" in refused(capsys, model)
    shown = refused(capsys, model, "data.validation=nowhere.jsonl")
    assert "data.validation: got 'nowhere.jsonl'" in shown and "eval.yaml" not in shown
    (tmp_path / "rows.csv").write_text("question,reply\nHi,Hello\n")
    assert "question, reply" in refused(capsys, model, f"data.validation={tmp_path / 'rows.csv'}")
    shown = refused(capsys, str(trained), f"data.validation={tmp_path / 'rows.csv'}", "data.train=x", "data.columns.output=reply")
    assert "data.columns.instruction=question" in shown
    assert "--json: got" in refused(capsys, model, "--json", str(tmp_path / "no" / "file.json"))
    assert "--limit: got 3" in refused(capsys, model, "--limit", "3")


@pytest.mark.parametrize(("word", "fix"), [("--jsn", "--json FILE"), ("--tsks=arc_easy", "--tasks arc_easy"), ("--lmit=3", "--limit 3")])
def test_an_unknown_option_names_the_one_that_was_meant(word, fix, capsys) -> None:
    shown = refused(capsys, "MODEL", word, "x")
    assert shown.startswith("1 problem:") and "an option that does not exist" in shown and f"write    {fix}" in shown


# ---- the lm-evaluation-harness
def test_tasks_without_their_package_say_how_to_install_it(trained, capsys, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    shown = refused(capsys, str(trained), "data.validation=x", "--tasks", " ,", "--limit", "0")
    assert 'pip install "lm-eval[hf]"' in shown
    assert "names of tasks" in shown and "--limit: got 0" in shown and "tasks have data of their own" in shown


def test_the_harness_gets_a_folder_that_transformers_reads(trained, lora, ranks, tmp_path) -> None:
    assert harness.as_folder(find_source(str(trained / EXPORT)), tmp_path / "new") == str(trained / EXPORT)
    assert harness.as_folder(find_source("org/name"), tmp_path / "new") == "org/name"
    adapted = run(ranks, 1, lora, tmp_path / "run", steps=1)
    folder = harness.as_folder(find_source(str(adapted / EXPORT)), tmp_path / "new")
    assert folder == str(tmp_path / "new") and (tmp_path / "new" / "model.safetensors").is_file()
    assert harness.arguments(folder, ["hellaswag"], 10, "cuda") == {
        "model": "hf",
        "model_args": {"pretrained": folder, "dtype": "auto"},
        "tasks": ["hellaswag"],
        "limit": 10,
        "device": "cuda",
        "batch_size": "auto",
    }
    with pytest.raises(UserError, match="MODEL: got .*nowhere"):
        harness.evaluate(str(tmp_path / "nowhere"), "hellaswag", None, [])
