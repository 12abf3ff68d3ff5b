"""Recipes in every precision: the same losses for every stage and number of ranks, the bytes of the plan, an export that others load."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from framework.cli.fit import plan_of
from framework.config.errors import UserError
from framework.config.schema import PrecisionConfig, RecipeConfig, ZeroConfig
from framework.data.prepare import prepare
from framework.kernels import library
from framework.models.selection import check_selection
from framework.models.tokenizer import load_tokenizer
from framework.train.metrics import read_metrics, series
from framework.train.run_dir import EXPORT, METRICS, PLAN, read_summary, write_run_dir
from tests.cli.test_fit import ARCHITECTURE, fit, recipe  # noqa: F401

BF16 = PrecisionConfig(compute_dtype="bfloat16")
PRECISIONS = {
    "remainder": (dataclasses.replace(BF16, master_weights="remainder"), "fp32 master weights (as parameter and 16 bits more)"),
    "none": (dataclasses.replace(BF16, master_weights="none"), "NO master weights"),
    "fp32_modules": (
        dataclasses.replace(BF16, fp32_modules=["lm_head", "norm", r"model\.layers\.\d+\..*norm"]),
        "9,824 parameters; the head is the embedding",
    ),
    "autocast": (PrecisionConfig(autocast="bfloat16"), "float32 under autocast to bfloat16"),
}


def train(ranks, world_size: int, recipe: RecipeConfig, run_dir: Path) -> list[float]:  # noqa: F811
    write_run_dir(run_dir, recipe, overrides=[], command=["test"])
    ranks(world_size, fit, recipe, run_dir, timeout=120)
    return series(read_metrics(run_dir / METRICS), "loss")[1]


@pytest.mark.parametrize("name", PRECISIONS)
def test_p21_p44_a_recipe_trains_the_same_under_stage_0_and_3(ranks, recipe, tmp_path, name: str) -> None:  # noqa: F811
    precision, remark = PRECISIONS[name]
    exact = dataclasses.replace(recipe.checkpoint, export_dtype="float32")
    losses = []
    for stage, world_size in ((0, 1), (3, 2)):
        run_dir = tmp_path / f"zero{stage}"
        changed = dataclasses.replace(recipe, precision=precision, checkpoint=exact, zero=ZeroConfig(stage=stage))
        losses.append(train(ranks, world_size, changed, run_dir))
        prepared = prepare(recipe.data, load_tokenizer(recipe.model), seed=recipe.seed, show_progress=False)
        planned = plan_of(changed, None, prepared, world_size).state_bytes(stage)
        assert read_summary(run_dir)["peak_model_state_bytes"] == planned.total
        assert remark in (run_dir / PLAN).read_text()
        exported = AutoModelForCausalLM.from_pretrained(run_dir / EXPORT, dtype=torch.float32)
        in_bf16 = all(torch.equal(p, p.bfloat16().float()) for p in exported.parameters())
        assert in_bf16 is (name == "none"), "masters are exported, whose lower halves only this precision loses"
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.skipif(library.missing("cpu") is not None, reason=f"no compiled kernels: {library.missing('cpu')}")
def test_a_remainder_changes_no_loss(ranks, recipe, tmp_path) -> None:  # noqa: F811
    full = train(ranks, 1, dataclasses.replace(recipe, precision=BF16), tmp_path / "full")
    assert train(ranks, 1, dataclasses.replace(recipe, precision=PRECISIONS["remainder"][0]), tmp_path / "remainder") == full


def test_a_pattern_that_means_no_module_is_refused_with_the_one_that_was_meant(recipe) -> None:  # noqa: F811
    wrong = dataclasses.replace(recipe, precision=dataclasses.replace(BF16, fp32_modules=["norm", "lm_heed", "weight"]))
    with pytest.raises(UserError) as caught:
        check_selection(wrong, ARCHITECTURE)
    first, second = caught.value.problems
    assert (first.path, first.fix) == ("precision.fp32_modules[1]", "precision.fp32_modules=[norm,lm_head,weight]")
    assert second.got == "weight, which is no module of this model"
