"""Arithmetic between settings, files and hardware: every problem names the setting, what was got and what to write."""

from __future__ import annotations

import dataclasses

import pytest

from framework.cli.check import check_everything
from framework.config import hardware
from framework.config.check import check_schedule, check_settings
from framework.config.check_zero import zero_problems
from framework.config.compose import compose
from framework.config.hardware import check_disk, check_hardware, world_size
from framework.config.schema import OffloadConfig, RecipeConfig, ScheduleConfig, TrainerConfig, ZeroConfig, ZeroModuleConfig

SOUND = compose(["+recipe=quickstart", "trainer.devices=1", "trainer.accelerator=cpu"]).recipe
RANDOM = compose(["+recipe=llama_pretrain", "data.train=x.txt", "trainer.devices=1"]).recipe

BF16 = {"precision__compute_dtype": "bfloat16"}


def changed(recipe: RecipeConfig, **settings) -> RecipeConfig:
    """`recipe` with `group__key=value` set, at any depth."""
    for path, value in settings.items():
        recipe = _replaced(recipe, path.split("__"), value)
    return recipe


def _replaced(config, path, value):
    first, *rest = path
    return dataclasses.replace(config, **{first: _replaced(getattr(config, first), rest, value) if rest else value})


def test_the_recipes_that_the_changes_below_start_from_are_sound():
    assert check_settings(SOUND) == []
    assert check_settings(RANDOM) == []
    assert check_settings(changed(SOUND, eval__prompts="my prompts.txt")) == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("optimizer__lr", 0.0),
        ("optimizer__lr", -1.0),
        ("optimizer__eps", 0.0),
        ("optimizer__betas", (0.9, 1.0)),
        ("optimizer__weight_decay", -0.1),
        ("optimizer__grad_clip", 0.0),
        ("schedule__min_lr_ratio", 1.5),
        ("schedule__warmup_ratio", 1.0),
        ("schedule__warmup_ratio", -0.1),
        ("data__max_tokens", 1),
        ("data__max_rows", 0),
        ("data__num_workers", 0),
        ("data__cache_dir", ""),
        ("data__validation_fraction", 1.0),
        ("data__validation_fraction", -0.1),
        ("trainer__log_every_n_steps", 0),
        ("trainer__collective_timeout_seconds", 0),
        ("trainer__devices", 0),
        ("trainer__epochs", 0.0),
        ("eval__every_n_steps", 0),
        ("eval__max_batches", 0),
        ("eval__min_delta", -0.1),
        ("eval__min_delta", 0.1),
        ("eval__prompts", []),
        ("eval__prompts", ["Hi", " "]),
        ("eval__generate_every_n_steps", 10),
        ("eval__max_new_tokens", 0),
        ("eval__temperature", -1.0),
        ("zero__prefetch_bytes", -1),
        ("checkpoint__max_shard_bytes", 0),
        ("checkpoint__keep", 0),
        ("checkpoint__keep_every_n_steps", 750),
        ("checkpoint__keep_best", -1),
        ("name", ""),
        ("name", "../elsewhere"),
        ("name", "/tmp/x"),
    ],
)
def test_a_value_out_of_range_is_a_problem_of_that_setting(setting, value):
    (problem,) = check_settings(changed(SOUND, **{setting: value}))
    assert problem.path == setting.replace("__", ".")
    assert problem.expected


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"trainer__epochs": None}, "trainer.max_steps"),
        ({"trainer__micro_batch_size": 3}, "trainer.global_batch_size"),
        ({"trainer__micro_batch_size": None, "trainer__global_batch_size": None}, "trainer.micro_batch_size"),
        ({"schedule__warmup_steps": 1}, "schedule.warmup_steps"),
        ({"schedule__name": "constant", "schedule__min_lr_ratio": 0.1}, "schedule.min_lr_ratio"),
        ({"schedule__name": "wsd", "schedule__decay_ratio": 0.0}, "schedule.decay_ratio"),
        ({"model__path": None}, "model.path"),
        ({"model__activation_checkpointing": 0}, "model.activation_checkpointing"),
        ({"model__activation_checkpointing": 2, "model__activation_budget_bytes": 1000}, "model.activation_budget_bytes"),
        ({"model__activation_budget_bytes": 0}, "model.activation_budget_bytes"),
        ({"model__activation_offload": True}, "model.activation_offload"),
        ({"data__validation": "x.jsonl"}, "data.validation_fraction"),
        ({"checkpoint__keep_best": 1, "eval__every_n_steps": None}, "checkpoint.keep_best"),
        ({"checkpoint__every_n_steps": None, "checkpoint__keep_every_n_steps": 1000}, "checkpoint.keep_every_n_steps"),
        ({"data__validation_fraction": 0.0, "eval__every_n_steps": 10}, "eval.every_n_steps"),
        ({"data__validation_fraction": 0.0, "eval__patience": 3}, "eval.patience"),
        ({"data__validation_fraction": 0.1, "eval__patience": 3}, "eval.patience"),
        ({"data__validation_fraction": 0.1, "eval__patience": 0, "eval__every_n_steps": 2}, "eval.patience"),
        ({"offload__params": "cpu"}, "offload.params"),
        ({"offload__fraction": 1.5}, "offload.fraction"),
        ({"offload__optimizer": "nvme"}, "offload.nvme_path"),
        ({"offload__params": "nvme", "zero__stage": 3, "offload__nvme_path": " "}, "offload.nvme_path"),
        ({"offload__optimizer": "nvme", "offload__nvme_path": "/x", "optimizer__name": "rmsprop"}, "offload.optimizer"),
        ({"offload__optimizer": "nvme", "offload__nvme_path": "/x", "precision__compute_dtype": "float64"}, "offload.optimizer"),
        ({"zero__stage": 2, "zero__gather_compression": "int8"}, "zero.gather_compression"),
        ({"zero__stage": 0, "zero__reduce_compression": "bf16"}, "zero.reduce_compression"),
        ({"zero__stage": 3, "zero__gather_compression": "int8", "precision__compute_dtype": "float64"}, "zero.gather_compression"),
        ({"zero__stage": 1, "zero__reduce_compression": "int8", "precision__compute_dtype": "float64"}, "zero.reduce_compression"),
        ({"zero__stage": 1, "zero__reduce_compression": "bf16", "zero__error_feedback": True}, "zero.error_feedback"),
        ({"offload__optimizer": "nvme", "offload__nvme_path": "/x", "optimizer__moments": "8bit"}, "offload.optimizer"),
        (
            {
                "precision__compute_dtype": "bfloat16",
                "precision__master_weights": "remainder",
                "offload__optimizer": "nvme",
                "offload__nvme_path": "/x",
            },
            "precision.master_weights",
        ),
        (
            {"precision__compute_dtype": "bfloat16", "precision__master_weights": "none", "optimizer__moments": "8bit"},
            "precision.master_weights",
        ),
        ({"optimizer__name": "sgd", "optimizer__moments": "8bit"}, "optimizer.moments"),
        ({"optimizer__moments": "8bit", "precision__compute_dtype": "float64"}, "optimizer.moments"),
        ({"optimizer__adjust_lr": "original"}, "optimizer.adjust_lr"),
        ({"optimizer__adamw_lr": 1e-4}, "optimizer.adamw_lr"),
        ({"optimizer__name": "muon", "optimizer__adamw_lr": 0.0}, "optimizer.adamw_lr"),
        ({"optimizer__name": "muon", "optimizer__nesterov": True}, "optimizer.nesterov"),
        ({"optimizer__name": "adafactor", "optimizer__momentum": 0.9}, "optimizer.momentum"),
        ({"optimizer__name": "muon", "offload__optimizer": "cpu"}, "offload.optimizer"),
        ({"optimizer__name": "adafactor", "offload__optimizer": "cpu"}, "offload.optimizer"),
        ({"precision__compute_dtype": "bfloat16", "precision__loss_scale": 8.0}, "precision.loss_scale"),
        ({"precision__compute_dtype": "float16", "precision__loss_scale": 0.0}, "precision.loss_scale"),
        ({"precision__compute_dtype": "float16", "precision__min_loss_scale": 128.0}, "precision.initial_loss_scale"),
        ({"precision__compute_dtype": "float16", "precision__loss_scale_window": 0}, "precision.loss_scale_window"),
        ({**BF16, "precision__autocast": "float16"}, "precision.autocast"),
        ({"precision__autocast": "bfloat16", "precision__loss_scale": 8.0}, "precision.loss_scale"),
        ({"precision__autocast": "float16", "precision__loss_scale": 0.0}, "precision.loss_scale"),
        ({"precision__fp32_modules": ["norm"]}, "precision.fp32_modules"),
        ({**BF16, "precision__fp32_modules": ["("]}, "precision.fp32_modules[0]"),
        ({"precision__compute_dtype": "float16", "precision__master_weights": "none"}, "precision.master_weights"),
        ({**BF16, "precision__master_weights": "remainder", "optimizer__name": "rmsprop"}, "precision.master_weights"),
        ({**BF16, "precision__master_weights": "none", "zero__stage": 3, "offload__params": "cpu"}, "precision.master_weights"),
    ],
)
def test_settings_that_contradict_each_other(changes, path):
    assert [problem.path for problem in check_settings(changed(SOUND, **changes))] == [path]


