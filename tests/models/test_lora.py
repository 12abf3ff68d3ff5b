"""Adapters against plain torch and against `peft`: layers, initial values by range, merging, and the folder on disk."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path

import peft
import pytest
import torch
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from framework.config.errors import UserError
from framework.config.schema import LlamaConfig, PeftConfig
from framework.models.adapter import open_adapted, open_adapter, write_adapter
from framework.models.llama import Llama
from framework.models.lora import AdapterReader, LoraLinear, add_adapter
from framework.models.pretrained import load_weights, open_pretrained, write_pretrained
from framework.models.targets import adapter_shapes, target_names

ARCHITECTURE = LlamaConfig(
    vocab_size=64,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attention_bias=True,
    attention_output_bias=False,
    family="qwen2",
)
LORA = PeftConfig(method="lora", rank=3, alpha=5.0)
VARIANTS = [LORA, dataclasses.replace(LORA, rslora=True), dataclasses.replace(LORA, dora=True)]
NAMES = ["lora", "rslora", "dora"]
IDS = torch.arange(2 * 9).view(2, 9) * 7 % ARCHITECTURE.vocab_size


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A pretrained folder."""
    torch.manual_seed(1)
    model = Llama(ARCHITECTURE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2) if parameter.dim() > 1 or name.endswith("bias") else parameter.uniform_(0.5, 1.5)
    return write_pretrained(tmp_path_factory.mktemp("base") / "model", ARCHITECTURE, model.named_parameters(), dtype="float32", show=False)


def adapted(base: Path, config: PeftConfig, seed: int = 0) -> Llama:
    """The base model with an adapter that does something."""
    pretrained = open_pretrained(base)
    model = Llama(ARCHITECTURE)
    load_weights(model, pretrained, show=False)
    add_adapter(model, config)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 1 + torch.rand(parameter.shape) if "magnitude" in name else 0.2 * torch.randn(parameter.shape)
    return model.eval()


def write(base: Path, folder: Path, config: PeftConfig, model: Llama) -> Path:
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    write_adapter(folder, ARCHITECTURE, config, str(base), reversed(trained))
    return folder


