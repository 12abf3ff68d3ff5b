"""One entry of a list of turns: who speaks, what is said or called, and whether it is trained on.

    {"role": "user", "content": "What is 2 + 3?"}      or "content": [{"type": "text", "text": "What is 2 + 3?"}]
    {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}]}
    {"role": "tool", "name": "add", "content": "5"}
    {"role": "assistant", "reasoning_content": "2 and 3 make 5.", "content": "5", "weight": 1}
    {"role": "assistant", "content": "Sorry, what?", "train": false}      as with "weight": 0
    {"from": "function_call", "value": "{\\"name\\": \\"add\\", \\"arguments\\": {\\"a\\": 2}}"}, {"from": "observation", "value": "5"}

Calls and definitions of tools are brought into the one form that chat templates are written for, the `messages` and `tools` of
transformers' `apply_chat_template`: a definition is wrapped in {"type": "function", "function": ...}, and `arguments` are an object.

Unusual: a table (Parquet, Arrow) gives every object of a column the keys of all others, with nulls. In arguments and definitions, where
such a null would be taught to the model, it is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from framework.config.errors import Problem, UserError
from framework.config.schema import ColumnsConfig
from framework.data.files import TABLES, Row, excerpt, kind_of

Role = Literal["system", "user", "assistant", "tool"]
ROLES: dict[str, Role] = {
    "system": "system", "user": "user", "assistant": "assistant",
    "human": "user", "gpt": "assistant", "chatgpt": "assistant",
    "tool": "tool", "observation": "tool", "function_call": "assistant",
}  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """What one speaker says."""

    role: Role
    content: str
    trained: bool = True
    """False for a turn with `weight` 0 or `train` false. Of the others, `data.train_on` chooses."""
    tool_calls: tuple[dict, ...] = ()
    """Calls of an assistant: {"type": "function", "function": {"name": str, "arguments": dict}}, with "id" where the row has one."""
    name: str | None = None
    """Of the tool whose answer this is."""
    tool_call_id: str | None = None
    reasoning: str | None = None
    """What the assistant thinks before it answers, where the row has it apart from the content (`reasoning_content`)."""


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Turn, ...]
    tools: tuple[dict, ...] = ()
    """Definitions of tools that the assistant may call: {"type": "function", "function": {"name": str, ...}}"""


@dataclass(frozen=True)
class Completion:
    """Plain text, without a chat template, that is to go on as `completion`."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Passage:
    """A document, or a part of a long one."""

    text: str
    begins: bool = True
    goes_on: bool = False
    """The next item is another part of the same document."""

    @property
    def is_whole(self) -> bool:
        return self.begins and not self.goes_on


@dataclass(frozen=True)
class Pretokenised:
    """A sample that is tokens already."""

    ids: list[int]
    trained: list[bool]


def read_turn(row: Row, entry: Any, which: str, columns: ColumnsConfig) -> Turn:
    """The turn `entry`, which messages call `which`. Raises UserError that names the row."""
    name = _role(row, entry, which, columns)
    weight = entry.get("weight")
    if entry.get("loss_weight") not in (None, 1):
        raise wrong(row, got=f"{which} with `loss_weight`", expected="`weight`, 0 (not trained on) or 1", fix='"weight": 0')
    if weight not in (None, 0, 1):
        raise wrong(row, got=f"{which} with `weight` = {excerpt(weight)}", expected="0 (not trained on) or 1")
    train = entry.get("train")
    if not (train is None or isinstance(train, bool)):
        raise wrong(row, got=f"{which} with `train` = {excerpt(train)}", expected="true or false (not trained on)")
    if None not in (weight, train) and weight != train:
        got = f"{which} with `weight` = {excerpt(weight)} and `train` = {excerpt(train)}"
        raise wrong(row, got=got, expected="one of them, or both alike")
    if entry.get("function_call"):
        raise wrong(row, got=f"{which} with `function_call`", expected='`tool_calls`: [{"function": {"name": ..., "arguments": ...}}]')
    content = f"`{columns.content}` of {which}"
    if name == "function_call":
        calls, text = _calls(row, text_in(row, entry, columns.content, content), content), ""
    else:
        calls = _calls(row, entry["tool_calls"], f"`tool_calls` of {which}") if entry.get("tool_calls") else ()
        text = "" if calls and entry.get(columns.content) is None else _content(row, entry, columns.content, content)
    if calls and ROLES[name] != "assistant":
        raise wrong(row, got=f"{which} with the role {name} and `tool_calls`", expected="tool calls of the assistant")
    return Turn(
        ROLES[name],
        text,
        trained=weight != 0 and train is not False,
        tool_calls=calls,
        name=_optional(row, entry, "name", which) if ROLES[name] == "tool" else None,
        tool_call_id=_optional(row, entry, "tool_call_id", which) if ROLES[name] == "tool" else None,
        reasoning=_optional(row, entry, "reasoning_content", which) if ROLES[name] == "assistant" else None,
    )


def read_tools(row: Row, columns: ColumnsConfig) -> tuple[dict, ...]:
    """The definitions in the row's column of tools, a list or its JSON text; none where it is empty or missing."""
    what = f"`{columns.tools}`"
    value = row.value.get(columns.tools)
    value = _parsed(row, value, what) if isinstance(value, str) and value.strip() else value
    if not value:
        return ()
    if not isinstance(value, list):
        raise wrong(row, got=f"{what} = {excerpt(value)}", expected="a list of tool definitions")
    return tuple(_definition(row, entry, f"definition {number} of {what}") for number, entry in enumerate(value, 1))