@pytest.mark.parametrize(
    ("changes", "path", "fix"),
    [
        ({"model__tokenizer": None}, "model.tokenizer", "model.tokenizer=/path/to/tokenizer"),
        ({"model__arch__hidden_size": 130, "model__arch__num_attention_heads": 4}, "model.arch.hidden_size", "model.arch.hidden_size=132"),
        ({"model__arch__num_key_value_heads": 3}, "model.arch.num_key_value_heads", "model.arch.num_key_value_heads=2"),
        ({"model__arch__head_dim": 33}, "model.arch.head_dim", "model.arch.head_dim=64"),
        ({"model__arch__head_dim": 0}, "model.arch.head_dim", "model.arch.head_dim=64"),
        ({"model__arch__head_dim": -2}, "model.arch.head_dim", "model.arch.head_dim=64"),
        ({"model__arch__sliding_window": 0}, "model.arch.sliding_window", "model.arch.sliding_window=1"),
        ({"model__arch__num_hidden_layers": 0}, "model.arch.num_hidden_layers", "model.arch.num_hidden_layers=1"),
        ({"data__max_tokens": 4096}, "data.max_tokens", "data.max_tokens=2048"),
    ],
)
def test_an_architecture_that_cannot_be(changes, path, fix):
    (problem,) = check_settings(changed(RANDOM, **changes))
    assert (problem.path, problem.fix) == (path, fix)