@pytest.mark.parametrize("config", VARIANTS, ids=NAMES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_what_the_papers_say(config: PeftConfig, bias: bool):
    torch.manual_seed(0)
    layer = LoraLinear(6, 4, config, bias=bias, std=0.5).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    plain = linear(x, layer.weight, layer.bias)
    assert torch.allclose(layer(x), plain, atol=1e-7), "a new adapter changes nothing"
    torch.nn.init.normal_(layer.lora_B)
    factor = 5.0 / (math.sqrt(3) if config.rslora else 3)
    weight = layer.weight + factor * layer.lora_B @ layer.lora_A
    if config.dora:
        torch.nn.init.uniform_(layer.lora_magnitude, 1, 2)
        weight = layer.lora_magnitude[:, None] * weight / weight.norm(dim=1, keepdim=True)
    assert torch.allclose(layer(x), linear(x, weight, layer.bias), rtol=1e-12)
    assert {name for name, parameter in layer.named_parameters() if parameter.requires_grad} == {
        "lora_A",
        "lora_B",
        *(["lora_magnitude"] if config.dora else []),
    }


def test_dropout_is_for_training_only():
    torch.manual_seed(0)
    layer = LoraLinear(64, 4, dataclasses.replace(LORA, dropout=0.5), bias=False, std=0.5)
    torch.nn.init.normal_(layer.lora_B)
    x = torch.randn(3, 64)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (["all-linear"], 14),
        (["q_proj"], 2),
        (["q_proj", "v_proj"], 4),
        (["self_attn.o_proj"], 2),
        ([r"model\.layers\.1\..*_proj"], 7),
        (["model.layers.0.mlp.up_proj"], 1),
    ],
)
def test_targets_are_names_patterns_or_all(targets: list[str], count: int):
    config = dataclasses.replace(LORA, targets=targets)
    names = target_names(ARCHITECTURE, config)
    assert len(names) == count
    with torch.device("meta"):
        model = Llama(ARCHITECTURE)
    add_adapter(model, config)
    assert [name for name, module in model.named_modules() if isinstance(module, LoraLinear)] == names
    trained = {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == adapter_shapes(ARCHITECTURE, config)


@pytest.mark.parametrize("target", ["qproj", "lm_head", "embed_tokens", "q"])
def test_a_target_that_is_no_layer_is_refused_with_those_there_are(target: str):
    with pytest.raises(UserError, match=r"down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"):
        target_names(ARCHITECTURE, dataclasses.replace(LORA, targets=["q_proj", target]))


@pytest.mark.parametrize("config", VARIANTS, ids=NAMES)
def test_first_values_are_the_same_for_every_split_into_ranges(base: Path, config: PeftConfig):
    pretrained = open_pretrained(base)
    reader = AdapterReader(pretrained, config, seed=7)
    model = Llama(ARCHITECTURE)
    load_weights(model, pretrained, show=False)
    add_adapter(model, config)
    for name, parameter in model.named_parameters():
        size = parameter.numel()
        whole = reader.read(name, 0, size)
        ranges = ((0, size // 3), (size // 3, size - 1), (size - 1, size))
        assert torch.equal(torch.cat([reader.read(name, start, stop) for start, stop in ranges]), whole)
        if name.endswith(("lora_B", "lora_magnitude", "weight", "bias")):
            assert torch.allclose(whole, parameter.detach().flatten()), name
    a = reader.read("model.layers.0.mlp.down_proj.lora_A", 0, 3 * 40)
    assert 0.9 / math.sqrt(40) < a.abs().max() <= 1 / math.sqrt(40)
    assert not torch.equal(a, AdapterReader(pretrained, config, seed=8).read("model.layers.0.mlp.down_proj.lora_A", 0, 3 * 40))
    assert not torch.equal(a[:72], reader.read("model.layers.0.mlp.up_proj.lora_A", 0, 72))


@pytest.mark.parametrize("config", VARIANTS, ids=NAMES)
def test_p26_p27_peft_loads_the_adapter_with_equal_logits_and_so_does_the_merged_model(base: Path, tmp_path: Path, config: PeftConfig):
    model = adapted(base, config)
    folder = write(base, tmp_path / "adapter", config, model)
    with torch.no_grad():
        expected = model(IDS)
        theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        assert torch.allclose(theirs(IDS).logits, expected, rtol=1e-5, atol=1e-5)
        merged = Llama(ARCHITECTURE)
        load_weights(merged, open_pretrained(folder), show=False)
        assert torch.allclose(merged(IDS), expected, rtol=1e-5, atol=1e-5)
        plain = Llama(ARCHITECTURE)
        load_weights(plain, open_pretrained(base), show=False)
        assert not torch.allclose(plain(IDS), expected, atol=1e-2)


@pytest.mark.parametrize("config", VARIANTS, ids=NAMES)
def test_an_adapter_that_peft_has_written_is_read_with_equal_logits(base: Path, tmp_path: Path, config: PeftConfig):
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], use_rslora=config.rslora, use_dora=config.dora, task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    torch.manual_seed(3)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path / "adapter")
    merged = Llama(ARCHITECTURE)
    load_weights(merged, open_pretrained(tmp_path / "adapter"), show=False)
    with torch.no_grad():
        assert torch.allclose(merged(IDS), theirs.eval()(IDS).logits, rtol=1e-5, atol=1e-5)


def test_merged_weights_are_the_same_for_every_split_into_ranges(base: Path, tmp_path: Path):
    config = dataclasses.replace(LORA, dora=True, targets=["k_proj"])
    opened = open_adapted(write(base, tmp_path / "adapter", config, adapted(base, config)))
    name = "model.layers.1.self_attn.k_proj.weight"
    size = opened.names()[name].numel()
    whole = opened.read(name, 0, size)
    for cut in (1, 23, 24, 25, 100, size - 1):
        assert torch.allclose(torch.cat([opened.read(name, 0, cut), opened.read(name, cut, size)]), whole, rtol=1e-6, atol=1e-7)
    assert opened.read(name, 5, 5).numel() == 0


@pytest.mark.parametrize(
    ("targets", "fix"),
    [
        (["q_prj"], "[q_proj]"),
        (["v_proj", "self_attn.k_prj", "k_proj"], "[v_proj,k_proj]"),
        (["nothing"], "[all-linear]"),
        (["q_proj", "lm_head"], "[all-linear]"),
        (["q_prj", "o_proj", "gate"], "[q_proj,o_proj,gate_proj]"),
    ],
)
def test_misspelt_targets_are_corrected_together(targets: list[str], fix: str):
    with pytest.raises(UserError) as caught:
        target_names(ARCHITECTURE, dataclasses.replace(LORA, targets=targets))
    assert {problem.fix for problem in caught.value.problems} == {f"peft.targets={fix}"}
    known = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert [p.path for p in caught.value.problems] == [f"peft.targets[{at}]" for at, one in enumerate(targets) if one not in known]


def test_training_goes_on_from_a_written_adapter(base: Path, tmp_path: Path):
    config = dataclasses.replace(LORA, targets=["q_proj"])
    model = adapted(base, config)
    folder = write(base, tmp_path / "run" / "export", config, model)
    assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == ["q_proj"]
    again = dataclasses.replace(config, path=str(tmp_path / "run"))
    reader = AdapterReader(open_pretrained(base), again, 0, open_adapter(again, ARCHITECTURE))
    for name, parameter in model.named_parameters():
        assert torch.equal(reader.read(name, 0, parameter.numel()), parameter.detach().flatten())
    with pytest.raises(UserError) as caught:
        open_adapter(dataclasses.replace(again, rank=4, alpha=1.0), ARCHITECTURE)
    assert [problem.fix for problem in caught.value.problems] == ["peft.rank=3", "peft.alpha=5.0"]
    with pytest.raises(UserError) as caught:
        open_adapter(dataclasses.replace(again, targets=["all-linear"]), ARCHITECTURE)
    assert [(problem.path, problem.fix) for problem in caught.value.problems] == [("peft.targets", '"peft.targets=[q_proj]"')]
    with pytest.raises(UserError, match=r"adapter_model.safetensors: got model\.layers\.1\.self_attn\.q_proj\.lora_A"):
        open_adapter(again, dataclasses.replace(ARCHITECTURE, num_hidden_layers=1))


def test_what_an_adapter_must_not_be(base: Path, tmp_path: Path):
    folder = write(base, tmp_path / "adapter", LORA, adapted(base, LORA))
    settings = json.loads((folder / "adapter_config.json").read_text())

    def refused(**changes: object) -> str:
        (folder / "adapter_config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(UserError) as caught:
            open_pretrained(folder)
        return str(caught.value)

    assert "peft_type 'IA3'" in refused(peft_type="IA3")
    assert "modules_to_save: ['lm_head']" in refused(modules_to_save=["lm_head"])
    assert "an adapter of no named model" in refused(base_model_name_or_path=None)
    assert "does not exist" in refused(base_model_name_or_path="/nowhere/model")
    assert "of shape [3, 40]" in refused(r=4)
    assert "no model.layers.0.mlp.down_proj.lora_magnitude" in refused(use_dora=True)


def test_p28_a_missing_or_foreign_tensor_leaves_no_folder(base: Path, tmp_path: Path):
    trained = [(name, parameter) for name, parameter in adapted(base, LORA).named_parameters() if parameter.requires_grad]
    for tensors in (trained[1:], [*trained, trained[0]], [("x.lora_A", torch.ones(3, 24)), *trained]):
        with pytest.raises(ValueError):
            write_adapter(tmp_path / "adapter", ARCHITECTURE, LORA, str(base), copy.copy(tensors))
        assert list(tmp_path.iterdir()) == []
