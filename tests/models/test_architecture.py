"""What is read from a config.json, what is refused, and what is written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from framework.config.errors import UserError
from framework.config.schema import LlamaConfig, RopeScaling
from framework.models.architecture import check_architecture, config_from_hf, config_to_hf, head_dim
from tests.models.families import FAMILIES, config_json

LLAMA = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "some_note": "is of no consequence",
}
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@pytest.mark.parametrize("family", FAMILIES)
def test_written_configurations_read_back_as_they_were(family: str):
    config = config_from_hf(config_json(family), "config.json")
    written = config_to_hf(config, dtype="float32", token_ids=NO_IDS)
    assert config_from_hf(written, "config.json") == replace(config, head_dim=head_dim(config))


def test_both_spellings_of_rotary_settings_are_read():
    settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    expected = (500000.0, RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=512))
    for spelled in (
        {"rope_theta": 500000.0, "rope_scaling": settings},
        {"rope_parameters": {**settings, "rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_scaling": {**{k: v for k, v in settings.items() if k != "rope_type"}, "type": "yarn"}},
    ):
        config = config_from_hf({**LLAMA, **spelled}, "config.json")
        assert (config.rope_theta, config.rope_scaling) == expected


def test_both_spellings_of_rotary_settings_are_written():
    config = LlamaConfig(rope_theta=5.0, rope_scaling=RopeScaling(kind="linear", factor=2.0))
    data = config_to_hf(config, dtype="float32", token_ids=NO_IDS)
    assert (data["rope_theta"], data["rope_scaling"]) == (5.0, {"rope_type": "linear", "factor": 2.0})
    assert data["rope_parameters"] == {"rope_theta": 5.0, "rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "setting",
    [
        {"model_type": "mixtral"},
        {"model_type": None},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"hidden_act": "gelu"},
        {"attention_dropout": 0.1},
        {"partial_rotary_factor": 0.5},
        {"rope_interleaved": True},
        {"quantization_config": {"quant_method": "fp8"}},
        {"num_local_experts": 8},
        {"vocab_size": "many"},
        {"hidden_size": 50},
        {"num_key_value_heads": 4},
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}},
        {"rope_scaling": {"rope_type": "linear"}},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
        {"model_type": "mistral", "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    ],
    ids=str,
)
def test_what_the_decoder_does_not_have_is_refused_by_name(setting: dict):
    with pytest.raises(UserError) as error:
        config_from_hf({**LLAMA, **setting}, "folder/config.json")
    key = [key for key in setting if key != "model_type"] or ["model_type"]
    assert key[0] in str(error.value)
    assert all(problem.path.startswith("folder/config.json") for problem in error.value.problems)


def test_every_refused_key_is_named_at_once():
    with pytest.raises(UserError) as error:
        config_from_hf({**LLAMA, "hidden_act": "gelu", "attention_dropout": 0.1, "vocab_size": None}, "config.json")
    assert len(error.value.problems) == 3


def test_an_export_that_its_family_could_not_say_is_refused():
    assert not check_architecture(LlamaConfig())
    assert not check_architecture(LlamaConfig(sliding_window=64, family="mistral"))
    (problem,) = check_architecture(LlamaConfig(sliding_window=64))
    assert problem.path == "model.arch.sliding_window" and "mistral" in problem.fix
    (problem,) = check_architecture(LlamaConfig(attention_bias=True))
    assert problem.fix == "model.arch.attention_output_bias=true"
