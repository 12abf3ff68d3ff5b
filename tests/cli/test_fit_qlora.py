"""A whole run over a quantised base: as plain torch on the dequantised weights for every stage, and an adapter for the original ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from framework.checkpoint.load import Checkpoint
from framework.cli import export, generate
from framework.cli.fit import plan_of
from framework.config.schema import CheckpointConfig, PeftConfig, RecipeConfig, ZeroConfig
from framework.data.prepare import prepare
from framework.models.llama import Llama
from framework.models.pretrained import load_weights, open_pretrained, write_pretrained
from framework.models.quantized import QuantizedReader
from framework.models.targets import quantized_names
from framework.models.tokenizer import load_tokenizer
from framework.plan.describe import describe
from framework.train.metrics import read_metrics, series
from framework.train.run_dir import EXPORT, METRICS, read_summary, write_run_dir
from tests.cli import test_fit_lora
from tests.cli.test_fit import ARCHITECTURE, fit
from tests.cli.test_fit_lora import plain_training
from tests.pool import RanksFailed

lora = test_fit_lora.recipe
NF4 = PeftConfig(method="lora", rank=4, alpha=8.0, base="nf4")
IDS = torch.arange(20)[None] * 3


@pytest.fixture(scope="module")
def recipe(lora) -> RecipeConfig:
    """Steps of a size that does not blow up the last digits, so that 1e-6 can be asked for."""
    return dataclasses.replace(lora, peft=NF4, optimizer=dataclasses.replace(lora.optimizer, lr=2e-3))


def dequantised(recipe: RecipeConfig, folder: Path) -> Path:
    """The recipe's model with what quantising leaves of its weights, as a model in floating point."""
    pretrained = open_pretrained(recipe.model.path)
    model = Llama(ARCHITECTURE)
    load_weights(model, pretrained, show=False)
    shapes = {name: tuple(model.get_submodule(name).weight.shape) for name in quantized_names(ARCHITECTURE, recipe.peft)}
    reader = QuantizedReader(pretrained.read, shapes, recipe.peft)
    for name, shape in shapes.items():
        model.get_submodule(name).weight.data = reader.dequantized(name, 0, shape[0] * shape[1]).view(shape)
    tokenizer = load_tokenizer(recipe.model)
    return write_pretrained(folder, ARCHITECTURE, model.named_parameters(), dtype="float32", tokenizer=tokenizer, show=False)


def train(ranks, world_size: int, recipe: RecipeConfig, run_dir: Path) -> list[float]:
    write_run_dir(run_dir, recipe, overrides=[], command=["test"])
    ranks(world_size, fit, recipe, run_dir, timeout=180)
    return series(read_metrics(run_dir / METRICS), "loss")[1]


CASES = [
    (NF4, 1, (0,)),
    (NF4, 2, (0, 1, 2, 3)),
    (dataclasses.replace(NF4, base="int8", base_block=32, dora=True), 2, (3,)),
    (dataclasses.replace(NF4, targets=["v_proj"], quantized_layers="all-linear"), 2, (3,)),
]


@pytest.mark.parametrize(("peft", "world_size", "stages"), CASES, ids=["alone", "nf4", "int8 dora", "all layers"])
def test_p44_it_trains_as_plain_torch_on_the_dequantised_weights(ranks, recipe, tmp_path, peft, world_size, stages) -> None:
    recipe = dataclasses.replace(recipe, peft=peft)
    model = dataclasses.replace(recipe.model, path=str(dequantised(recipe, tmp_path / "dequantised")))
    plain = dataclasses.replace(recipe, model=model, peft=dataclasses.replace(peft, base="float"))
    expected, _ = plain_training(plain)
    original, _ = plain_training(dataclasses.replace(plain, model=recipe.model))
    assert abs(original[0] - expected[0]) > 1e-5, "quantising shows"
    for stage in stages:
        sharded = dataclasses.replace(recipe, zero=ZeroConfig(stage=stage))
        assert train(ranks, world_size, sharded, tmp_path / f"zero{stage}") == pytest.approx(expected, rel=1e-6)
        prepared = prepare(recipe.data, load_tokenizer(recipe.model), seed=recipe.seed, show_progress=False)
        plan = plan_of(sharded, open_pretrained(recipe.model.path), prepared, world_size)
        peak, formula = read_summary(tmp_path / f"zero{stage}")["peak_model_state_bytes_by_kind"], plan.state_bytes(stage)
        assert peak["params"] == formula.params
        assert sum(peak.values()) == formula.total
    assert f"{peft.base} in blocks of {peft.base_block} on 21 layers" in describe(plan)
    assert plan.parameters - plan.trained_parameters == sum(shape.numel() for shape in open_pretrained(recipe.model.path).names().values())


