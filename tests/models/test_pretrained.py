"""Hugging Face folders: read by range, written as a stream, the same weights in `transformers`; and every way in which one is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from framework.config.errors import UserError
from framework.models.llama import Llama
from framework.models.pretrained import load_weights, open_pretrained, write_pretrained
from tests.models.families import FAMILIES, byte_tokenizer, oracle, save_oracle, some_ids

SHARDED = {"max_shard_size": "40KB"}


def tensors_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(model.named_parameters())


def loaded(folder: Path) -> Llama:
    pretrained = open_pretrained(folder)
    model = Llama(pretrained.config)
    load_weights(model, pretrained)
    return model


def export(folder: Path, model: Llama, **options) -> Path:
    return write_pretrained(folder, model.config, tensors_of(model), **{"dtype": "float32", **options})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound folder of one file, to be broken."""
    return save_oracle("llama3", tmp_path / "model")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_p26_round_trip_is_bitwise_and_transformers_gives_equal_logits(family: str, sharded: bool, tmp_path: Path):
    theirs, ids = oracle(family), some_ids()
    model = loaded(save_oracle(family, tmp_path / "theirs", **(SHARDED if sharded else {})))
    ours = export(tmp_path / "ours", model, max_shard_bytes=40_000 if sharded else 10**9)
    assert (len(list(ours.glob("*.safetensors"))) > 1) == sharded
    back = AutoModelForCausalLM.from_pretrained(ours, attn_implementation="eager").eval()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(back.get_parameter(name), parameter), name
        assert torch.equal(loaded(ours).get_parameter(name), parameter), name
    with torch.no_grad():
        assert torch.equal(back(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_any_range_of_elements_can_be_read(sharded: bool, tmp_path: Path):
    pretrained = open_pretrained(save_oracle("qwen2", tmp_path / "model", **(SHARDED if sharded else {})))
    for name, parameter in oracle("qwen2").named_parameters():
        assert pretrained.names()[name] == parameter.shape
        flat = parameter.detach().flatten()
        for start, stop in ((0, flat.numel()), (0, 0), (1, 2), (flat.numel() // 3, flat.numel() - 1)):
            assert torch.equal(pretrained.read(name, start, stop), flat[start:stop])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ranges_come_in_the_dtype_of_the_file(dtype: str, tmp_path: Path):
    pretrained = open_pretrained(export(tmp_path / "model", loaded(save_oracle("llama2", tmp_path / "source")), dtype=dtype))
    expected = oracle("llama2").model.norm.weight.detach().to(getattr(torch, dtype))
    assert torch.equal(pretrained.read("model.norm.weight", 3, 9), expected[3:9])


def test_p10_tokenizer_template_and_stop_tokens_are_part_of_the_export(tmp_path: Path):
    tokenizer = byte_tokenizer()
    eos, turn_end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    model = loaded(save_oracle("llama3", tmp_path / "source"))
    settings = {"eos_token_id": [7], "temperature": 0.6, "do_sample": True, "transformers_version": "4.0.0"}
    ours = export(tmp_path / "ours", model, tokenizer=tokenizer, generation_config=settings, stop_token_ids=[9])
    generation = GenerationConfig.from_pretrained(ours)
    assert (generation.eos_token_id, generation.temperature) == ([7, eos, turn_end, 9], 0.6)
    back = AutoTokenizer.from_pretrained(ours)
    turns = [{"role": "user", "content": "2 + 2\n = ?"}, {"role": "assistant", "content": "4"}]
    assert back.apply_chat_template(turns, return_dict=False) == tokenizer.apply_chat_template(turns, return_dict=False)
    assert set(back("text")) == {"input_ids", "attention_mask"}, "what generate() of transformers takes"
    assert json.loads((ours / "config.json").read_text())["eos_token_id"] == eos


def test_tensors_may_come_in_any_order(tmp_path: Path):
    model = loaded(save_oracle("qwen3", tmp_path / "source"))
    write_pretrained(tmp_path / "ours", model.config, reversed(tensors_of(model)), dtype="float32", max_shard_bytes=40_000)
    assert all(torch.equal(p, loaded(tmp_path / "ours").get_parameter(name)) for name, p in tensors_of(model))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda tensors: tensors[:-2], "2 parameters were not given: model.norm.weight, lm_head.weight"),
        (lambda tensors: [*tensors, ("model.extra", torch.zeros(1))], "model.extra is not a parameter"),
        (lambda tensors: [*tensors, tensors[0]], "model.embed_tokens.weight is repeated"),
        (lambda tensors: [(tensors[0][0], tensors[0][1][1:]), *tensors[1:]], r"shape \[259, 48\]"),
    ],
)
def test_p28_an_incomplete_export_is_refused_and_leaves_nothing(spoil, message: str, tmp_path: Path):
    model = loaded(save_oracle("llama3", tmp_path / "source"))
    with pytest.raises(ValueError, match=message):
        write_pretrained(tmp_path / "ours", model.config, spoil(tensors_of(model)), dtype="float32")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_an_export_never_replaces_a_folder(folder: Path):
    with pytest.raises(UserError, match="a new folder"):
        export(folder, loaded(folder))


def test_a_value_beyond_float16_is_refused(folder: Path, tmp_path: Path):
    model = loaded(folder)
    model.model.norm.weight.data[0] = 70000
    with pytest.raises(UserError, match=r"float16, which cannot hold model.norm.weight \(up to 7e\+04\)"):
        export(tmp_path / "ours", model, dtype="float16")


def truncate(file: Path, to_bytes: int) -> None:
    with file.open("r+b") as stream:
        stream.truncate(to_bytes)


def rewrite(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "which has no config.json"),
    "bad config": (lambda f: (f / "config.json").write_text("{"), r"config.json: got JSONDecodeError"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), r"config.json: got a list"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"no \*.safetensors"),
    "pickled weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        r"no \*.safetensors \(pytorch_model.bin is not read\)",
    ),
    "empty file": (lambda f: truncate(f / "model.safetensors", 0), r"model.safetensors: got 0 bytes"),
    "truncated header": (lambda f: truncate(f / "model.safetensors", 200), r"model.safetensors: got 200 bytes with a header of"),
    "truncated data": (lambda f: truncate(f / "model.safetensors", 50_000), r"model.safetensors: got 50,000 bytes\n.*truncated"),
    "no safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"rubbish!"), "does not parse"),
    "wrong shape": (lambda f: rewrite(f / "config.json", vocab_size=150), r"model.embed_tokens.weight of shape \[260, 48\]\n.*\[150, 48\]"),
    "missing tensors": (
        lambda f: rewrite(f / "config.json", num_hidden_layers=4),
        "9 tensors are missing: model.layers.3.self_attn.q_proj",
    ),
    "unexpected tensors": (
        lambda f: rewrite(f / "config.json", num_hidden_layers=2),
        "9 unexpected tensors: model.layers.2.input_layernorm",
    ),
    "mixture of experts": (lambda f: rewrite(f / "config.json", model_type="mixtral"), "model_type: 'mixtral'"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_p28_a_broken_folder_is_refused_with_the_file_named(kind: str, folder: Path):
    spoil, message = BROKEN[kind]
    spoil(folder)
    with pytest.raises(UserError, match=message) as error:
        open_pretrained(folder)
    assert str(folder) in str(error.value)


def test_p28_an_index_and_its_files_must_agree(tmp_path: Path):
    folder = save_oracle("llama3", tmp_path / "model", **SHARDED)
    index = folder / "model.safetensors.index.json"
    shards = sorted(folder.glob("*.safetensors"))
    weight_map = json.loads(index.read_text())["weight_map"]
    rewrite(index, weight_map={**weight_map, "model.norm.weight": shards[0].name, "lm_head.weight": shards[-1].name})
    with pytest.raises(UserError, match=r"tensors that are not in the file it names: .*\(in model-0"):
        open_pretrained(folder)
    rewrite(index, weight_map=weight_map)
    shards[1].unlink()
    with pytest.raises(UserError, match=f"are missing: {shards[1].name}"):
        open_pretrained(folder)
    index.unlink()
    with pytest.raises(UserError, match=r"files \(model-0.* and no model.safetensors.index.json"):
        open_pretrained(folder)


def test_eight_bit_weights_are_refused(folder: Path):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"I32"', 1))
    with pytest.raises(UserError, match="of type I32"):
        open_pretrained(folder)