@pytest.mark.parametrize(
    ("zero", "path", "fix"),
    [
        ({"shard_size": 3}, "zero.shard_size", "zero.shard_size=2"),
        ({"shard_size": 5}, "zero.shard_size", "zero.shard_size=4"),
        ({"shard_size": 1}, "zero.shard_size", "zero=0"),
        ({"stage": 0, "shard_size": 2}, "zero.shard_size", "zero.shard_size=null"),
        ({"shard_optimizer": "world"}, "zero.shard_optimizer", "zero.shard_optimizer=group"),
        ({"shard_size": 2, "secondary_shard_size": 2}, "zero.secondary_shard_size", "zero.shard_size=null"),
        ({"secondary_shard_size": 16}, "zero.secondary_shard_size", "zero.secondary_shard_size=8"),
        ({"stage": 2, "secondary_shard_size": 2}, "zero.secondary_shard_size", "zero=3"),
        ({"secondary_shard_size": 2, "reshard_after_forward": False}, "zero.secondary_shard_size", "zero.reshard_after_forward=true"),
        ({"keep_gathered_bytes": -1}, "zero.keep_gathered_bytes", "zero.keep_gathered_bytes=0"),
        ({"stage": 1, "keep_gathered_bytes": 9}, "zero.keep_gathered_bytes", "zero.keep_gathered_bytes=0"),
        (
            {"modules": [ZeroModuleConfig(pattern="a(", stage=1)]},
            "zero.modules[0].pattern",
            "zero.modules=[{pattern: embed_tokens, stage: 2}]",
        ),
        ({"modules": [ZeroModuleConfig(pattern="norm")]}, "zero.modules[0]", ""),
        (
            {"modules": [ZeroModuleConfig(pattern="norm", stage=2, reshard_after_forward=False)]},
            "zero.modules[0].reshard_after_forward",
            "",
        ),
    ],
)
def test_shard_groups_and_policies_that_mean_nothing_on_8_ranks(zero, path, fix):
    (problem,) = zero_problems(ZeroConfig(**{"stage": 3} | zero), 8)
    assert (problem.path, problem.fix) == (path, fix) and problem.expected


