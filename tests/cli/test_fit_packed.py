"""A whole run on packs: the same training for any number of ranks, and that of plain torch on each sample by itself."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from framework.cli.fit import preview
from framework.config.errors import UserError
from framework.config.schedule import lr_factor
from framework.config.schema import RecipeConfig, ZeroConfig
from framework.data.batches import StepBatches
from framework.data.prepare import Prepared, prepare
from framework.models.llama import Llama
from framework.models.tokenizer import load_tokenizer
from framework.train.metrics import read_metrics, series
from framework.train.run_dir import LEDGER, METRICS, PLAN, SUMMARY, write_run_dir
from tests.cli.test_fit import STEPS, fit, recipe, untrained  # noqa: F401  a fixture

PACKS_PER_STEP = 2


@pytest.fixture(scope="module")
def packed(recipe, tmp_path_factory) -> RecipeConfig:  # noqa: F811
    """Rows of very different lengths, two packs a step."""
    rows = [
        {"messages": [{"role": "user", "content": f"say {'x' * (i % 11)}"}, {"role": "assistant", "content": "y" * (7 * i % 40 + 1)}]}
        for i in range(23)
    ]
    path = tmp_path_factory.mktemp("packed") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, train=str(path), packing=True, max_tokens=200),
        trainer=dataclasses.replace(recipe.trainer, global_batch_size=PACKS_PER_STEP),
    )


def prepared(recipe: RecipeConfig) -> Prepared:  # noqa: F811
    return prepare(recipe.data, load_tokenizer(recipe.model), seed=recipe.seed, show_progress=False)


def sum_over_documents(model: Llama, batch: dict) -> torch.Tensor:
    """The losses of a micro-batch of packs, each of its documents computed by itself."""
    total = torch.zeros(())
    for ids, labels, lengths in zip(batch["input_ids"], batch["labels"], batch["document_lengths"], strict=True):
        documents = zip(ids[: sum(lengths)].split(lengths), labels[: sum(lengths)].split(lengths), strict=True)
        total = total + sum(cross_entropy(model(part[None])[0], targets, reduction="sum") for part, targets in documents)
    return total


def plain_training(recipe: RecipeConfig) -> tuple[list[float], float]:  # noqa: F811
    """Losses of the steps, and the validation loss after the last one, by plain torch in one process."""
    data = prepared(recipe)
    (model, optimizer), config = untrained(recipe), recipe.optimizer
    batches = StepBatches(data.train, micro_batch_size=PACKS_PER_STEP, accumulate=1, seed=recipe.seed, total_steps=STEPS)
    losses: list[float] = []
    while len(losses) < STEPS:
        for (batch,) in batches:
            for group in optimizer.param_groups:
                group["lr"] = config.lr * lr_factor(recipe.schedule, len(losses), STEPS)
            loss = sum_over_documents(model, batch) / batch["trained_tokens"]
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
            optimizer.step()
            losses.append(loss.item())
        batches.set_epoch(batches.epoch + 1)
    (validation,) = next(iter(StepBatches(data.validation, micro_batch_size=len(data.validation), accumulate=1)))
    with torch.no_grad():
        return losses, sum_over_documents(model, validation).item() / validation["trained_tokens"]


ON_HOST = {"activation_checkpointing": True, "activation_offload": True}


@pytest.mark.parametrize(("world_size", "stage", "options"), [(1, 0, {}), (2, 2, {}), (2, 3, ON_HOST)])
def test_p11_p21_packs_train_as_their_samples_do_in_plain_torch(ranks, packed, tmp_path, world_size, stage, options) -> None:
    losses, validation = plain_training(packed)
    config = dataclasses.replace(packed, zero=ZeroConfig(stage=stage), model=dataclasses.replace(packed.model, **options))
    write_run_dir(tmp_path, config, overrides=[], command=["test"])
    ranks(world_size, fit, config, tmp_path, timeout=120)
    rows = read_metrics(tmp_path / METRICS)
    assert series(rows, "loss") == (list(range(1, STEPS + 1)), pytest.approx(losses, rel=1e-5))
    assert series(rows, "val_loss")[1][-1] == pytest.approx(validation, rel=1e-5)
    samples, packs = prepared(packed).train.documents, len(prepared(packed).train)
    assert f"{samples} samples in {packs} packs of at most 200 tokens" in (tmp_path / PLAN).read_text()
    assert json.loads((tmp_path / LEDGER).read_text())["sources"][0]["packs"] == packs < samples
    assert (json.loads((tmp_path / SUMMARY).read_text())["peak_offloaded_bytes"] > 0) == bool(options)


def test_the_plan_of_a_run_on_packs_counts_packs(packed) -> None:
    text, data = preview(packed), prepared(packed).train
    full = data.total_tokens / (len(data) * 200)
    for expected in (
        f"packed {data.documents} samples into {len(data)}",
        f"packing        {data.documents} samples in {len(data)} packs of at most 200 tokens, {full:.1%} full",
        "full; attention: one sample after the other\n",
        f"= {PACKS_PER_STEP} packs per step",
        f"epochs of {-(-len(data) // PACKS_PER_STEP)};",
        f"data           {data.documents} samples, {data.total_tokens:,} tokens",
    ):
        assert expected in text


def test_p15_packs_for_a_model_that_cannot_keep_samples_apart_are_refused_before_the_run(packed, monkeypatch) -> None:
    monkeypatch.setattr(Llama, "isolates_documents", False)
    with pytest.raises(UserError, match=r"data\.packing: got packs for Llama, which does not keep the documents of a pack apart"):
        preview(packed)
