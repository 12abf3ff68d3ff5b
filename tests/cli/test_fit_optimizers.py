"""Whole runs with optimizers that look beyond an element: as plain torch with the same groups, and to the bit after a resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from framework.checkpoint.folder import step_folder
from framework.checkpoint.load import Checkpoint
from framework.cli.fit import plan_of, starting_point
from framework.config.schedule import lr_factor
from framework.config.schema import CheckpointConfig, OptimizerConfig, ParameterGroupConfig, RecipeConfig, ZeroConfig
from framework.data.batches import StepBatches
from framework.models.llama import Llama
from framework.models.pretrained import load_weights, open_pretrained
from framework.plan.describe import describe
from framework.train.metrics import read_metrics, series
from framework.train.run_dir import EXPORT, METRICS, write_run_dir
from tests.cli import test_fit_lora, test_fit_selected
from tests.cli.test_fit import ARCHITECTURE, fit
from tests.cli.test_fit_selected import STEPS, block, prepared, usual_decay

lora = test_fit_lora.recipe
recipe = test_fit_selected.recipe
GROUPS = [ParameterGroupConfig(pattern="o_proj", lr_factor=3.0), ParameterGroupConfig(pattern="self_attn", weight_decay=0.5)]
MUON = OptimizerConfig(name="muon", lr=2e-2, adamw_lr=5e-3, momentum=0.9, nesterov=True, weight_decay=0.1, grad_clip=0.5, groups=GROUPS)
ADAFACTOR = OptimizerConfig(name="adafactor", lr=3e-2, weight_decay=0.1, grad_clip=0.5, groups=GROUPS)
EIGHT_BIT = OptimizerConfig(lr=5e-3, weight_decay=0.1, grad_clip=0.5, groups=GROUPS, moments="8bit")


def run(ranks, world_size: int, recipe: RecipeConfig, run_dir: Path, **changes: object) -> Path:
    recipe = dataclasses.replace(recipe, **changes)
    write_run_dir(run_dir, recipe, overrides=[], command=["test"])
    ranks(world_size, fit, recipe, run_dir, timeout=180)
    return run_dir


def is_orthogonal(name: str, parameter: torch.Tensor) -> bool:
    return block(name) is not None and parameter.dim() == 2


def by_muon_and_adamw(named: dict[str, tuple[torch.nn.Parameter, dict]]) -> list[torch.optim.Optimizer]:
    matrices = [{"params": [p], **options} for name, (p, options) in named.items() if is_orthogonal(name, p)]
    others = [
        {"params": [p], **options, "factor": options["factor"] * MUON.adamw_lr / MUON.lr}
        for name, (p, options) in named.items()
        if not is_orthogonal(name, p)
    ]
    muon = torch.optim.Muon(matrices, momentum=0.9, nesterov=True, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, betas=MUON.betas, eps=MUON.eps)]


def by_adafactor(named: dict[str, tuple[torch.nn.Parameter, dict]]) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor([{"params": [p], **options} for p, options in named.values()])]


def plain_training(recipe: RecipeConfig, make: Callable) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, losses = Llama(ARCHITECTURE), []
    load_weights(model, open_pretrained(recipe.model.path), show=False)
    named = {}
    for name, parameter in model.named_parameters():
        decay = 0.5 if "self_attn" in name and "o_proj" not in name else usual_decay(name, parameter)
        named[name] = parameter, {"factor": 3.0 if "o_proj" in name else 1.0, "weight_decay": decay}
    optimizers = make(named)
    batches = StepBatches(prepared(recipe).train, micro_batch_size=8, accumulate=1, seed=recipe.seed)
    while len(losses) < STEPS:
        for (batch,) in batches:
            if len(losses) == STEPS:
                break
            loss = cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.grad_clip)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = recipe.optimizer.lr * lr_factor(recipe.schedule, len(losses), STEPS) * group["factor"]
                optimizer.step()
            losses.append(loss.item())
        batches.set_epoch(batches.epoch + 1)
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


# Muon in fp32: which way the smallest singular values go depends on how bf16 rounds, so what is seen is learning rates, not last bits.
@pytest.mark.parametrize(("optimizer", "make", "tolerance"), [(MUON, by_muon_and_adamw, 2e-3), (ADAFACTOR, by_adafactor, 2e-5)])
@pytest.mark.parametrize(("stage", "world"), [(1, 2), (3, 2)])
def test_p44_a_run_with_groups_is_one_of_plain_torch(ranks, recipe, tmp_path, optimizer, make, tolerance, stage: int, world: int) -> None:
    recipe = dataclasses.replace(recipe, optimizer=optimizer)
    expected, parameters = plain_training(recipe, make)
    run_dir = run(ranks, world, recipe, tmp_path / "run", zero=ZeroConfig(stage=stage))
    assert series(read_metrics(run_dir / METRICS), "loss")[1] == pytest.approx(expected, rel=tolerance)
    exported = open_pretrained(run_dir / EXPORT)
    for name, parameter in parameters.items():
        tensor = exported.read(name, 0, parameter.numel()).view(parameter.shape)
        torch.testing.assert_close(tensor, parameter, rtol=0, atol=5 * tolerance, msg=lambda m, name=name: f"{name}: {m}")


def written(run_dir: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint, by parameter and key."""
    checkpoint = Checkpoint(step_folder(run_dir, STEPS))
    found = {}
    for name, place in checkpoint.places.items():
        numel, state = torch.Size(place.shape).numel(), checkpoint.optimizer_of(name)
        found |= {f"{name}/{key}": checkpoint.read(name, 0, numel, key) for key in ("master", *state["flat"])}
        found |= {f"{name}/{key}": checkpoint.state_of_whole(name, key, shape) for key, shape in state.get("whole", {}).items()}
    return found


@pytest.mark.parametrize("optimizer", [MUON, ADAFACTOR, EIGHT_BIT], ids=["muon", "adafactor", "8bit"])
def test_p16_a_resumed_run_ends_with_the_same_bits(ranks, recipe, tmp_path, optimizer: OptimizerConfig) -> None:
    settings = {"optimizer": optimizer, "zero": ZeroConfig(stage=3)}
    settings["checkpoint"] = CheckpointConfig(every_n_steps=1, keep=9, at_end=True, export=False)
    whole = run(ranks, 2, recipe, tmp_path / "whole", **settings)
    again = run(ranks, 2, recipe, tmp_path / "again", **settings, resume=str(step_folder(whole, 2)))
    expected = written(whole)
    assert any(key.rpartition("/")[2] in ("momentum_buffer", "row_var", "exp_avg_code") for key in expected)
    assert expected.keys() == written(again).keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in written(again).items())
    assert series(read_metrics(again / METRICS), "loss") == series(read_metrics(whole / METRICS), "loss")


def test_muon_makes_steps_of_adapters_orthogonal(ranks, lora, tmp_path) -> None:
    optimizer = OptimizerConfig(name="muon", lr=1e-2, momentum=0.95, nesterov=True, grad_clip=0.5)
    settings = dataclasses.replace(lora, optimizer=optimizer)
    plan = plan_of(settings, starting_point(settings), prepared(settings), 2)
    assert len(plan.orthogonal) == sum(len(layout.slots) for unit in plan.units for layout in unit.layouts if layout.requires_grad)
    assert f"orthogonal steps for {len(plan.orthogonal)} matrices in blocks" in describe(plan)
    run_dir = run(ranks, 2, settings, tmp_path / "run", zero=ZeroConfig(stage=2))
    losses = series(read_metrics(run_dir / METRICS), "loss")[1]
    assert losses[-1] < losses[0]