def test_packs_and_bf16_over_a_quantised_base(ranks, recipe, tmp_path) -> None:
    packed = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, packing=True), zero=ZeroConfig(stage=3))
    packed = dataclasses.replace(packed, trainer=dataclasses.replace(recipe.trainer, global_batch_size=2, micro_batch_size=1))
    losses = [train(ranks, world_size, packed, tmp_path / f"{world_size}") for world_size in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    bf16 = dataclasses.replace(packed, precision=dataclasses.replace(packed.precision, compute_dtype="bfloat16"))
    assert train(ranks, 2, bf16, tmp_path / "bf16") == pytest.approx(losses[0], rel=1e-2)


def test_p27_the_adapter_belongs_to_the_original_model(ranks, recipe, tmp_path, capsys) -> None:
    """`peft` loads it there, `export --merge` merges it there, and `generate` answers with that."""
    import peft

    train(ranks, 1, recipe, tmp_path / "run")
    base = AutoModelForCausalLM.from_pretrained(recipe.model.path)
    assert export.main([str(tmp_path / "run"), str(tmp_path / "merged"), "--merge", "--dtype", "float32"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run" / EXPORT)
    with torch.no_grad():
        assert torch.allclose(merged(IDS).logits, adapted(IDS).logits, rtol=1e-5, atol=1e-5)
    name = "model.embed_tokens.weight"
    assert torch.equal(merged.get_parameter(name), AutoModelForCausalLM.from_pretrained(recipe.model.path).get_parameter(name))
    capsys.readouterr()
    assert generate.main(["--model", str(tmp_path / "run"), "--max-new-tokens", "3", "say x"]) == 0
    answer = capsys.readouterr().out
    assert generate.main(["--model", str(tmp_path / "merged"), "--max-new-tokens", "3", "say x"]) == 0
    assert capsys.readouterr().out == answer


def test_p16_it_resumes_to_the_bit_and_not_over_another_base(ranks, recipe, tmp_path) -> None:
    saving = CheckpointConfig(every_n_steps=2, keep=9, at_end=True, export_dtype="float32")
    whole = dataclasses.replace(recipe, checkpoint=saving, zero=ZeroConfig(stage=3))
    losses = train(ranks, 2, whole, tmp_path / "whole")
    step = tmp_path / "whole" / "checkpoints" / "step_2"
    assert all(".lora_" in name for name in Checkpoint(step).places), "the frozen base is not stored"
    resumed = dataclasses.replace(whole, resume=str(step))
    assert train(ranks, 2, resumed, tmp_path / "resumed") == losses
    first, second = (open_pretrained(tmp_path / run / EXPORT).adapter for run in ("whole", "resumed"))
    assert all(torch.equal(first.whole(f"{layer}.lora_B"), second.whole(f"{layer}.lora_B")) for layer in first.layers)
    with pytest.raises(RanksFailed, match=r"peft\.base_block: got 128, where the checkpoint was made with 64"):
        train(ranks, 1, dataclasses.replace(resumed, peft=dataclasses.replace(NF4, base_block=128)), tmp_path / "other")