def text_in(row: Row, holder: dict, key: str, what: str) -> str:
    """The text under `key`, which messages call `what`."""
    if key not in holder:
        raise wrong(row, got=f"no {what}, only {listed(holder)}", expected=f"text in {what}")
    value = holder[key]
    if not isinstance(value, str):
        kind = {type(None): "null", list: "a list", dict: "an object"}.get(type(value), f"a {type(value).__name__}")
        got = f"{what} is {kind}" + (f": {excerpt(value)}" if value is not None else "")
        raise wrong(row, got=got, expected="text")
    return _encodable(row, value, what)


def wrong(row: Row, got: str, expected: str, fix: str = "") -> UserError:
    return UserError(Problem(path=row.where, got=got, expected=expected, fix=fix))


def listed(row: dict) -> str:
    return ", ".join(map(str, row)) or "(none)"


def _role(row: Row, entry: Any, which: str, columns: ColumnsConfig) -> str:
    """The speaker as the row calls it, one of ROLES; the keys that a turn needs are there."""
    if not isinstance(entry, dict):
        raise wrong(row, got=f"{which} = {excerpt(entry)}", expected=f'{{"{columns.role}": ..., "{columns.content}": ...}}')
    for key in (columns.role, columns.content):
        if key not in entry and not (key == columns.content and entry.get("tool_calls")):
            raise wrong(
                row,
                got=f"{which} with the keys {listed(entry)}",
                expected=f"the keys {columns.role}, {columns.content}",
                fix="data.columns.role=KEY data.columns.content=KEY",
            )
    role = entry[columns.role]
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(row, got=f"{which} with the role {excerpt(role)!r}", expected=f"one of {', '.join(ROLES)}")
    return role


def _content(row: Row, entry: dict, key: str, what: str) -> str:
    """Text, or a list of text parts, which are joined as they are."""
    parts = entry[key]
    if not isinstance(parts, list):
        return text_in(row, entry, key, what)
    texts = []
    for number, part in enumerate(parts, 1):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            got = f"part {number} of {what} " + (f"of the type {excerpt(kind)}" if kind is not None else f"= {excerpt(part)}")
            raise wrong(row, got=got, expected='text, or text parts: {"type": "text", "text": ...}')
        texts.append(text_in(row, part, "text", f"`text` of part {number} of {what}"))
    return "".join(texts)


def _calls(row: Row, value: Any, what: str) -> tuple[dict, ...]:
    """One call or a list of them, as objects or as JSON text."""
    value = _parsed(row, value, what) if isinstance(value, str) else value
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise wrong(row, got=f"{what} without a call", expected="at least one")
    return tuple(_call(row, call, what if len(calls) == 1 else f"call {number} of {what}") for number, call in enumerate(calls, 1))


def _call(row: Row, call: Any, what: str) -> dict:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"] and "arguments" in function):
        raise wrong(row, got=f"{what} = {excerpt(call)}", expected='{"name": "...", "arguments": {...}}')
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = _parsed(row, arguments, f"`arguments` of {what}")
    else:
        _without_nulls(row, arguments, f"`arguments` of {what}")
    if not isinstance(arguments, dict):
        raise wrong(row, got=f"`arguments` of {what} = {excerpt(arguments)}", expected="an object, {name: value, ...}")
    call_id = _optional(row, call, "id", what)
    known = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return known if call_id is None else {"id": call_id, **known}


def _definition(row: Row, entry: Any, what: str) -> dict:
    function = entry.get("function", entry) if isinstance(entry, dict) else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]):
        expected = '{"type": "function", "function": {"name": "...", "description": "...", "parameters": {...}}}'
        raise wrong(row, got=f"{what} = {excerpt(entry)}", expected=expected)
    _without_nulls(row, function, what)
    return {"type": "function", "function": function}


def _optional(row: Row, entry: dict, key: str, which: str) -> str | None:
    return None if entry.get(key) is None else text_in(row, entry, key, f"`{key}` of {which}")


def _parsed(row: Row, text: str, what: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(row, got=f"{what} = {excerpt(text)}, which is no JSON ({error})", expected="JSON") from error
    _encodable(row, json.dumps(value, ensure_ascii=False), what)
    return value


def _without_nulls(row: Row, value: Any, what: str) -> None:
    if kind_of(row.file) in TABLES and (key := _null_in(value)) is not None:
        expected = "JSON text where a table holds objects with different keys: it fills up the missing ones with nulls"
        raise wrong(
            row, got=f"{what} with null for {key!r}", expected=expected, fix="json.dumps(...) of the column before the table is made"
        )


def _null_in(value: Any) -> str | None:
    """The key of a null at any depth."""
    if isinstance(value, list):
        return next((key for item in value if (key := _null_in(item)) is not None), None)
    if not isinstance(value, dict):
        return None
    return next((found for key, item in value.items() if (found := key if item is None else _null_in(item)) is not None), None)


def _encodable(row: Row, text: str, what: str) -> str:
    """`text`, which no tokenizer could read with half of a surrogate pair in it: JSON can write that ("\\ud83d")."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!a} at character {error.start + 1}"
        raise wrong(row, got=f"{what} with half a character ({half})", expected="whole characters: \\ud83d\\ude00 is one") from error
    return text
