"""A whole run that trains a part of a model, or parts at different rates: as plain torch with the same groups, for every stage."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch.nn.functional import cross_entropy

from framework.cli.fit import plan_of, starting_point
from framework.config.errors import UserError
from framework.config.schedule import lr_factor
from framework.config.schema import ModelConfig, ParameterGroupConfig, PeftConfig, RecipeConfig, ScheduleConfig, ZeroConfig
from framework.data.batches import StepBatches
from framework.data.prepare import prepare
from framework.models.llama import Llama
from framework.models.pretrained import load_weights, open_pretrained
from framework.models.tokenizer import load_tokenizer
from framework.plan.describe import describe
from framework.plan.resume import check_resume, state_of
from framework.train.metrics import read_metrics, series
from framework.train.run_dir import EXPORT, METRICS, write_run_dir
from tests.cli import test_fit_lora
from tests.cli.test_fit import ARCHITECTURE, fit

lora = test_fit_lora.recipe
STEPS = test_fit_lora.STEPS


@pytest.fixture(scope="module")
def recipe(lora) -> RecipeConfig:
    schedule = ScheduleConfig(name="linear", warmup_steps=1)
    return dataclasses.replace(lora, peft=PeftConfig(), schedule=schedule, optimizer=dataclasses.replace(lora.optimizer, lr=2e-3))


def prepared(recipe: RecipeConfig):
    return prepare(recipe.data, load_tokenizer(recipe.model), seed=recipe.seed, show_progress=False)


def block(name: str) -> int | None:
    found = re.search(r"layers\.(\d)", name)
    return int(found[1]) if found else None


def plain_training(recipe: RecipeConfig, is_trained, lr_of, decay_of) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain torch in one process, a group for every parameter."""
    model = Llama(ARCHITECTURE)
    load_weights(model, open_pretrained(recipe.model.path), show=False)
    groups = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name))
        if parameter.requires_grad:
            groups.append({"params": [parameter], "factor": lr_of(name), "weight_decay": decay_of(name, parameter)})
    config, losses = recipe.optimizer, []
    optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    batches = StepBatches(prepared(recipe).train, micro_batch_size=8, accumulate=1, seed=recipe.seed)
    while len(losses) < STEPS:
        for (batch,) in batches:
            if len(losses) == STEPS:
                break
            for group in optimizer.param_groups:
                group["lr"] = config.lr * lr_factor(recipe.schedule, len(losses), STEPS) * group["factor"]
            loss = cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], config.grad_clip)
            optimizer.step()
            losses.append(loss.item())
        batches.set_epoch(batches.epoch + 1)
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def usual_decay(name: str, parameter: torch.Tensor) -> float:
    return 0.1 if parameter.dim() > 1 else 0.0


GROUPS = [ParameterGroupConfig(pattern="o_proj", lr_factor=3.0), ParameterGroupConfig(pattern="self_attn", weight_decay=0.5)]
CASES = {
    "frozen": ({"freeze": ["embed_tokens", "layers.0"]}, {}, lambda name: "embed" not in name and block(name) != 0, None, usual_decay),
    "last block": ({"train_last_n_blocks": 1}, {}, lambda name: block(name) in (None, 2), None, usual_decay),
    "decay over blocks": (
        {},
        {"layer_lr_decay": 0.7},
        lambda name: True,
        lambda name: 1.0 if name == "model.norm.weight" else 0.7 ** (4 if block(name) is None else 3 - block(name)),
        usual_decay,
    ),
    "groups": (
        {},
        {"groups": GROUPS},
        lambda name: True,
        lambda name: 3.0 if "o_proj" in name else 1.0,
        lambda name, parameter: 0.5 if "self_attn" in name and "o_proj" not in name else usual_decay(name, parameter),
    ),
}


STAGES = [(0, 1, 2, 3), (0, 3), (1, 3), (2, 3)]  # what is frozen has buffers of its own; the other cases differ in groups only