def test_shard_groups_are_looked_at_with_the_ranks_of_the_recipe():
    grouped = changed(SOUND, zero=ZeroConfig(stage=3, shard_size=2))
    assert [problem.path for problem in check_settings(grouped)] == ["zero.shard_size"]
    assert (
        zero_problems(ZeroConfig(stage=3, shard_size=2), 8)
        == zero_problems(ZeroConfig(stage=0, shard_size=2, modules=[ZeroModuleConfig(pattern="norm", stage=1)]), 8)
        == []
    )


def test_p24_a_run_of_zero_steps_is_found_before_anything_is_loaded():
    (problem,) = check_settings(changed(SOUND, trainer__epochs=None, trainer__max_steps=0, schedule__warmup_ratio=None))
    assert "0 optimizer steps" in problem.got


def test_p25_warmup_must_leave_room():
    steps = {"trainer__epochs": None, "trainer__max_steps": 10, "schedule__warmup_ratio": None}
    assert check_settings(changed(SOUND, **steps, schedule__warmup_steps=0)) == []
    assert check_settings(changed(SOUND, **steps, schedule__warmup_steps=9)) == []
    assert [p.path for p in check_settings(changed(SOUND, **steps, schedule__warmup_steps=10))] == ["schedule.warmup_steps"]


def test_warmup_and_decay_of_wsd_must_fit_into_the_run():
    (problem,) = check_schedule(ScheduleConfig(name="wsd", warmup_steps=60, decay_ratio=0.5), 100)
    assert problem.fix == "schedule.decay_ratio=0.4"


def test_all_problems_are_found_together():
    inputs = {"data__train": "nowhere.jsonl", "model__path": "pkg://nowhere/x.gguf"}
    recipe = changed(SOUND, optimizer__lr=0.0, trainer__micro_batch_size=3, **inputs)
    found = {problem.path for problem in check_everything(recipe)}
    assert found == {"optimizer.lr", "trainer.global_batch_size", "data.train", "model.path"}


def test_fixes_are_not_needed_for_the_recipes_that_are_shipped():
    for name in ("quickstart", "llama_sft"):
        compose([f"+recipe={name}"], check=check_everything)


# ---- hardware
@pytest.fixture
def gpus(monkeypatch):
    """`gpus(n)`: this machine has n GPUs."""

    def have(count: int) -> None:
        monkeypatch.setattr(hardware, "visible_gpus", lambda: count)
        monkeypatch.setattr(hardware, "local_ranks", lambda trainer: max(1, count) if trainer.devices == "auto" else trainer.devices)

    return have


def test_cuda_without_a_gpu(gpus):
    gpus(0)
    (problem,) = check_hardware(TrainerConfig(accelerator="cuda"))
    assert (problem.path, problem.fix) == ("trainer.accelerator", "trainer.accelerator=auto")
    assert check_hardware(TrainerConfig(accelerator="auto", devices=4)) == [], "a CPU takes more ranks than it has cores"


def test_more_ranks_than_the_machine_survives(gpus, monkeypatch):
    gpus(0)
    monkeypatch.setattr(hardware.os, "cpu_count", lambda: 8)
    (problem,) = check_hardware(TrainerConfig(devices=500))
    assert (problem.path, problem.fix) == ("trainer.devices", "trainer.devices=8")
    assert check_hardware(TrainerConfig(devices=32)) == []


def test_more_ranks_than_gpus(gpus):
    gpus(2)
    (problem,) = check_hardware(TrainerConfig(devices=4))
    assert problem.fix == "trainer.devices=2  (or trainer.accelerator=cpu)"
    assert check_hardware(TrainerConfig(devices=4, accelerator="cpu")) == []
    assert check_hardware(TrainerConfig(devices=2, accelerator="cuda")) == []


def test_a_launchers_count_of_ranks_holds(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 6, "LOCAL_WORLD_SIZE": 6, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    assert world_size(TrainerConfig(devices=2)) == 6


def test_a_folder_to_offload_to_is_there_and_can_be_written_to(tmp_path):
    nvme = lambda path: OffloadConfig(optimizer="nvme", nvme_path=str(path))  # noqa: E731
    assert check_disk(nvme(tmp_path)) == check_disk(OffloadConfig(nvme_path="/nowhere")) == []
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file"):
        (problem,) = check_disk(nvme(path))
        assert problem.path == "offload.nvme_path" and "is no folder of this machine" in problem.got
    assert not (tmp_path / "missing").exists(), "a mistyped mount point would be a folder on the system's disk"
