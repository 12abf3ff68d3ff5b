"""A whole run on a tiny model: the same training for every stage and number of ranks, and everything that a run leaves behind."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from framework.cli.fit import plan_of, preview, run
from framework.config.errors import UserError
from framework.config.schedule import lr_factor
from framework.config.schema import (
    DataConfig,
    EvalConfig,
    LlamaConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    PrecisionConfig,
    RecipeConfig,
    ScheduleConfig,
    TrainerConfig,
    ZeroConfig,
    ZeroModuleConfig,
)
from framework.data.batches import StepBatches
from framework.data.prepare import prepare
from framework.models.llama import Llama
from framework.models.tokenizer import load_tokenizer
from framework.train.metrics import read_metrics, series
from framework.train.run_dir import EXPORT, LEDGER, METRICS, PLAN, PLOT, read_summary, write_run_dir
from framework.zero import ZeroEngine
from tests.data.templates import CHATML
from tests.models.families import byte_tokenizer

STEPS = 5
ARCHITECTURE = LlamaConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)


def row(number: int) -> dict:
    answer = {"role": "assistant", "content": "y" * (number % 5 + 1)}
    return {"messages": [{"role": "user", "content": f"say {'x' * (number % 7)}"}, answer]}


ROWS = "".join(json.dumps(row(number)) + "\n" for number in range(23))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> RecipeConfig:
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "rows.jsonl").write_text(ROWS)
    return RecipeConfig(
        name="tiny",
        seed=3,
        model=ModelConfig(arch=ARCHITECTURE, tokenizer=str(folder / "tokenizer")),
        data=DataConfig(train=str(folder / "rows.jsonl"), validation_fraction=0.1, max_tokens=128),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, grad_clip=0.5),
        schedule=ScheduleConfig(name="linear", warmup_steps=1),
        trainer=TrainerConfig(max_steps=STEPS, global_batch_size=8, micro_batch_size=1, accelerator="cpu"),
        eval=EvalConfig(every_n_steps=2),
    )


def fit(recipe: RecipeConfig, run_dir: Path) -> None:
    """Be one rank of a run."""
    be_launched()
    run(recipe, run_dir)


def be_launched() -> None:
    """The environment of the rank that this process is in its process group."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


def untrained(recipe: RecipeConfig) -> tuple[Llama, torch.optim.AdamW]:
    """The model as a run begins with it, and its optimizer, in plain torch."""
    with torch.device("meta"):
        start = Llama(ARCHITECTURE)
    engine = ZeroEngine(start, seed=recipe.seed)  # for its initial weights
    model = Llama(ARCHITECTURE)
    model.load_state_dict({name: tensor for name, tensor in engine.full_tensors()}, strict=False)
    groups = [[p for p in model.parameters() if p.dim() >= 2], [p for p in model.parameters() if p.dim() < 2]]
    config = recipe.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": config.weight_decay}, {"params": groups[1], "weight_decay": 0.0}],
        betas=config.betas,
        eps=config.eps,
    )
    return model, optimizer


def plain_losses(recipe: RecipeConfig) -> list[float]:
    """The same training by plain torch in one process: whole global batches, all logits."""
    prepared = prepare(recipe.data, load_tokenizer(recipe.model), seed=recipe.seed, show_progress=False)
    (model, optimizer), config = untrained(recipe), recipe.optimizer
    batches = StepBatches(prepared.train, micro_batch_size=8, accumulate=1, seed=recipe.seed)
    losses: list[float] = []
    for epoch in range(STEPS):
        batches.set_epoch(epoch)
        for (batch,) in batches:
            if len(losses) == STEPS:
                return losses
            for group in optimizer.param_groups:
                group["lr"] = config.lr * lr_factor(recipe.schedule, len(losses), STEPS)
            loss = cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
            optimizer.step()
            losses.append(loss.item())
    raise AssertionError("unreachable")


@pytest.mark.parametrize(("world_size", "stages"), [(1, (0, 3)), (2, (0, 1, 2, 3)), (4, (2, 3))])
def test_p21_p44_a_recipe_trains_as_plain_torch_for_every_stage(ranks, recipe, tmp_path, world_size: int, stages: tuple[int, ...]) -> None:
    """The engine has all stages under every world size in tests/zero/test_exactness.py."""
    expected = plain_losses(recipe)
    for stage in stages:
        run_dir = tmp_path / f"zero{stage}"
        sharded = dataclasses.replace(recipe, zero=ZeroConfig(stage=stage))
        write_run_dir(run_dir, sharded, overrides=[], command=["test"])
        ranks(world_size, fit, sharded, run_dir, timeout=120)
        rows = read_metrics(run_dir / METRICS)
        assert series(rows, "loss") == (list(range(1, STEPS + 1)), pytest.approx(expected, rel=1e-5))
        assert series(rows, "val_loss")[0] == [2, 4, 5]
        plan = plan_of(sharded, None, prepare(recipe.data, load_tokenizer(recipe.model), seed=recipe.seed, show_progress=False), world_size)
        assert read_summary(run_dir)["peak_model_state_bytes"] == plan.state_bytes(stage).total


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (1, OffloadConfig(optimizer="cpu")),
        (3, OffloadConfig(optimizer="cpu", params="cpu")),
        (3, OffloadConfig(optimizer="nvme", params="nvme")),
    ],
    ids=str,
)
def test_p44_a_recipe_trains_as_plain_torch_with_offloaded_state(ranks, recipe, tmp_path, stage: int, offload: OffloadConfig) -> None:
    offload = dataclasses.replace(offload, nvme_path=str(tmp_path))
    offloaded = dataclasses.replace(recipe, zero=ZeroConfig(stage=stage), offload=offload)
    write_run_dir(tmp_path / "run", offloaded, overrides=[], command=["test"])
    ranks(2, fit, offloaded, tmp_path / "run", timeout=120)
    assert series(read_metrics(tmp_path / "run" / METRICS), "loss")[1] == pytest.approx(plain_losses(recipe), rel=1e-5)
    prepared, summary = (
        prepare(recipe.data, load_tokenizer(recipe.model), seed=recipe.seed, show_progress=False),
        read_summary(tmp_path / "run"),
    )
    planned = plan_of(offloaded, None, prepared, 2).state_bytes(stage)
    assert summary["peak_model_state_bytes"] == planned.total
    assert summary["peak_offloaded_bytes"] == planned.host
    assert summary["peak_disk_bytes"] == planned.disk
    assert ("on host" in (tmp_path / "run" / PLAN).read_text()) and (planned.disk > 0) == (offload.params == "nvme")


