"""A tiny byte-level tokenizer, trained here in milliseconds, and files with rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.templates import BOS_EOS, CHATML, CORPUS, SPECIAL


def make_tokenizer(template: str | None):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False))
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    bos, eos = BOS_EOS.get(template, ("<s>", "</s>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos, pad_token=eos)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_with() -> Callable:
    """`tokenizer_with(template)`: the tiny tokenizer with that chat template; pad = eos, as in many released models."""
    return make_tokenizer


@pytest.fixture(scope="session")
def chatml(tokenizer_with):
    return tokenizer_with(CHATML)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable:
    """`write_jsonl(rows, name)`: a JSON Lines file of the test; a str row is written as it is."""

    def write(rows: list, name: str = "train.jsonl") -> str:
        path = tmp_path / name
        path.write_text(
            "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows), encoding="utf-8"
        )
        return str(path)

    return write
