"""A row's turns: the four formats, column mappings, and messages for rows that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.config.errors import UserError
from framework.config.schema import ColumnsConfig, DataConfig
from framework.data.conversations import Turn, choose_format, parse
from framework.data.files import Row
from framework.data.sources import peek

HELLO = (Turn("user", "Hi"), Turn("assistant", "Hello"))


def read(value, wanted="auto", **mapping):
    row = Row(Path("rows.jsonl"), 7, value)
    form = choose_format(row, wanted, ColumnsConfig(**mapping))
    return form.kind, parse(row, form)


@pytest.mark.parametrize(("value", "kind", "turns"), [
    ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}, "messages", HELLO),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, "sharegpt", HELLO),
    ({"messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, "sharegpt", HELLO),
    ({"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}, "messages", HELLO),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "Be kind"}, "sharegpt",
     (Turn("system", "Be kind"), *HELLO)),
    ({"instruction": "Hi", "output": "Hello"}, "alpaca", HELLO),
    ({"instruction": "Hi", "input": "", "output": "Hello", "system": None, "history": None}, "alpaca", HELLO),
    ({"instruction": "Add", "input": "1 2", "output": "3"}, "alpaca", (Turn("user", "Add\n1 2"), Turn("assistant", "3"))),
    ({"instruction": "Bye", "output": "Ciao", "system": "Be kind", "history": [["Hi", "Hello"]]}, "alpaca",
     (Turn("system", "Be kind"), *HELLO, Turn("user", "Bye"), Turn("assistant", "Ciao"))),
    ({"text": "A document"}, "text", "A document"),
    ("A .txt file", "text", "A .txt file"),
])  # fmt: skip
def test_each_format_is_recognised_and_read(value, kind, turns):
    assert read(value) == (kind, turns)


def test_p7_a_turn_of_weight_0_is_not_trained():
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "weight": 0}]
    assert read({"messages": turns})[1] == (Turn("user", "Hi"), Turn("assistant", "Hello", trained=False))


def test_p32_a_partial_mapping_keeps_the_other_names():
    assert read({"question": "Hi", "output": "Hello"}, instruction="question") == ("alpaca", HELLO)
    assert (
        read({"chat": [{"who": "user", "content": "Hi"}, {"who": "assistant", "content": "Hello"}]}, messages="chat", role="who")[1]
        == HELLO
    )
    assert read({"body": "A document"}, text="body") == ("text", "A document")


def test_p31_wrong_columns_list_those_found_those_needed_and_the_mapping_to_write():
    with pytest.raises(UserError) as caught:
        read({"question": "Hi", "answer": "Hello", "id": 3})
    message = str(caught.value)
    assert "rows.jsonl:7: got the columns question, answer, id" in message
    assert "alpaca: instruction, output" in message and "messages: messages" in message
    assert "write    data.columns.instruction=question data.columns.output=answer" in message


@pytest.mark.parametrize(("wanted", "mapping", "said"), [
    ("auto", {"output": "reply"}, "data.columns.output=reply, which is not there"),
    ("alpaca", {"text": "body"}, "data.columns.text=body, which the format alpaca does not have"),
    ("messages", {}, "messages: messages"),
])  # fmt: skip
def test_a_mapping_or_format_that_does_not_fit_is_never_ignored(wanted, mapping, said):
    with pytest.raises(UserError) as caught:
        read({"instruction": "Hi", "output": "Hello"}, wanted, **mapping)
    assert said in str(caught.value)


def message(**entry):
    return {"messages": [{"role": "user", "content": "Hi"}, entry]}


@pytest.mark.parametrize(("value", "said"), [
    (message(role="robot", content="x"), "turn 2 of `messages` with the role 'robot'"),
    (message(role="robot", content="x"), "system, user, assistant, human, gpt"),
    (message(role=["user"], content="x"), "with the role"),
    (message(role="assistant", content=None), "`content` of turn 2 of `messages` is null"),
    (message(role="assistant", content=[{"type": "text"}]), "`content` of turn 2 of `messages` is a list"),
    (message(role="assistant"), "turn 2 of `messages` with the keys role"),
    (message(role="assistant", content="", tool_calls=[{}]), "`tool_calls`"),
    (message(role="assistant", content="x", weight=0.5), "`weight` = 0.5"),
    ({"messages": [{"role": "user", "content": "Hi"}, "Hello"]}, "turn 2 of `messages` = Hello"),
    ({"messages": None}, "`messages` = null"),
    ({"messages": []}, "at least one turn"),
    ({"instruction": None, "output": "x"}, "`instruction` is null"),
    ({"instruction": "x", "output": {"answer": "y"}}, '`output` is an object: {"answer": "y"}'),
    ({"instruction": "x", "output": "y", "history": [["only one"]]}, "pair 1 of `history`"),
    ({"instruction": "x", "output": "y", "history": 3}, "`history` = 3"),
    ({"text": 5}, "`text` is a int: 5"),
])  # fmt: skip
def test_a_wrong_row_is_named_with_what_was_found(value, said):
    with pytest.raises(UserError, match="rows.jsonl:7") as caught:
        read(value)
    assert said in str(caught.value)


def test_peek_reports_all_problems_of_the_first_rows_of_both_sources(write_jsonl):
    bad = [{"instruction": "x", "output": None} if n % 2 else {"instruction": "x", "output": "y"} for n in range(16)]
    problems = peek(DataConfig(train=write_jsonl(bad), validation="missing.jsonl"))
    rows = [problem.path.rsplit(":", 1)[-1] for problem in problems[:5]]
    assert rows == ["2", "4", "6", "8", "10"]
    assert problems[5].got == "3 more rows with problems" and problems[6].path == "data.validation"


def test_peek_says_when_there_is_nothing(tmp_path):
    assert peek(DataConfig())[0].path == "data.train"
    for name, text in (("a.jsonl", ""), ("b.json", ""), ("c.json", "[]"), ("d.txt", "")):
        (tmp_path / name).write_text(text)
        (problem,) = peek(DataConfig(train=str(tmp_path / name)))
        assert "a file without rows" in problem.got


def test_documents_and_conversations_do_not_mix(write_jsonl, tmp_path):
    write_jsonl([{"text": "x"}], "a.jsonl"), write_jsonl([{"instruction": "x", "output": "y"}], "b.jsonl")
    (problem,) = peek(DataConfig(train=str(tmp_path)))
    assert "alpaca rows in" in problem.got and "text rows in" in problem.got


def test_peek_needs_neither_torch_nor_transformers_nor_datasets(write_jsonl):
    import subprocess
    import sys

    code = (
        "import sys; from framework.data.sources import peek; from framework.config.schema import DataConfig;"
        f"assert peek(DataConfig(train={write_jsonl([{'text': 'x'}])!r})) == [];"
        "sys.exit(str([name for name in ('torch', 'transformers', 'datasets', 'numpy') if name in sys.modules]))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]).stderr.strip() == "[]"
    )


def test_peek_looks_at_no_row_that_training_will_not_read(write_jsonl):
    path = write_jsonl([{"text": "x"}, "{broken"])
    assert peek(DataConfig(train=path, max_rows=1)) == [] and len(peek(DataConfig(train=path))) == 1
