"""Files, rows, tokenizers and templates as users have them: each ends as `framework prepare` says it, with the row and what to write."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from framework.cli import prepare
from tests.data.templates import CHATML, chat
from tests.models.families import byte_tokenizer

GOOD = chat("question", "answer")
CHATS = [json.dumps(chat(f"question {n}", "answer")) for n in range(3)]
IDS = json.dumps({"input_ids": [1, 2]})
FAR = 5_000
LONG_LINE_BYTES = 300_000_000


def answer(value: object) -> str:
    return json.dumps({"messages": [GOOD["messages"][0], {"role": "assistant", "content": value}]})


def rows(*lines: str, name: str = "rows.jsonl", encoding: str = "utf-8", ends: str = "\n") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes("".join(line + ends for line in lines).encode(encoding))
        return folder / name

    return write


def with_bytes(folder: Path) -> Path:
    file = rows(*CHATS)(folder)
    file.write_bytes(file.read_bytes() + answer("caf?").encode().replace(b"?", b"\xe9") + b"\n")
    return file


def empty_folder(folder: Path) -> Path:
    (folder / "nothing").mkdir()
    return folder / "nothing"


def words_for(tmp_path: Path, data: Path, **changes: object) -> list[str]:
    """Of a tokenizer with these attributes; a template that is None is none."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return [
        "+recipe=llama_sft", "model.path=null", f"model.tokenizer={tmp_path}/tokenizer",
        "model.arch={vocab_size:300,hidden_size:64,num_hidden_layers:1}",
        f"data.train={data}", "data.validation_fraction=0", f"data.cache_dir={tmp_path}/cache",
    ]  # fmt: skip


@pytest.mark.parametrize(("write", "said"), [
    (rows(*[IDS] * (FAR - 1), '{"input_ids": [1, 2', IDS), f"rows.jsonl:{FAR}: got broken JSON, Expecting ',' delimiter"),
    (rows(*CHATS, '{"messages": null}'), "rows.jsonl:4: got `messages` = null"),
    (rows(*CHATS, "null"), "rows.jsonl:4: got null: null"),
    (rows(*CHATS, answer(None)), "rows.jsonl:4: got `content` of turn 2 of `messages` is null"),
    (rows(*CHATS, answer({"text": "answer"})), "rows.jsonl:4: got `content` of turn 2 of `messages` is an object: {\"text\": \"answer\"}"),
    (with_bytes, "rows.jsonl:4: got bytes that are not UTF-8 (b'\\xe9"),
    (rows(*CHATS, encoding="utf-16"), "rows.jsonl: got a file that begins as UTF-16 does"),
    (rows(), "rows.jsonl, a file without rows"),
    (empty_folder, "nothing, a folder that holds nothing"),
    (rows("a,b", "1,2", name="rows.xlsx"), "rows.xlsx, a .xlsx file"),
    (rows(IDS, json.dumps({"input_ids": [1, 300]})), "rows.jsonl:2: got the id 300 at position 2 of 2"),
    (rows(IDS, json.dumps({"input_ids": [-1, 2]})), "rows.jsonl:2: got the id -1 at position 1 of 2"),
])  # fmt: skip
def test_a_bad_file_or_row_is_named_with_what_is_wrong_with_it(tmp_path, capsys, write, said):
    assert prepare.main(words_for(tmp_path, write(tmp_path))) == 2
    error = capsys.readouterr().err
    assert said in error and "expected" in error and "Traceback" not in error


@pytest.mark.parametrize("write", [
    rows(*CHATS, encoding="utf-8-sig"), rows(*CHATS, ends="\r\n"), rows(*CHATS, encoding="utf-8-sig", ends="\r\n"), rows(*CHATS, "", " "),
], ids=["byte order mark", "windows line ends", "both", "blank lines"])  # fmt: skip
def test_marks_and_line_ends_of_other_systems_are_no_part_of_the_rows(tmp_path, capsys, write):
    assert prepare.main([*words_for(tmp_path, write(tmp_path)), "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert "question 0" in shown and "\r" not in shown and "\ufeff" not in shown
    assert [line.split()[:3] for line in shown.splitlines() if line.startswith("data.train ")] == [["data.train", "3", "3"]]


RAISING = (
    "{% for m in messages %}{% if 'question 1' in m.content %}{{ raise_exception('no such questions') }}{% endif %}{% endfor %}" + CHATML
)


@pytest.mark.parametrize(("tokenizer", "line", "said"), [
    ({"chat_template": None}, CHATS[0], "model.chat_template: got a tokenizer without a chat template"),
    ({"eos_token": None}, '{"text": "a document"}', "model.tokenizer: got a tokenizer without an end-of-sequence token"),
    ({"eos_token": None}, '{"prompt": "2 + 3 =", "completion": " 5"}', "model.tokenizer: got a tokenizer without an end-of-sequence token"),
    ({"chat_template": RAISING}, CHATS[1], "rows.jsonl:1: got turns that the chat template refuses (no such questions)"),
    ({"chat_template": "{% for m in messages %}"}, CHATS[0], "model.chat_template: got a template that fails on a question and its answer"),
    ({"eos_token": None, "pad_token": None}, CHATS[0], None),
])  # fmt: skip
def test_what_tokenizer_or_template_lack_is_told_where_it_is_needed(tmp_path, capsys, tokenizer, line, said):
    """Padding is not: padded places are not trained on, whatever is in them. Nor is an end of sequence where the template ends turns."""
    status = prepare.main(words_for(tmp_path, rows(line)(tmp_path), **tokenizer))
    error = capsys.readouterr().err
    assert (status, "Traceback" in error) == (0 if said is None else 2, False)
    assert said is None or said in error


MEASURED = """
import sys
from framework.cli import prepare
status = prepare.main(sys.argv[1:])
print(status, next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_single_line_of_300_mb_is_refused_in_less_memory_than_it_has(tmp_path):
    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.write(b'{"text": "')
        for _ in range(LONG_LINE_BYTES // 1_000_000):
            file.write(b"a" * 1_000_000)
        file.write(b'"}\n')
    command = [sys.executable, "-c", MEASURED, *words_for(tmp_path, tmp_path / "rows.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    status, most_kib = map(int, done.stdout.split())
    assert status == 2 and "rows.jsonl:1: got a row of more than 67 MB" in done.stderr
    assert most_kib * 1024 < LONG_LINE_BYTES