def test_p44_a_recipe_trains_as_plain_torch_in_shard_groups(ranks, recipe, tmp_path) -> None:
    rule = ZeroModuleConfig(pattern="embed_tokens", stage=2)
    hybrid = dataclasses.replace(recipe, zero=ZeroConfig(stage=3, shard_size=2, shard_optimizer="world", modules=[rule]))
    write_run_dir(tmp_path / "run", hybrid, overrides=[], command=["test"])
    ranks(4, fit, hybrid, tmp_path / "run", timeout=120)
    assert series(read_metrics(tmp_path / "run" / METRICS), "loss")[1] == pytest.approx(plain_losses(recipe), rel=1e-5)
    prepared = prepare(recipe.data, load_tokenizer(recipe.model), seed=recipe.seed, show_progress=False)
    planned, summary = plan_of(hybrid, None, prepared, 4).state_bytes(3), read_summary(tmp_path / "run")
    assert summary["peak_model_state_bytes"] == planned.total
    assert "2 groups of 2 ranks" in (tmp_path / "run" / PLAN).read_text()


@pytest.mark.parametrize("initial_scale", [64.0, 2.0**24])
def test_p47_a_recipe_in_fp16_trains_under_a_loss_scale_that_finds_its_size(ranks, recipe, tmp_path, initial_scale: float) -> None:
    precision = PrecisionConfig(compute_dtype="float16", initial_loss_scale=initial_scale)
    half = dataclasses.replace(recipe, zero=ZeroConfig(stage=2), precision=precision)
    write_run_dir(tmp_path / "run", half, overrides=[], command=["test"])
    ranks(2, fit, half, tmp_path / "run", timeout=120)
    rows, skipped = read_metrics(tmp_path / "run" / METRICS), read_summary(tmp_path / "run")["skipped_steps"]
    _, scales = series(rows, "loss_scale")
    if initial_scale == 64.0:
        assert skipped == 0 and scales == [64.0] * STEPS
        assert series(rows, "loss")[1] == pytest.approx(plain_losses(recipe), rel=1e-2)
    else:
        assert skipped >= 1 and scales == sorted(scales, reverse=True) and scales[1] == initial_scale / 2


def test_a_run_leaves_everything_behind_and_transformers_loads_its_export(ranks, recipe, tmp_path) -> None:
    run_dir = tmp_path / "run"
    exact = dataclasses.replace(recipe, zero=ZeroConfig(stage=3), checkpoint=dataclasses.replace(recipe.checkpoint, export_dtype="float32"))
    write_run_dir(run_dir, exact, overrides=[], command=["test"])
    ranks(2, fit, exact, run_dir, timeout=120)
    assert {path.name for path in run_dir.iterdir()} >= {METRICS, PLAN, LEDGER, PLOT, EXPORT, "config.yaml", "summary.json"}
    assert not (run_dir / "tokens").exists()
    assert "cores of this rank: " in (run_dir / PLAN).read_text()
    assert (read_summary(run_dir)["ended"], read_summary(run_dir)["steps"]) == ("done", STEPS)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run_dir / EXPORT), AutoTokenizer.from_pretrained(run_dir / EXPORT)
    assert tokenizer.chat_template == CHATML
    batch = next(iter(StepBatches(prepare(recipe.data, tokenizer, seed=3, show_progress=False).train, micro_batch_size=23, accumulate=1)))[
        0
    ]
    with torch.no_grad():
        loss = cross_entropy(model(batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten())
    assert loss < read_metrics(run_dir / METRICS)[0].loss - 1.0


def test_check_prints_ledger_steps_rates_and_bytes_of_every_stage(recipe) -> None:
    asking = dataclasses.replace(recipe, eval=dataclasses.replace(recipe.eval, prompts=["Hi", "much " * 60]))
    with pytest.raises(UserError, match="number 2, of 3"):
        preview(asking)
    text = preview(recipe)
    for expected in (
        "data.train",
        "5 = 1.667 epochs of 3",
        "linear: step 1 0.01",
        "zero=3",
        "8 samples per step",
        "1 micro x 8 accumulated",
    ):
        assert expected in text


def test_p36_another_plan_on_one_rank_is_refused_before_the_first_step(ranks, recipe, tmp_path) -> None:
    assert ranks(2, disagrees, recipe, tmp_path / "run") == ["another plan on rank 1 than on rank 0"] * 2


def disagrees(recipe: RecipeConfig, run_dir: Path) -> str:
    other = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, lr=1e-3)) if dist.get_rank() else recipe
    with pytest.raises(UserError) as caught:
        fit(other, run_dir)
    return caught.value.problems[0].got
