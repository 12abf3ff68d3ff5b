"""A row's turns: the five formats, tools, column mappings, and messages for rows that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from framework.config.errors import UserError
from framework.config.schema import ColumnsConfig, DataConfig
from framework.data.conversations import choose_format, parse
from framework.data.files import Row
from framework.data.sources import peek
from framework.data.turns import Completion, Conversation, Turn

HELLO = (Turn("user", "Hi"), Turn("assistant", "Hello"))


def message(**entry):
    return {"messages": [{"role": "user", "content": "Hi"}, entry]}


def read(value, wanted="auto", **mapping):
    row = Row(Path("rows.jsonl"), 7, value)
    form = choose_format(row, wanted, ColumnsConfig(**mapping))
    said = parse(row, form)
    return form.kind, said.turns if isinstance(said, Conversation) else said


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
    ({"prompt": "2 + 3 =", "completion": " 5"}, "completion", Completion("2 + 3 =", " 5")),
    ({"prompt": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Hi"}],
      "completion": [{"role": "assistant", "content": "Hello"}], "system": "Be kind"}, "completion",
     (Turn("system", "Be kind"), Turn("user", "Hi", False), Turn("assistant", "Yes?", False), Turn("user", "Hi", False), HELLO[1])),
    ({"text": "A document"}, "text", "A document"),
    ("A .txt file", "text", "A .txt file"),
])  # fmt: skip
def test_each_format_is_recognised_and_read(value, kind, turns):
    assert read(value) == (kind, turns)


@pytest.mark.parametrize("key", [{"weight": 0}, {"train": False}, {"weight": 0, "train": False}])
def test_p7_a_turn_of_weight_0_is_not_trained(key):
    turns = [{"role": "user", "content": "Hi", "train": True}, {"role": "assistant", "content": "Hello", **key}]
    assert read({"messages": turns})[1] == (Turn("user", "Hi"), Turn("assistant", "Hello", trained=False))


ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
PLUS = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


TURNS = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]


BETTER = [TURNS[0], {"role": "assistant", "content": "5, of course"}]


@pytest.mark.parametrize(("value", "mapping", "said", "trained"), [
    ({"messages": TURNS, "chosen": "a", "rejected": "b"}, {"messages": "messages"}, "preference pairs", TURNS),
    ({"messages": TURNS, "chosen": BETTER, "rejected": TURNS}, {"messages": "chosen"}, "data.columns.messages=chosen", BETTER),
    ({"messages": TURNS, "label": False}, {"messages": "messages"}, "the rows whose label is true alone", TURNS),
])  # fmt: skip
def test_preferences_are_never_trained_on_as_answers_unless_a_mapping_says_so(value, mapping, said, trained):
    with pytest.raises(UserError, match=said):
        read(value)
    assert read(value, **mapping) == ("messages", tuple(Turn(turn["role"], turn["content"]) for turn in trained))


def test_the_better_answer_to_a_prompt_is_a_completion_where_a_mapping_says_so():
    value = {"prompt": "2 + 3?", "completion": "what?", "chosen": " 5", "rejected": " 6"}
    with pytest.raises(UserError, match="data.columns.prompt=prompt data.columns.completion=chosen"):
        read(value)
    assert read(value, prompt="prompt", completion="chosen") == ("completion", Completion("2 + 3?", " 5"))


def test_a_label_that_is_no_judgement_is_a_column_like_others():
    assert read({"messages": TURNS, "label": "arithmetic"}) == read({"messages": TURNS})


def test_p7_another_trainers_weight_of_a_turn_is_not_passed_over():
    with pytest.raises(UserError, match="`loss_weight`"):
        read({"messages": [TURNS[0], TURNS[1] | {"loss_weight": 0}]})
    assert read({"messages": [TURNS[0], TURNS[1] | {"loss_weight": 1}]}) == read({"messages": TURNS})


@pytest.mark.parametrize("arguments", [{"a": 2, "b": 3}, '{"a": 2, "b": 3}'])
def test_tools_of_messages_and_sharegpt_are_brought_into_the_form_that_templates_take(arguments):
    call = {"name": "add", "arguments": arguments}
    openai = {
        "messages": [
            {"role": "user", "content": "2 + 3?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
            {"role": "tool", "content": [{"type": "text", "text": "5"}], "tool_call_id": "c1", "name": "add"},
        ],
        "tools": [PLUS],
    }
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "2 + 3?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "5"},
        ],
        "tools": json.dumps([PLUS["function"]]),
    }
    said = []
    for value in (openai, sharegpt):
        row = Row(Path("rows.jsonl"), 7, value)
        said.append(parse(row, choose_format(row, "auto", ColumnsConfig())))
    assert said[0].tools == said[1].tools == (PLUS,)
    assert said[0].turns[1] == Turn("assistant", "", tool_calls=({"id": "c1", **ADD},))
    assert said[0].turns[2] == Turn("tool", "5", name="add", tool_call_id="c1")
    assert said[1].turns[1:] == (Turn("assistant", "", tool_calls=(ADD,)), Turn("tool", "5"))


def test_several_calls_and_calls_beside_a_text_are_one_turn():
    calls = [{"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}] * 2
    assert read(message(role="assistant", content="One moment", tool_calls=calls))[1][1] == Turn(
        "assistant", "One moment", True, (ADD, ADD)
    )


def test_reasoning_beside_the_content_is_kept():
    turn = read(message(role="assistant", content="5", reasoning_content="2 and 3"))[1][1]
    assert turn == Turn("assistant", "5", reasoning="2 and 3")


def test_a_list_of_text_parts_is_their_text():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert read(message(role="assistant", content=parts))[1] == HELLO


def test_nulls_that_a_table_puts_into_arguments_are_refused(tmp_path):
    call = {"function": {"name": "add", "arguments": {"a": 2, "unit": None}}}
    row = Row(Path("rows.parquet"), 7, message(role="assistant", content=None, tool_calls=[call]))
    with pytest.raises(UserError, match="rows.parquet row 7: got `arguments` of `tool_calls` of turn 2 .* with null for 'unit'"):
        parse(row, choose_format(row, "auto", ColumnsConfig()))


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
    ("messages", {}, "write    data.format=auto   (these are the columns of alpaca)"),
])  # fmt: skip
def test_a_mapping_or_format_that_does_not_fit_is_never_ignored(wanted, mapping, said):
    with pytest.raises(UserError) as caught:
        read({"instruction": "Hi", "output": "Hello"}, wanted, **mapping)
    assert said in str(caught.value)


@pytest.mark.parametrize(("value", "said"), [
    (message(role="robot", content="x"), "turn 2 of `messages` with the role 'robot'"),
    (message(role="robot", content="x"), "system, user, assistant, human, gpt"),
    (message(role=["user"], content="x"), "with the role"),
    (message(role="assistant", content=None), "`content` of turn 2 of `messages` is null"),
    (message(role="assistant", content=[{"type": "text"}]), "no `text` of part 1 of `content` of turn 2 of `messages`, only type"),
    (message(role="user", content=[{"type": "text", "text": "x"}, {"type": "image_url"}]), "part 2 of `content` of turn 2 of `messages` of "
     "the type image_url"),
    (message(role="user", content=["x"]), "part 1 of `content` of turn 2 of `messages` = x"),
    (message(role="user", content="\ud83d"), "half a character ('\\ud83d' at character 1)"),
    (message(role="assistant"), "turn 2 of `messages` with the keys role"),
    (message(role="assistant", content="", tool_calls=[{}]), "`tool_calls` of turn 2 of `messages` = {}"),
    (message(role="assistant", tool_calls=[{"function": {"name": "f"}}]), '= {"function": {"name": "f"}}'),
    (message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{oops"}}]), "= {oops, which is no JSON"),
    (message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]), "= [1]"),
    (message(role="user", content="x", tool_calls=[{"name": "f", "arguments": {}}]), "the role user and `tool_calls`"),
    (message(role="assistant", content=None, function_call={"name": "f"}), "`function_call`"),
    (message(role="function_call", content="f(x)"), "`content` of turn 2 of `messages` = f(x), which is no JSON"),
    (message(role="function_call", content="[]"), "without a call"),
    ({**message(role="assistant", content="x"), "tools": "[{]"}, "`tools` = [{], which is no JSON"),
    ({**message(role="assistant", content="x"), "tools": {"name": "f"}}, '`tools` = {"name": "f"}'),
    ({**message(role="assistant", content="x"), "tools": [{"type": "function"}]}, "definition 1 of `tools`"),
    ({"prompt": "Hi", "completion": None}, "`completion` is null"),
    ({"prompt": "Hi", "completion": [{"role": "assistant", "content": "x"}]}, "`completion` is a list"),
    ({"prompt": "Hi", "completion": "Hello", "system": "Be kind"}, "`system` beside a `prompt` that is text"),
    ({"prompt": [], "completion": [{"role": "assistant", "content": "x"}]}, "`prompt` = []"),
    (message(role="assistant", content="x", weight=0.5), "`weight` = 0.5"),
    (message(role="assistant", content="x", train="no"), "`train` = no"),
    (message(role="assistant", content="x", train=1), "`train` = 1"),
    (message(role="assistant", content="x", weight=1, train=False), "`weight` = 1 and `train` = false"),
    ({**message(role="system", content="Be brief"), "system": "Be kind"}, "`system` = Be kind and turn 2 = Be brief"),
    ({"prompt": [{"role": "system", "content": "Be brief"}], "completion": [{"role": "assistant", "content": "x"}], "system": "Be kind"},
     "`system` = Be kind and turn 1 = Be brief"),
    ({**message(role="assistant", content="x"), "weight": 0}, "`weight` = 0 of the whole row"),
    ({"instruction": "x", "output": "y", "weight": 0.5}, "`weight` = 0.5 of the whole row"),
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
    assert "alpaca rows in" in problem.got and "text rows in" in problem.got and "(conversations and documents)" in problem.got


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
