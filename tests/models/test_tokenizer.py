"""Tokenizers of folders and GGUF files, their templates and stop tokens; the real one where it is installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from framework.config.errors import UserError
from framework.config.schema import ModelConfig
from framework.models.llama import Llama
from framework.models.pretrained import open_pretrained, write_pretrained
from framework.models.tokenizer import load_tokenizer, save_tokenizer, stop_token_ids, tokenizer_from, turn_end_id
from tests.models.families import byte_tokenizer
from tests.models.test_gguf import SMOLLM, needs_smollm

HARD = "In 2024: 12 apples\n\n\tété  3.14<|im_end|> 日本🎉 <|endoftext|>x\r\n  "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer").mkdir()
    save_tokenizer(byte_tokenizer(), tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_a_folder_without_weights_serves_as_tokenizer(folder: Path):
    tokenizer = load_tokenizer(ModelConfig(path="./no-such-model", tokenizer=str(folder)))
    assert tokenizer("a 12 <|im_end|>")["input_ids"] == byte_tokenizer()("a 12 <|im_end|>")["input_ids"]
    assert tokenizer.chat_template == byte_tokenizer().chat_template


def test_a_tokenizer_json_is_taken_as_it_stands(folder: Path):
    """AutoTokenizer of transformers 5 would rebuild this one by the rules of its class, with other ids."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": "Qwen2Tokenizer"}))
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    text = "a  b\n\n12"
    assert tokenizer_from(folder)(text)["input_ids"] == byte_tokenizer()(text)["input_ids"]


def test_a_chat_template_can_be_replaced(folder: Path, tmp_path: Path):
    (tmp_path / "short.jinja").write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    tokenizer = load_tokenizer(ModelConfig(tokenizer=str(folder), chat_template=str(tmp_path / "short.jinja")))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[hi]"


def test_p10_an_answer_stops_at_eos_and_at_the_templates_end_of_turn():
    tokenizer = byte_tokenizer()
    eos, turn_end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert stop_token_ids(tokenizer) == [eos, turn_end]
    tokenizer.eos_token = "<|im_end|>"
    assert stop_token_ids(tokenizer) == [turn_end]
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    assert turn_end_id(tokenizer) is None
    tokenizer.chat_template = None
    assert turn_end_id(tokenizer) is None


@pytest.mark.parametrize(
    "model, path",
    [
        (ModelConfig(), "model.tokenizer"),
        (ModelConfig(path="./nowhere"), "model.path"),
        (ModelConfig(path="./nowhere", tokenizer="./neither"), "model.tokenizer"),
        (ModelConfig(path="pkg://no_such_package_here/model.gguf"), "model.path"),
    ],
)
def test_a_missing_tokenizer_is_told_by_its_setting(model: ModelConfig, path: str):
    with pytest.raises(UserError) as error:
        load_tokenizer(model)
    assert error.value.problems[0].path == path


def test_broken_files_are_told(folder: Path):
    with pytest.raises(UserError, match="got .*missing.jinja"):
        load_tokenizer(ModelConfig(tokenizer=str(folder), chat_template="missing.jinja"))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="does not load"):
        tokenizer_from(folder)


def gguf_tokenizer(file: Path, pre: str, **settings: bool) -> Path:
    """A GGUF file of a tokenizer alone: one token per byte, "ab", and <bos>, which is number 257."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<bos>"]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    for key, value in settings.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    "pre, settings, count",
    [("llama-bpe", {}, 1), ("llama-bpe", {"add_bos_token": False}, 0), ("gpt-2", {}, 0), ("gpt-2", {"add_bos_token": True}, 1)],
)
def test_p9_the_bos_of_a_gguf_file_is_added_as_llama_cpp_does(pre: str, settings: dict, count: int, tmp_path: Path):
    tokenizer = tokenizer_from(gguf_tokenizer(tmp_path / "t.gguf", pre, **settings))
    ids = tokenizer("ab 12")["input_ids"]
    assert ids.count(257) == count and len(ids) == 4 + count
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab 12"


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="tokenizer.ggml.pre: 'mystery'"):
        tokenizer_from(gguf_tokenizer(tmp_path / "t.gguf", "mystery"))


@needs_smollm
def test_smollm2_has_the_ids_of_its_card():
    tokenizer = load_tokenizer(ModelConfig(path=SMOLLM))
    assert tokenizer("The capital of France is")["input_ids"] == [504, 3575, 282, 4649, 314]
    digits = tokenizer("2024")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(digits) == ["2", "0", "2", "4"]
    assert tokenizer.decode(tokenizer(HARD)["input_ids"]) == HARD
    assert stop_token_ids(tokenizer) == [tokenizer.convert_tokens_to_ids("<|im_end|>")] == [2]


@needs_smollm
def test_p8_p10_smollm2s_exported_tokenizer_gives_the_same_ids_in_transformers(tmp_path: Path):
    """The weights that are exported with it do not matter here: a tiny model of the same vocabulary."""
    pretrained, tokenizer = open_pretrained(SMOLLM), load_tokenizer(ModelConfig(path=SMOLLM))
    model = Llama(replace(pretrained.config, hidden_size=18, num_hidden_layers=1, intermediate_size=8, head_dim=2))
    write_pretrained(tmp_path / "export", model.config, model.named_parameters(), dtype="bfloat16", tokenizer=tokenizer)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export")
    layout = json.loads((tmp_path / "export" / "tokenizer.json").read_text())["pre_tokenizer"]
    assert [part["type"] for part in layout["pretokenizers"]] == ["Digits", "ByteLevel"]
    turns = [{"role": "user", "content": HARD}, {"role": "assistant", "content": "1 and 2"}]
    for back in (theirs, tokenizer_from(tmp_path / "export")):
        assert back(HARD)["input_ids"] == tokenizer(HARD)["input_ids"]
        assert back.apply_chat_template(turns, return_dict=False) == tokenizer.apply_chat_template(turns, return_dict=False)
        assert back.eos_token_id == 2