@pytest.mark.parametrize(("case", "stages"), list(zip(CASES, STAGES, strict=True)), ids=CASES)
def test_p44_it_trains_as_plain_torch_with_the_same_groups_for_every_stage(ranks, recipe, tmp_path, case: str, stages) -> None:
    model, optimizer, is_trained, lr_of, decay_of = CASES[case]
    recipe = dataclasses.replace(
        recipe, model=dataclasses.replace(recipe.model, **model), optimizer=dataclasses.replace(recipe.optimizer, **optimizer)
    )
    expected, parameters = plain_training(recipe, is_trained, lr_of or (lambda name: 1.0), decay_of)
    before = open_pretrained(recipe.model.path)
    for stage in stages:
        run_dir = tmp_path / f"zero{stage}"
        sharded = dataclasses.replace(recipe, zero=ZeroConfig(stage=stage))
        write_run_dir(run_dir, sharded, overrides=[], command=["test"])
        ranks(2, fit, sharded, run_dir, timeout=180)
        rows = read_metrics(run_dir / METRICS)
        assert series(rows, "loss")[1] == pytest.approx(expected, rel=2e-6)
        assert rows[0].lr == 2e-3 * lr_factor(recipe.schedule, 0, STEPS), "what is logged is the rate of the schedule"
        exported = open_pretrained(run_dir / EXPORT)
        for name, parameter in parameters.items():
            tensor = exported.read(name, 0, parameter.numel()).view(parameter.shape)
            torch.testing.assert_close(tensor, parameter, rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")
            assert torch.equal(tensor.flatten(), before.read(name, 0, parameter.numel())) != is_trained(name)


def test_p18_another_selection_is_refused_on_resuming_and_other_groups_are_told(recipe) -> None:
    data, weights = prepared(recipe), open_pretrained(recipe.model.path)

    def plan(model: dict, optimizer: dict):
        changed = dataclasses.replace(
            recipe, model=dataclasses.replace(recipe.model, **model), optimizer=dataclasses.replace(recipe.optimizer, **optimizer)
        )
        return plan_of(changed, weights, data, 1)

    saved = state_of(plan({"freeze": ["embed_tokens"]}, {}))
    with pytest.raises(UserError, match="model.train_last_n_blocks: got 1, where the checkpoint was made with None"):
        check_resume(plan({"freeze": ["embed_tokens"], "train_last_n_blocks": 1}, {}), saved, 1)
    (told,) = check_resume(plan({"freeze": ["embed_tokens"]}, {"groups": GROUPS[:1]}), saved, 1)
    assert told.startswith("optimizer.groups: []") and "o_proj" in told


def test_the_plan_says_what_is_frozen_and_how_fast_the_rest_learns(recipe) -> None:
    model = dataclasses.replace(recipe.model, train_last_n_blocks=1, freeze=["mlp"])
    optimizer = dataclasses.replace(recipe.optimizer, layer_lr_decay=0.7, groups=GROUPS)
    chosen = dataclasses.replace(recipe, model=model, optimizer=optimizer)
    plan = plan_of(chosen, open_pretrained(recipe.model.path), prepared(recipe), 1)
    page = describe(plan)
    frozen = plan.parameters - plan.trained_parameters
    for line in (
        f"parameters     {plan.parameters:,}, trained {plan.trained_parameters:,} (",
        f"{frozen:,} parameters in {4 * frozen / 2**20:,.1f} MiB; all but blocks 2 and up, the final norm and the head,",
        "which is the embedding; mlp",
        "x 0.7 for each block away from the head, x 0.24 at model.embed_tokens.weight",
        "x 3 for o_proj",
        "x 1, weight decay 0.5 for self_attn",
    ):
        assert line in page, page


def test_a_pattern_that_means_nothing_stops_before_the_data_are_read(recipe) -> None:
    missing = dataclasses.replace(recipe, model=ModelConfig(path=recipe.model.path, freeze=["embedings"]))
    with pytest.raises(UserError, match=r"model\.freeze\[0\]: got embedings, which is no parameter of this model"):
        starting_point(missing)
