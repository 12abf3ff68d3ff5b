"""`framework prepare`: the cache is filled ahead, the ledger printed, samples shown, and mistakes told as `train` tells them."""

from __future__ import annotations

import json

import pytest

from framework.cli import prepare
from framework.cli.main import run
from tests.data.templates import CHATML, chat
from tests.models.families import byte_tokenizer


@pytest.fixture
def words(tmp_path) -> list[str]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(chat(f"question {n}", "answer")) + "\n" for n in range(20)))
    return [
        "+recipe=llama_sft", "model.path=null", f"model.tokenizer={tmp_path}/tokenizer",
        "model.arch={vocab_size:300,hidden_size:64,num_hidden_layers:1}",
        f"data.train={tmp_path}/rows.jsonl", "data.validation_fraction=0.1", f"data.cache_dir={tmp_path}/cache",
    ]  # fmt: skip


def test_it_fills_the_cache_and_prints_the_ledger_and_where_the_tokens_are(words, tmp_path, capsys):
    """On a machine that has not what the recipe trains on: here, without any GPU."""
    assert prepare.main([*words, "trainer.accelerator=cuda", "trainer.devices=8", "trainer.global_batch_size=8"]) == 0
    shown = capsys.readouterr().out
    (entry,) = (tmp_path / "cache" / "tokens").iterdir()
    assert f"data.train: 20 rows in tokens are now in {entry}" in shown
    assert [line.split()[:4] for line in shown.splitlines() if line.startswith("data.train ")] == [["data.train", "20", "18", "2"]]
    assert run("check", [*words, "trainer.accelerator=cpu", "trainer.devices=1"]) == 0
    assert f"data.train: 20 rows in tokens from the cache, {entry}" in capsys.readouterr().out


def test_it_shows_samples_with_the_trained_tokens_marked(words, capsys):
    assert prepare.main([*words, "--show", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\u27e6answer<|im_end|>\u27e7") == 3 and "---- 1 of 18: one sample" in shown and "---- 18 of 18" in shown
    assert "\033[" not in shown, "colour is for terminals"


def test_it_looks_at_every_byte_of_what_is_there(words, tmp_path, capsys, monkeypatch):
    import framework.data.cache

    assert prepare.main(words) == 0
    monkeypatch.setattr(framework.data.cache, "BLOCKS_CHECKED", 0)
    (entry,) = (tmp_path / "cache" / "tokens").iterdir()
    data = bytearray((entry / "ids.bin").read_bytes())
    data[100] ^= 1
    (entry / "ids.bin").write_bytes(data)
    assert prepare.main(words) == 0
    assert "cannot be used (ids.bin is damaged near byte 0); it is made anew" in capsys.readouterr().out


@pytest.mark.parametrize(("more", "said"), [
    (["data.max_tokens=5"], "data.max_tokens="), (["data.train=nowhere.jsonl", "data.num_workers=0"], "2 problems:"),
    (["--show", "many"], "--show: got many"), (["--show"], "--show: got nothing"), (["-m", "zero=0,1"], "-m: got a sweep"),
    (["model.chat_template=/nowhere.jinja"], "model.chat_template: got /nowhere.jinja (No such file"),
])  # fmt: skip
def test_mistakes_end_with_status_2_and_without_traceback(words, capsys, more, said):
    assert prepare.main([*words, *more]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_it_explains_itself(capsys):
    assert prepare.main(["--help"]) == 0
    assert "framework prepare +recipe=llama_sft --show 3" in capsys.readouterr().out
