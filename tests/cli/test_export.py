"""What can be made of a run's checkpoints is what the run itself would have made, and other trainers' checkpoints start a run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from framework.checkpoint.folder import step_folder
from framework.checkpoint.open import open_model
from framework.cli import checkpoint as checkpoint_command
from framework.cli import export, generate
from framework.config.schema import CheckpointConfig, RecipeConfig, ZeroConfig
from framework.models.llama import Llama
from framework.train.run_dir import EXPORT, write_run_dir
from tests.checkpoint.deepspeed_files import write_deepspeed
from tests.checkpoint.test_deepspeed import as_groups
from tests.cli import test_fit, test_fit_lora
from tests.cli.test_fit import ARCHITECTURE, fit

full, lora = test_fit.recipe, test_fit_lora.recipe
STEPS = 2


def run(ranks, world_size: int, recipe: RecipeConfig, run_dir: Path, **changes: object) -> Path:
    saves = CheckpointConfig(at_end=True)
    recipe = dataclasses.replace(recipe, checkpoint=saves, trainer=dataclasses.replace(recipe.trainer, max_steps=STEPS), **changes)
    write_run_dir(run_dir, recipe, overrides=[], command=["test"])
    ranks(world_size, fit, recipe, run_dir, timeout=240)
    return run_dir


def same_files(one: Path, other: Path) -> None:
    """Byte by byte; the tokens at which an answer stops in any order."""
    assert {file.name for file in one.iterdir()} == {file.name for file in other.iterdir()}
    for file in one.iterdir():
        first, second = file.read_bytes(), (other / file.name).read_bytes()
        if file.name == "generation_config.json":
            first, second = ({**json.loads(data), "eos_token_id": sorted(json.loads(data)["eos_token_id"])} for data in (first, second))
        assert first == second, file.name


def test_a_checkpoint_exports_as_the_run_did(ranks, full, tmp_path):
    run_dir = run(ranks, 2, full, tmp_path / "run", zero=ZeroConfig(stage=3))
    assert export.main([str(step_folder(run_dir, STEPS)), str(tmp_path / "out")]) == 0
    same_files(run_dir / EXPORT, tmp_path / "out")


def test_the_adapter_of_a_checkpoint_exports_as_the_run_did_and_merges(ranks, lora, tmp_path, capsys):
    run_dir = run(ranks, 2, lora, tmp_path / "run", zero=ZeroConfig(stage=2))
    folder = step_folder(run_dir, STEPS)
    assert export.main([str(folder), str(tmp_path / "adapter")]) == 0
    same_files(run_dir / EXPORT, tmp_path / "adapter")
    for source, out in ((run_dir, "of_export"), (folder, "of_checkpoint")):
        assert export.main([str(source), str(tmp_path / out), "--merge", "--dtype", "fp32"]) == 0
    same_files(tmp_path / "of_export", tmp_path / "of_checkpoint")
    capsys.readouterr()
    answers = []
    for model in (run_dir, folder):
        assert generate.main(["--model", str(model), "say xx", "--max-new-tokens", "4"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert export.main([str(folder), str(tmp_path / "no"), "--dtype", "fp32", "--format", "dcp"]) == 2
    said = capsys.readouterr().err
    assert "--dtype: got fp32 for the adapter" in said and "--format: got dcp for the adapter" in said
    base = Path(lora.model.path) / "model.safetensors"
    shutil.copy(base, tmp_path / "kept")
    base.write_bytes(base.read_bytes()[:-100] + bytes(100))
    try:
        assert export.main([str(folder), str(tmp_path / "no"), "--merge"]) == 2
        assert "whose weights are not those that the adapter was trained on" in capsys.readouterr().err
    finally:
        shutil.copy(tmp_path / "kept", base)
    assert not (tmp_path / "no").exists()


def test_a_run_starts_from_a_checkpoint_of_deepspeed_with_the_architecture_of_the_recipe(ranks, full, tmp_path, capsys):
    torch.manual_seed(5)
    masters = {name: parameter.detach() for name, parameter in Llama(ARCHITECTURE).named_parameters()}
    folder = write_deepspeed(tmp_path / "ds", as_groups(masters), stage=3, world_size=3)
    model = dataclasses.replace(full.model, path=str(folder), arch=ARCHITECTURE)
    still = dataclasses.replace(full.optimizer, lr=1e-30)  # the masters stay, so that they can be compared
    run_dir = run(ranks, 2, full, tmp_path / "run", model=model, optimizer=still, zero=ZeroConfig(stage=3))
    started = open_model(str(step_folder(run_dir, STEPS)))
    assert all(torch.equal(started.read(name, 0, tensor.numel()), tensor.flatten()) for name, tensor in masters.items())
    assert checkpoint_command.main(["show", str(folder), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "DeepSpeed 0.19.8, ZeRO stage 3, 3 ranks, step 2" in shown and f"model.path={folder}" in shown
    assert "copy the model's config.json" in shown and "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt:" in shown


@pytest.mark.parametrize("action", ["ls", "show", "verify"])
def test_looking_for_checkpoints_where_there_are_none(tmp_path, capsys, action):
    assert checkpoint_command.main([action, str(tmp_path)]) == 2
    assert "which holds no checkpoint" in capsys.readouterr().err
