"""A whole run that trains an adapter: as plain torch for every stage, and its folder answers, merges and trains on."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from framework.cli import export
from framework.cli.fit import preview
from framework.config.errors import UserError
from framework.config.schedule import lr_factor
from framework.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PeftConfig,
    RecipeConfig,
    ScheduleConfig,
    TrainerConfig,
    ZeroConfig,
)
from framework.data.batches import StepBatches
from framework.data.prepare import prepare
from framework.models.adapter import write_adapter
from framework.models.llama import Llama
from framework.models.lora import AdapterReader, add_adapter
from framework.models.pretrained import load_weights, open_pretrained, write_pretrained
from framework.models.tokenizer import load_tokenizer
from framework.train.metrics import read_metrics, series
from framework.train.run_dir import EXPORT, METRICS, read_summary, write_run_dir
from tests.cli.test_fit import ARCHITECTURE, ROWS, fit
from tests.data.templates import CHATML
from tests.models.families import byte_tokenizer

STEPS = 4
LORA = PeftConfig(method="lora", rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> RecipeConfig:
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    weights = Llama(ARCHITECTURE).named_parameters()
    write_pretrained(folder / "model", ARCHITECTURE, weights, dtype="float32", tokenizer=tokenizer, show=False)
    (folder / "rows.jsonl").write_text(ROWS)
    return RecipeConfig(
        name="tiny",
        seed=3,
        model=ModelConfig(path=str(folder / "model"), activation_checkpointing=True),
        peft=LORA,
        data=DataConfig(train=str(folder / "rows.jsonl"), max_tokens=128),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, grad_clip=0.5),
        schedule=ScheduleConfig(name="constant"),
        trainer=TrainerConfig(max_steps=STEPS, global_batch_size=8, micro_batch_size=2, accelerator="cpu"),
        checkpoint=CheckpointConfig(export_dtype="float32"),
    )


def plain_training(recipe: RecipeConfig) -> tuple[list[float], Llama]:
    """The same training by plain torch in one process."""
    tokenizer = load_tokenizer(recipe.model)
    prepared, pretrained = prepare(recipe.data, tokenizer, seed=recipe.seed, show_progress=False), open_pretrained(recipe.model.path)
    model, reader = Llama(ARCHITECTURE), AdapterReader(pretrained, recipe.peft, recipe.seed)
    load_weights(model, pretrained, show=False)
    add_adapter(model, recipe.peft)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, parameter in trained:
        parameter.data = reader.read(name, 0, parameter.numel()).view(parameter.shape)
    config, matrices = recipe.optimizer, [parameter for _, parameter in trained if parameter.dim() == 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}]
    groups.append({"params": [parameter for _, parameter in trained if parameter.dim() == 1], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    batches, losses = StepBatches(prepared.train, micro_batch_size=8, accumulate=1, seed=recipe.seed), []
    for epoch in range(STEPS):
        batches.set_epoch(epoch)
        for (batch,) in batches:
            if len(losses) == STEPS:
                return losses, model
            for group in optimizer.param_groups:
                group["lr"] = config.lr * lr_factor(recipe.schedule, len(losses), STEPS)
            loss = cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([parameter for _, parameter in trained], config.grad_clip)
            optimizer.step()
            losses.append(loss.item())
    raise AssertionError("unreachable")


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(("world_size", "stages"), [(1, (3,)), (2, (0, 1, 2, 3))])
def test_p26_p44_an_adapter_trains_as_in_plain_torch_for_every_stage(ranks, recipe, tmp_path, world_size, stages, dora: bool) -> None:
    recipe = dataclasses.replace(recipe, peft=dataclasses.replace(LORA, dora=dora))
    expected, model = plain_training(recipe)
    assert expected[-1] < expected[0] - 0.1
    ids = torch.arange(20)[None] * 3
    for stage in stages:
        run_dir = tmp_path / f"zero{stage}"
        sharded = dataclasses.replace(recipe, zero=ZeroConfig(stage=stage))
        write_run_dir(run_dir, sharded, overrides=[], command=["test"])
        ranks(world_size, fit, sharded, run_dir, timeout=120)
        assert series(read_metrics(run_dir / METRICS), "loss")[1] == pytest.approx(expected, rel=2e-5)
        merged = Llama(ARCHITECTURE)
        load_weights(merged, open_pretrained(run_dir / EXPORT), show=False)
        with torch.no_grad():
            assert torch.allclose(merged(ids), model.eval()(ids), rtol=1e-3, atol=1e-3)
        assert read_summary(run_dir)["ended"] == "done"


def test_dropout_is_repeatable_and_recomputed_as_it_was(ranks, recipe, tmp_path) -> None:
    dropping = dataclasses.replace(recipe, peft=dataclasses.replace(LORA, dropout=0.5))
    stored = dataclasses.replace(dropping, model=dataclasses.replace(recipe.model, activation_checkpointing=False))
    losses = []
    for name, variant in (("plain", recipe), ("first", dropping), ("second", dropping), ("stored", stored)):
        write_run_dir(tmp_path / name, variant, overrides=[], command=["test"])
        ranks(2, fit, variant, tmp_path / name, timeout=120)
        losses.append(series(read_metrics(tmp_path / name / METRICS), "loss")[1])
    plain, first, second, stored = losses
    assert first == second == stored != plain


def test_p27_the_merged_export_is_a_whole_model_and_training_goes_on_from_the_adapter(ranks, recipe, tmp_path, capsys) -> None:
    run_dir = tmp_path / "run"
    write_run_dir(run_dir, recipe, overrides=[], command=["test"])
    ranks(1, fit, recipe, run_dir, timeout=120)
    assert export.main([str(run_dir), str(tmp_path / "merged")]) == 2
    assert "--merge" in capsys.readouterr().err
    assert export.main([str(run_dir), str(tmp_path / "merged"), "--merge", "--dtype", "float32"]) == 0
    merged, theirs = Llama(ARCHITECTURE), AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    load_weights(merged, open_pretrained(run_dir / EXPORT), show=False)
    ids = torch.arange(20)[None] * 3
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits, merged(ids), rtol=1e-5, atol=1e-5)
    assert export.main([str(tmp_path / "merged"), str(tmp_path / "again"), "--merge"]) == 2
    assert export.main([str(tmp_path / "merged"), str(tmp_path / "merged")]) == 2

    again, second = dataclasses.replace(recipe, peft=dataclasses.replace(LORA, path=str(run_dir))), tmp_path / "second"
    write_run_dir(second, again, overrides=[], command=["test"])
    ranks(2, fit, again, second, timeout=120)
    first_loss, last_loss = (read_metrics(Path(folder) / METRICS)[row].loss for folder, row in ((second, 0), (run_dir, -1)))
    assert first_loss < last_loss + 0.1, "it begins where the first run ended"


@pytest.fixture(scope="module")
def adapter(recipe, tmp_path_factory) -> str:
    """A folder with an adapter for the recipe's model."""
    folder, model = tmp_path_factory.mktemp("adapters") / "adapter", Llama(ARCHITECTURE)
    add_adapter(model, LORA)
    trained = [(name, parameter.detach()) for name, parameter in model.named_parameters() if parameter.requires_grad]
    write_adapter(folder, ARCHITECTURE, LORA, recipe.model.path, trained)
    return str(folder)


@pytest.mark.parametrize(("change", "path"), [({"rank": 8}, "peft.rank"), ({"targets": ["q_proj"]}, "peft.targets")])
def test_an_adapter_that_is_not_what_the_recipe_says_is_refused_before_the_data_are_read(recipe, adapter, change, path) -> None:
    data = dataclasses.replace(recipe.data, train="/nowhere/rows.jsonl")
    with pytest.raises(UserError) as caught:
        preview(dataclasses.replace(recipe, peft=dataclasses.replace(LORA, path=adapter, **change), data=data))
    assert [problem.path for problem in caught.value.problems] == [path]


def test_an_adapter_of_another_model_is_said_to_be_one(recipe, adapter, tmp_path) -> None:
    own = dataclasses.replace(recipe, peft=dataclasses.replace(LORA, path=adapter))
    assert "was trained on" not in preview(own)
    shutil.copytree(recipe.model.path, tmp_path / "copy")
    copied = dataclasses.replace(recipe.model, path=str(tmp_path / "copy"))
    text = preview(dataclasses.replace(own, model=copied))
    assert text.startswith(f"the adapter in {adapter} was trained on {recipe.model.path}, and goes on here on {tmp_path / 'copy'}\n")
