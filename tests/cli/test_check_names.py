"""Patterns that mean nothing in the model are refused before torch is imported, whatever the model's names are known from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from framework.checkpoint.source import architecture_of
from framework.cli.check import check_names
from framework.config.schema import LlamaConfig, ModelConfig, OptimizerConfig, ParameterGroupConfig, PeftConfig, RecipeConfig
from framework.models.llama import Llama
from framework.models.selection import choose_trained, trained_shapes
from tests.models.families import FAMILIES, config_json
from tests.models.test_gguf import needs_smollm

SMALL = LlamaConfig(
    vocab_size=64, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
)


def folder_of(family: str, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(config_json(family)))
    (folder / "model.safetensors").touch()
    return folder


@pytest.mark.parametrize("peft", [PeftConfig(), PeftConfig(method="lora", rank=2, dora=True)], ids=["whole", "adapters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_known_without_torch_are_those_of_the_model_that_is_built(family: str, peft: PeftConfig, tmp_path: Path):
    architecture = architecture_of(str(folder_of(family, tmp_path)))
    with torch.device("meta"):
        model = Llama(architecture)
    choose_trained(model, ModelConfig(), peft)
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert list(trained_shapes(architecture, ModelConfig(), peft).items()) == list(built.items())


def test_a_pattern_is_refused_where_the_family_has_no_such_parameter(tmp_path: Path):
    recipe = RecipeConfig(
        model=ModelConfig(path=str(folder_of("llama2", tmp_path)), freeze=["q_norm"]),
        optimizer=OptimizerConfig(groups=[ParameterGroupConfig(pattern="q_proj.bias")]),
    )
    assert [problem.path for problem in check_names(recipe, set())] == ["model.freeze[0]", "optimizer.groups[0].pattern"]
    folder_of("qwen3", tmp_path)
    assert [problem.path for problem in check_names(recipe, set())] == ["optimizer.groups[0].pattern"]
    folder_of("qwen2", tmp_path)
    assert [problem.path for problem in check_names(recipe, set())] == ["model.freeze[0]"]
    assert check_names(recipe, {"model.path"}) == [], "of a model that is not there nothing more is said"


def test_the_model_below_an_adapter_is_the_one_that_is_meant(tmp_path: Path):
    (base := tmp_path / "base").mkdir()
    (adapter := tmp_path / "adapter").mkdir()
    folder_of("smollm", base)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    (adapter / "adapter_model.safetensors").touch()
    assert architecture_of(str(adapter)) == architecture_of(str(base))
    (adapter / "adapter_config.json").write_text("{}")
    assert architecture_of(str(adapter)) is None


def test_an_architecture_that_its_family_cannot_have_is_refused_with_the_settings(tmp_path: Path):
    recipe = RecipeConfig(model=ModelConfig(arch=LlamaConfig(family="mistral", qk_norm=True), tokenizer="t"))
    assert [problem.path for problem in check_names(recipe, set())] == ["model.arch.qk_norm"]
    assert check_names(RecipeConfig(model=ModelConfig(arch=SMALL, tokenizer="t")), set()) == []


@needs_smollm
def test_ten_mistakes_are_told_at_once_and_torch_is_not_imported():
    mistakes = {
        "peft.targets[0]": "peft.targets=[q_prj,o_proj,'(',lm_head]",
        "peft.targets[2]": "",
        "peft.targets[3]": "",
        "optimizer.groups[0].pattern": "optimizer.groups=[{pattern: lora_C},{pattern: embed_tokens},{pattern: layers.30}]",
        "optimizer.groups[1].pattern": "",
        "optimizer.groups[2].pattern": "",
        "optimizer.lr": "optimizer.lr=0",
        "zero.stge": "zero.stge=3",
        "data.train": "data.train=nowhere.jsonl",
        "trainer.epochs": "trainer.epochs=-1",
    }
    code = "import sys; from framework.cli.check import main; status = main(sys.argv[1:]); print(status, 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, "+recipe=llama_sft", "peft=lora", *filter(None, mistakes.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["2", "False"], done.stdout + done.stderr
    told = [line.partition(": got ")[0] for line in done.stderr.splitlines() if ": got " in line]
    assert sorted(told) == sorted(mistakes)
    assert "write    peft.targets=[all-linear]" in done.stderr and "write    optimizer.groups=[{pattern: lora_" in done.stderr
