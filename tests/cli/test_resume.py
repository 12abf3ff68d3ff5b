"""A run that goes on from a checkpoint: to the bit with as many ranks, on the same samples with others, and never silently changed."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import framework.cli.fit
import framework.train.callbacks.checkpoint
from framework.checkpoint.folder import FORMAT, VERSION, checkpoints, read_index, resolve, sealed, step_folder, step_of, validation_loss
from framework.checkpoint.load import Checkpoint
from framework.cli import check as check_command
from framework.cli import checkpoint as checkpoint_command
from framework.cli.fit import dashboard_run, plan_of, preview
from framework.cli.launch import launch
from framework.config.errors import UserError
from framework.config.schema import CheckpointConfig, OffloadConfig, PeftConfig, PrecisionConfig, RecipeConfig, RopeScaling, ZeroConfig
from framework.config.typed import to_dict
from framework.data.prepare import prepare
from framework.models.tokenizer import load_tokenizer
from framework.train.metrics import MetricsRow, read_metrics
from framework.train.run_dir import METRICS, config_yaml, read_summary, write_run_dir
from tests.cli import test_fit, test_fit_lora
from tests.cli.test_fit import fit
from tests.pool import RanksFailed

full = test_fit.recipe  # 23 rows of which 2 are held out: 3 steps an epoch, the last of which is short
lora = test_fit_lora.recipe
STEPS = 7
ROOT = Path(__file__).parents[2]
SAVES = CheckpointConfig(every_n_steps=1, keep=9, at_end=True, export=False)


def run(ranks, world_size: int, recipe: RecipeConfig, run_dir: Path, **changes: object) -> Path:
    recipe = dataclasses.replace(recipe, checkpoint=SAVES, trainer=dataclasses.replace(recipe.trainer, max_steps=STEPS), **changes)
    write_run_dir(run_dir, recipe, overrides=[], command=["test"])
    ranks(world_size, fit, recipe, run_dir, timeout=120)
    return run_dir


@pytest.fixture(scope="module")
def alone(ranks, full, tmp_path_factory) -> Path:
    """A run of one rank, to go on from. Who changes its files takes a copy."""
    return run(ranks, 1, full, tmp_path_factory.mktemp("alone") / "whole")


@pytest.fixture(scope="module")
def sharded(ranks, full, tmp_path_factory) -> Path:
    """As `alone`, of two ranks at stage 3."""
    return run(ranks, 2, full, tmp_path_factory.mktemp("sharded") / "whole", zero=ZeroConfig(stage=3))


def logged(run_dir: Path) -> list[MetricsRow]:
    """All rows, without what a clock has measured."""
    return [dataclasses.replace(row, seconds=None, tokens_per_second=None) for row in read_metrics(run_dir / METRICS)]


def state(run_dir: Path) -> dict[str, torch.Tensor]:
    """Masters and moments after the last step."""
    checkpoint = Checkpoint(step_folder(run_dir, STEPS))
    assert checkpoint.verify() > 0
    return {
        f"{name}/{key}": checkpoint.read(name, 0, torch.Size(place.shape).numel(), key)
        for name, place in checkpoint.places.items()
        for key in ("master", "exp_avg", "exp_avg_sq")
    }


def assert_same_state(run_dir: Path, other: Path) -> None:
    found, expected = state(run_dir), state(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize(("kind", "world_size", "stage"), [("alone", 1, 0), ("sharded", 2, 3)])
def test_p16_a_resumed_run_ends_with_the_same_bits(ranks, full, tmp_path, request, kind, world_size, stage):
    whole = request.getfixturevalue(kind)
    assert [path.name for path in checkpoints(whole)] == [f"step_{step}" for step in range(1, STEPS + 1)]
    prepared = prepare(full.data, load_tokenizer(full.model), seed=full.seed, show_progress=False)
    assert read_summary(whole)["checkpoint_copy_bytes"] == plan_of(full, None, prepared, world_size).checkpoint_bytes
    for step in (1, 3, 5):  # inside the first epoch, at its end, inside the second
        folder = step_folder(whole, step)
        again = run(ranks, world_size, full, tmp_path / f"from_{step}", zero=ZeroConfig(stage=stage), resume=str(folder))
        assert logged(again) == logged(whole)
        assert_same_state(again, whole)
        assert read_summary(again)["steps"] == STEPS == read_summary(again)["checkpoint_step"]


def test_p16_offloaded_state_and_the_loss_scale_go_on(ranks, full, tmp_path):
    settings = {
        "zero": ZeroConfig(stage=3),
        "offload": OffloadConfig(optimizer="cpu", params="cpu"),
        "precision": PrecisionConfig(compute_dtype="float16", initial_loss_scale=2.0**17, loss_scale_window=2),
    }
    whole = run(ranks, 2, full, tmp_path / "whole", **settings)
    scales = [row.loss_scale for row in logged(whole) if row.loss_scale]
    assert len(set(scales)) > 1, "it is on its way"
    settings["offload"] = OffloadConfig(optimizer="nvme", params="nvme", nvme_path=str(tmp_path))  # of one place, on another
    again = run(ranks, 2, full, tmp_path / "again", **settings, resume=str(step_folder(whole, 4)))
    assert repr(logged(again)) == repr(logged(whole)), "as text: what has overflowed is no number, and not equal to itself"
    assert_same_state(again, whole)


def test_p16_a_run_that_was_killed_inside_an_accumulation_ends_with_the_same_bits(ranks, full, sharded, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    recipe = dataclasses.replace(full, zero=ZeroConfig(stage=3))
    recipe = dataclasses.replace(recipe, checkpoint=SAVES, trainer=dataclasses.replace(recipe.trainer, max_steps=STEPS))
    config = write_run_dir(tmp_path / "killed", recipe, overrides=[], command=["test"])
    rank = [sys.executable, str(Path(__file__).with_name("killed_rank.py")), "5", str(config), str(tmp_path / "killed")]
    assert "killed by SIGKILL" in launch(rank, ranks=2, run_dir=tmp_path / "killed").message
    newest = resolve(str(tmp_path / "killed"), tmp_path, "x")
    assert 3 <= step_of(newest) <= 4, "step 5 was under way, and with it perhaps the save of step 4"
    again = run(ranks, 2, recipe, tmp_path / "again", resume=str(newest))
    assert logged(again) == logged(sharded)
    assert_same_state(again, sharded)


def test_p16_dropout_goes_on_with_the_same_draws(ranks, lora, tmp_path):
    lora = dataclasses.replace(lora, peft=PeftConfig(method="lora", rank=4, dropout=0.3), zero=ZeroConfig(stage=2))
    whole = run(ranks, 2, lora, tmp_path / "whole")
    again = run(ranks, 2, lora, tmp_path / "again", resume=str(step_folder(whole, 4)))
    assert logged(again) == logged(whole)


def test_p17_another_number_of_ranks_and_another_stage_see_the_same_samples(ranks, full, sharded, tmp_path):
    for world_size, stage in ((1, 0), (4, 2)):
        zero = ZeroConfig(stage=stage)
        again = run(ranks, world_size, full, tmp_path / f"{world_size}", zero=zero, resume=str(step_folder(sharded, 2)))
        losses, expected = ([row.loss for row in logged(folder) if row.loss] for folder in (again, sharded))
        assert losses[:2] == expected[:2] and losses == pytest.approx(expected, rel=1e-5)


def with_arch(recipe: RecipeConfig, **changes: object) -> RecipeConfig:
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, arch=dataclasses.replace(recipe.model.arch, **changes)))


def test_p18_an_adapter_goes_on_only_with_the_model_that_it_was_trained_on(ranks, lora, tmp_path):
    checkpoint = step_folder(run(ranks, 1, lora, tmp_path / "whole"), 2)
    weights = Path(lora.model.path) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    other = tmp_path / "other"
    shutil.copytree(lora.model.path, other)
    data[-100:] = bytes(100)
    (other / "model.safetensors").write_bytes(bytes(data))
    moved = dataclasses.replace(lora, model=dataclasses.replace(lora.model, path=str(other)))
    with pytest.raises(RanksFailed, match="whose weights are not those that were frozen in the checkpoint's run"):
        run(ranks, 1, moved, tmp_path / "again", resume=str(checkpoint))


def test_p18_what_has_changed_is_refused_or_said(full, alone):
    checkpoint = step_folder(alone, 3)
    full = dataclasses.replace(full, resume=str(checkpoint), trainer=dataclasses.replace(full.trainer, max_steps=STEPS))
    same = preview(full)
    assert same.startswith("resumes after step 3 from ") and "changed since" not in same
    for changed, message in (
        (dataclasses.replace(full, seed=4), "seed: got 4, where the checkpoint was made with 3"),
        (
            dataclasses.replace(full, data=dataclasses.replace(full.data, max_rows=22)),
            "other training samples than those of the checkpoint",
        ),
        (
            dataclasses.replace(full, trainer=dataclasses.replace(full.trainer, global_batch_size=4)),
            "trainer.global_batch_size: got 4, where the checkpoint was made with 8",
        ),
        (dataclasses.replace(full, trainer=dataclasses.replace(full.trainer, max_steps=3)), "3 steps, all of which are done"),
        (with_arch(full, rope_scaling=RopeScaling(kind="linear", factor=8.0)), "another architecture than that of the checkpoint"),
    ):
        with pytest.raises(UserError, match=message):
            preview(changed)
    text = preview(
        dataclasses.replace(
            full, optimizer=dataclasses.replace(full.optimizer, lr=1e-3), trainer=dataclasses.replace(full.trainer, max_steps=9)
        )
    )
    assert "changed since the checkpoint: optimizer.lr: 0.01 -> 0.001" in text
    assert "changed since the checkpoint: steps of the whole run: 7 -> 9" in text


def test_the_command_lists_shows_and_verifies(sharded, tmp_path, capsys):
    whole = Path(shutil.copytree(sharded, tmp_path / "whole", symlinks=True))
    assert checkpoint_command.main(["ls", str(whole)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == STEPS + 1 and all(line.split()[1] == "2" and "whole" in line for line in lines[1:])
    assert checkpoint_command.main(["show", str(whole), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert f"step        {STEPS}" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("model.norm.weight  float32 [32]  ")]
    file, first_byte = line.split("  ")[-1].split()[0].split(":")
    value = np.fromfile(step_folder(whole, STEPS) / file, dtype=np.float32, count=1, offset=int(first_byte))
    assert value[0] == Checkpoint(step_folder(whole, STEPS)).read("model.norm.weight", 0, 1)[0]
    assert checkpoint_command.main(["verify", str(whole)]) == 0
    assert "every checksum as it was written" in capsys.readouterr().out
    file = step_folder(whole, STEPS) / "rank_1.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    assert checkpoint_command.main(["verify", str(whole)]) == 2
    captured = capsys.readouterr()
    assert "rank_1.safetensors: got changed bytes" in captured.err and captured.out.count("every checksum") == STEPS - 1
    file.unlink()
    assert checkpoint_command.main(["ls", str(step_folder(whole, STEPS))]) == 0
    assert "no rank_1.safetensors" in capsys.readouterr().out
    assert checkpoint_command.main(["ls", str(tmp_path)]) == 2


def test_a_validation_that_is_due_with_a_save_comes_first_and_the_best_stay(ranks, full, tmp_path, capsys):
    """So a run that goes on from a checkpoint never lacks the validation of its step."""
    recipe = dataclasses.replace(
        full,
        checkpoint=CheckpointConfig(every_n_steps=3, keep=2, keep_best=1, export=False),
        trainer=dataclasses.replace(full.trainer, max_steps=STEPS, log_every_n_steps=3),
        optimizer=dataclasses.replace(full.optimizer, lr=0.5),  # so that the loss does not only fall
    )
    write_run_dir(tmp_path / "run", recipe, overrides=[], command=["test"])
    ranks(2, fit, recipe, tmp_path / "run", timeout=120)
    rows = read_metrics(tmp_path / "run" / METRICS)
    losses = {row.step: row.val_loss for row in rows if row.val_loss}
    assert list(losses) == [2, 4, 6, 7]
    best = min(losses, key=losses.get)
    folders = checkpoints(tmp_path / "run")
    assert [step_of(folder) for folder in folders][-2:] in ([3, 6], [4, 6], [6, 7]) and best in map(step_of, folders)
    assert len(folders) <= 3
    assert (tmp_path / "run" / "checkpoints" / "best").read_text() == f"step_{best}\n"
    assert {step_of(folder): validation_loss(read_index(folder)) for folder in folders} == {
        step_of(folder): losses.get(step_of(folder)) for folder in folders
    }
    checkpoint_command.main(["ls", str(tmp_path / "run")])
    assert re.search(rf" {losses[best]:.4f} .* whole, best ", capsys.readouterr().out)

    again = tmp_path / "again"
    write_run_dir(again, recipe, overrides=[], command=["test"])
    ranks(2, fit, dataclasses.replace(recipe, resume=str(step_folder(tmp_path / "run", 6))), again, timeout=120)
    assert logged(again) == logged(tmp_path / "run"), "no row more and none less, at any cadence"


def test_precision_may_change_on_the_way_as_masters_are_fp32(ranks, full, alone, tmp_path):
    as_bf16 = run(ranks, 1, full, tmp_path / "bf16", precision=PrecisionConfig(compute_dtype="bfloat16"), resume=str(step_folder(alone, 3)))
    back = run(ranks, 1, full, tmp_path / "back", resume=str(step_folder(as_bf16, 5)))
    expected, found = ([row.loss for row in logged(folder) if row.loss] for folder in (alone, back))
    assert found[:3] == expected[:3] and found != expected and found == pytest.approx(expected, rel=0.05)
    assert (step_folder(as_bf16, 4) / "rank_0.safetensors").stat().st_size == (step_folder(alone, 4) / "rank_0.safetensors").stat().st_size
    changed = preview(
        dataclasses.replace(
            full,
            resume=str(step_folder(as_bf16, 5)),
            trainer=dataclasses.replace(full.trainer, max_steps=STEPS),
        )
    )
    assert "changed since the checkpoint: precision.compute_dtype: bfloat16 -> float32" in changed


def test_a_checkpoint_that_was_copied_elsewhere_says_that_its_metrics_are_missing(ranks, full, alone, tmp_path):
    shutil.copytree(step_folder(alone, 5), tmp_path / "elsewhere" / "checkpoints" / "step_5")
    (output,) = ranks(1, fit_and_listen, full, tmp_path / "again", str(tmp_path / "elsewhere"), timeout=120)
    assert f"metrics.csv begins after step 5: there is no {tmp_path / 'elsewhere' / METRICS}" in output
    assert [row.step for row in read_metrics(tmp_path / "again" / METRICS) if row.loss] == [6, 7]


def fit_and_listen(recipe: RecipeConfig, run_dir: Path, copied: str) -> str:
    checkpoint = step_folder(Path(copied), 5)
    recipe = dataclasses.replace(
        recipe, checkpoint=SAVES, resume=str(checkpoint), trainer=dataclasses.replace(recipe.trainer, max_steps=STEPS)
    )
    write_run_dir(run_dir, recipe, overrides=[], command=["test"])
    with contextlib.redirect_stdout(io.StringIO()) as output:
        fit(recipe, run_dir)
    return output.getvalue()


def test_p39_jobs_of_a_sweep_that_resumes_do_not_share_one_run_of_the_dashboard(full, tmp_path):
    checkpoint = SimpleNamespace(run={"tracker": "abcd1234"})
    for job, expected in ((None, "abcd1234"), (0, None), (1, None)):
        write_run_dir(tmp_path / f"{job}", full, overrides=[], command=["test"], sweep_job=job)
        assert dashboard_run(checkpoint, tmp_path / f"{job}") == expected
    assert dashboard_run(None, tmp_path / "None") is None


def test_p18_p42_what_settings_tell_is_told_without_torch(full, tmp_path):
    folder = step_folder(tmp_path, 5)
    folder.mkdir(parents=True)
    run_state = {"recipe": to_dict(full), "global_batch_size": 8}
    index = {"format": FORMAT, "version": VERSION, "save": "x", "step": 5, "world_size": 0, "ranks": [], "run": run_state}
    (folder / "index.json").write_text(sealed(index))
    (tmp_path / "recipe.yaml").write_text(config_yaml(dataclasses.replace(full, seed=4)))
    line = ["check", f"+recipe={tmp_path / 'recipe.yaml'}", f"resume={tmp_path}", "data.packing=true", "trainer.max_steps=4"]
    line += ["trainer.global_batch_size=16"]
    code = f"import sys; from framework.cli.check import main; status = main({line[1:]}); print(status, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["2", "False"], done.stderr
    assert "4 problems" in done.stderr
    for wanted in ("seed=3", "data.packing=false", "trainer.global_batch_size=8", "all of which are done in the checkpoint of step 5"):
        assert wanted in done.stderr


def on_a_folder_of_its_own(recipe: RecipeConfig, run_dir: Path) -> None:
    run_dir = run_dir / f"machine_{dist.get_rank()}"
    write_run_dir(run_dir, recipe, overrides=[], command=["test"])
    with pytest.raises(UserError, match="which rank 1 does not see as rank 0 does"):
        _run_with_tokens_of_rank_0(recipe, run_dir)


def _run_with_tokens_of_rank_0(recipe: RecipeConfig, run_dir: Path) -> None:
    """As on two machines: each has its own first rank."""
    place = {"RANK": dist.get_rank(), "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": dist.get_rank()}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    framework.train.callbacks.checkpoint.ROUNDS = 2
    framework.cli.fit.run(recipe, run_dir)


def test_machines_that_do_not_share_the_run_directory_are_told_before_the_first_step(ranks, full, tmp_path):
    ranks(2, on_a_folder_of_its_own, dataclasses.replace(full, checkpoint=SAVES), tmp_path, timeout=120)


def test_a_resume_that_leads_nowhere_is_told_by_the_command_with_what_to_write(tmp_path, capsys):
    words = ["+recipe=quickstart", f"runs_dir={tmp_path}", "trainer.accelerator=cpu"]
    for resume, said in (("atuo", "holds no checkpoint"), (str(tmp_path / "none"), "holds no checkpoint")):
        assert check_command.main([*words, f"resume={resume}"]) == 2
        assert said in capsys.readouterr().err


def test_a_checkpoint_that_was_kept_under_another_name_goes_on_and_the_best_by_its_pointer(ranks, full, alone, tmp_path, capsys):
    whole = Path(shutil.copytree(alone, tmp_path / "whole", symlinks=True))
    kept = tmp_path / "kept" / "good"
    shutil.copytree(step_folder(whole, 4), kept)
    again = run(ranks, 1, full, tmp_path / "again", resume=str(kept))
    assert logged(again) == [row for row in logged(whole) if row.step > 4]
    assert resolve(str(whole / "checkpoints"), tmp_path, "x") == step_folder(whole, STEPS)
    best = whole / "checkpoints" / "best"
    best.write_text("step_3\n")
    assert resolve(str(best), tmp_path, "x") == step_folder(whole, 3)
    assert checkpoint_command.main(["ls", str(best)]) == 0
    assert "step_3" in capsys.readouterr().out
    for nonsense in ("", "/etc", "step_99", "../../.."):
        best.write_text(nonsense)
        with pytest.raises(UserError, match="which names"):
            resolve(str(best), tmp_path, "x")


def test_the_newest_run_is_the_one_that_began_last_whatever_it_is_called(alone, tmp_path):
    first = Path(shutil.copytree(alone, tmp_path / "tiny" / "2026-01-01_10-00-00", symlinks=True))
    (first / "summary.json").unlink()
    for name, began in (("2026-01-01_10-00-00", "10:00:00+0100"), ("a copy", "10:00:00+0100"), ("2026-01-01_09-30-00", "09:30:00+0000")):
        folder = tmp_path / "tiny" / name
        if not folder.exists():
            shutil.copytree(first, folder)
        (folder / "env.json").write_text(f'{{"time": "2026-01-01T{began}"}}')
    assert resolve("auto", tmp_path, "tiny").parent.parent.name == "2026-01-01_09-30-00"
