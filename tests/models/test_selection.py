"""What a pattern means, what is trained for it, and with which learning rate and weight decay."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from framework.config.check import check_settings
from framework.config.errors import UserError
from framework.config.schema import (
    LlamaConfig,
    ModelConfig,
    OptimizerConfig,
    ParameterGroupConfig,
    PeftConfig,
    RecipeConfig,
    TrainerConfig,
    ZeroConfig,
    ZeroModuleConfig,
)
from framework.models.llama import Llama
from framework.models.selection import Settings, check_selection, choose_trained, parameter_groups, settings_of, trained_shapes
from framework.models.targets import adapter_shapes

TIED = LlamaConfig(
    vocab_size=64, hidden_size=8, intermediate_size=12, num_hidden_layers=4, num_attention_heads=2, max_position_embeddings=64,
    tie_word_embeddings=True,
)  # fmt: skip
UNTIED = dataclasses.replace(TIED, tie_word_embeddings=False)
NONE = PeftConfig()


def trained(architecture: LlamaConfig = UNTIED, **model: object) -> set[str]:
    """Names of what is trained, which the model itself must agree with."""
    config = ModelConfig(**model)
    with torch.device("meta"):
        made = Llama(architecture)
    choose_trained(made, config, NONE)
    names = {name for name, parameter in made.named_parameters() if parameter.requires_grad}
    assert names == trained_shapes(architecture, config, NONE).keys()
    return names


def everything(architecture: LlamaConfig = UNTIED) -> set[str]:
    return trained(architecture)


@pytest.mark.parametrize(
    ("pattern", "frozen"),
    [
        ("embed_tokens", {"model.embed_tokens.weight"}),
        ("model.norm.weight", {"model.norm.weight"}),
        ("layers.1", {name for name in everything() if ".layers.1." in name}),
        ("q_proj", {name for name in everything() if "q_proj" in name}),
        ("self_attn", {name for name in everything() if "self_attn" in name}),
        (r"model\.layers\.[0-2]", {name for name in everything() if any(f".layers.{block}." in name for block in (0, 1, 2))}),
        (".*layernorm.*", {name for name in everything() if "layernorm" in name}),
    ],
)
def test_a_pattern_means_last_words_of_names_or_whole_names_with_all_that_is_inside(pattern: str, frozen: set[str]):
    assert frozen and everything() - trained(freeze=[pattern]) == frozen


def test_the_last_blocks_are_trained_with_the_final_norm_and_the_head():
    assert {name.split(".")[2] for name in trained(train_last_n_blocks=2) if ".layers." in name} == {"2", "3"}
    assert {name for name in trained(train_last_n_blocks=2) if ".layers." not in name} == {"model.norm.weight", "lm_head.weight"}
    assert trained(train_last_n_blocks=0) == {"model.norm.weight", "lm_head.weight"}
    assert trained(train_last_n_blocks=4) == everything() - {"model.embed_tokens.weight"}
    assert not {name for name in trained(train_last_n_blocks=2, freeze=["mlp"]) if "mlp" in name}


def test_a_tied_head_is_one_matrix_under_two_names():
    embedding = {"model.embed_tokens.weight"}
    assert everything(TIED) - trained(TIED, freeze=["lm_head"]) == everything(TIED) - trained(TIED, freeze=["embed_tokens"]) == embedding
    assert trained(TIED, train_last_n_blocks=0) == embedding | {"model.norm.weight"}
    assert trained(TIED, train_last_n_blocks=0, freeze=["lm_head"]) == {"model.norm.weight"}


@pytest.mark.parametrize(
    ("model", "path", "told"),
    [
        ({"freeze": ["mlp", "embed_token"]}, "model.freeze[1]", "embed_token, which is no parameter of this model"),
        ({"freeze": ["layers.4"]}, "model.freeze[0]", "layers.4, which"),
        ({"freeze": [".*"]}, "model.freeze", "every parameter"),
        ({"train_last_n_blocks": 5}, "model.train_last_n_blocks", "5"),
    ],
)
def test_what_means_nothing_or_leaves_nothing_is_refused(model: dict, path: str, told: str):
    with pytest.raises(UserError) as caught:
        trained(**model)
    (problem,) = caught.value.problems
    assert problem.path == path and told in problem.got
    if "mlp" in model.get("freeze", ()):
        assert problem.fix == "model.freeze=[mlp,embed_tokens]"


def settings(architecture: LlamaConfig = UNTIED, peft: PeftConfig = NONE, **optimizer: object) -> dict[str, Settings]:
    return settings_of(trained_shapes(architecture, ModelConfig(), peft), architecture, OptimizerConfig(weight_decay=0.1, **optimizer))


def test_matrices_decay_and_norms_do_not_unless_a_group_says_so():
    plain = settings()
    assert {s.weight_decay for name, s in plain.items() if "norm" not in name} == {0.1}
    assert {s.weight_decay for name, s in plain.items() if "norm" in name} == {0.0}
    rules = [
        ParameterGroupConfig(pattern="embed_tokens", lr_factor=0.1),
        ParameterGroupConfig(pattern="layers.2", weight_decay=0.3),
        ParameterGroupConfig(pattern=".*proj", lr_factor=5.0, weight_decay=0.0),
    ]
    found = settings(groups=rules)
    assert found["model.embed_tokens.weight"] == Settings(0.1, 0.1)
    assert found["model.layers.2.mlp.up_proj.weight"] == found["model.layers.2.input_layernorm.weight"] == Settings(1.0, 0.3)
    assert found["model.layers.1.mlp.up_proj.weight"] == Settings(5.0, 0.0)
    assert found["model.layers.1.input_layernorm.weight"] == plain["model.layers.1.input_layernorm.weight"]


@pytest.mark.parametrize("architecture", [TIED, UNTIED], ids=["tied", "untied"])
def test_each_block_learns_slower_than_the_one_above_it(architecture: LlamaConfig):
    found = settings(architecture, layer_lr_decay=0.5)
    for block in range(4):
        factors = {s.lr_factor for name, s in found.items() if f".layers.{block}." in name}
        assert factors == {0.5 ** (4 - block)}
    assert found["model.embed_tokens.weight"].lr_factor == 0.5**5 == min(s.lr_factor for s in found.values())
    assert found["model.norm.weight"].lr_factor == 1.0
    assert architecture is TIED or found["lm_head.weight"].lr_factor == 1.0
    both = settings(architecture, layer_lr_decay=0.5, groups=[ParameterGroupConfig(pattern="mlp", lr_factor=3.0)])
    assert both["model.layers.3.mlp.up_proj.weight"].lr_factor == 1.5


def test_adapters_have_groups_too():
    lora = PeftConfig(method="lora", rank=2, dora=True)
    found = settings(peft=lora, groups=[ParameterGroupConfig(pattern="lora_B", lr_factor=16.0)], layer_lr_decay=0.9)
    assert found.keys() == adapter_shapes(UNTIED, lora).keys()
    assert found["model.layers.3.mlp.up_proj.lora_B"] == Settings(0.9 * 16, 0.1)
    assert found["model.layers.3.mlp.up_proj.lora_A"] == Settings(0.9, 0.1)
    assert found["model.layers.3.mlp.up_proj.lora_magnitude"] == Settings(0.9, 0.0)
    with pytest.raises(UserError, match="optimizer.groups\\[0\\].pattern: got embed_tokens, which is no trained parameter"):
        settings(peft=lora, groups=[ParameterGroupConfig(pattern="embed_tokens")])


def test_a_group_that_means_nothing_names_what_there_is():
    with pytest.raises(UserError) as caught:
        settings(groups=[ParameterGroupConfig(pattern="qproj")])
    (problem,) = caught.value.problems
    assert problem.fix == "optimizer.groups=[{pattern: q_proj}]" and "k_proj" in problem.expected


def test_a_group_that_an_earlier_one_leaves_nothing_to_is_refused():
    rules = [ParameterGroupConfig(pattern="mlp"), ParameterGroupConfig(pattern="up_proj", lr_factor=2.0)]
    with pytest.raises(UserError, match=r"optimizer\.groups\[1\]\.pattern: got up_proj, all of which is in the groups before it"):
        settings(groups=rules)
    assert settings(groups=rules[::-1])["model.layers.0.mlp.up_proj.weight"].lr_factor == 2.0


def test_all_patterns_that_mean_nothing_are_told_together():
    recipe = RecipeConfig(
        model=ModelConfig(freeze=["a", "b"]), optimizer=OptimizerConfig(groups=[ParameterGroupConfig(pattern="c", lr_factor=2.0)])
    )
    with pytest.raises(UserError) as caught:
        check_selection(recipe, UNTIED)
    assert [problem.path for problem in caught.value.problems] == ["model.freeze[0]", "model.freeze[1]", "optimizer.groups[0].pattern"]


def test_every_trained_parameter_is_in_one_group():
    model = Llama(TIED)
    choose_trained(model, ModelConfig(freeze=["layers.0"]), NONE)
    groups = parameter_groups(model, OptimizerConfig(layer_lr_decay=0.5, weight_decay=0.1))
    ids = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(ids) == sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)
    assert len(groups) == len({(group["lr_factor"], group["weight_decay"]) for group in groups}) == 8  # 3 blocks x 2, embedding, norm


def test_settings_that_cannot_be_are_all_told_at_once():
    recipe = RecipeConfig(
        model=ModelConfig(arch=TIED, tokenizer="t", freeze=["a("], train_last_n_blocks=-1),
        peft=PeftConfig(base="nf4"),
        optimizer=OptimizerConfig(layer_lr_decay=1.5, groups=[ParameterGroupConfig(lr_factor=0, weight_decay=-1)]),
        trainer=TrainerConfig(max_steps=3, micro_batch_size=1, accumulate=1),
    )
    assert [problem.path for problem in check_settings(recipe) if not problem.path.startswith("data")] == [
        "peft.base",
        "model.train_last_n_blocks",
        "model.freeze[0]",
        "model.freeze",
        "model.train_last_n_blocks",
        "optimizer.layer_lr_decay",
        "optimizer.groups[0].pattern",
        "optimizer.groups[0].lr_factor",
        "optimizer.groups[0].weight_decay",
    ]
    adapters = dataclasses.replace(recipe, model=ModelConfig(path="m", freeze=["mlp"]), peft=PeftConfig(method="lora", base_block=32))
    assert [problem.fix for problem in check_settings(adapters)][:2] == ["peft.base=nf4", "peft=none"]


def test_a_pattern_of_zero_modules_that_means_nothing_names_what_there_is():
    adapters = PeftConfig(method="lora", base="nf4", targets=["q_proj"])
    rules = [ZeroModuleConfig(pattern=pattern, stage=1) for pattern in (".*lora_[AB]", "embed_token", "q_proj.weight", "lora_A")]
    recipe = RecipeConfig(model=ModelConfig(path="m"), peft=adapters, zero=ZeroConfig(stage=3, modules=rules))
    with pytest.raises(UserError) as caught:
        check_selection(recipe, UNTIED)
    unknown, quantised, shadowed = caught.value.problems
    assert unknown.path == "zero.modules[1].pattern" and "embed_token, which is no parameter" in unknown.got
    assert "embed_tokens" in unknown.fix and "stage: 1" in unknown.fix
    assert quantised.path == "zero.modules[2].pattern" and "weight_codes" in quantised.expected
    assert shadowed.path == "zero.modules[3].pattern" and "in the patterns before it" in shadowed.got


def test_muon_takes_matrices_in_blocks_and_leaves_the_others_to_adamw_at_its_rate():
    optimizer = OptimizerConfig(name="muon", lr=0.02, adamw_lr=0.005, groups=[ParameterGroupConfig(pattern="norm", lr_factor=2.0)])
    for architecture in (TIED, UNTIED):
        shapes = trained_shapes(architecture, ModelConfig(), NONE)
        settings = settings_of(shapes, architecture, optimizer)
        for name, shape in shapes.items():
            orthogonal = ".layers." in name and len(shape) == 2
            factor = 1.0 if orthogonal else 0.25 * (2.0 if name == "model.norm.weight" else 1.0)
            assert (settings[name].orthogonal, settings[name].lr_factor) == (orthogonal, factor), name
    with torch.device("meta"):
        groups = parameter_groups(Llama(UNTIED), optimizer)
    assert {group["orthogonal"] for group in groups} == {True, False}
    assert all("orthogonal" not in group for group in parameter_groups(Llama(UNTIED), OptimizerConfig()))
