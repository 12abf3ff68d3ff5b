"""What a row says: the turns of a conversation, or a document, read from one of the four row formats.

    messages   {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    sharegpt   {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    alpaca     {"instruction": "Add.", "input": "2 and 3", "output": "5", "system": "...", "history": [["Hi", "Hello"]]}
    text       {"text": "A document."}, or a .txt file

`choose_format` settles the format and the column names once per file; `parse` reads one row with them. Both raise UserError and never
guess: a wrong column, role or type names the row, what was found, and the setting to write. Needs neither torch nor a tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from framework.config.errors import Problem, UserError
from framework.config.schema import ColumnsConfig
from framework.data.files import Row, excerpt

Role = Literal["system", "user", "assistant"]
ROLES: dict[str, Role] = {
    "system": "system", "user": "user", "assistant": "assistant",
    "human": "user", "gpt": "assistant", "chatgpt": "assistant",
}  # fmt: skip

USUAL_COLUMNS = {
    "messages": ColumnsConfig(messages="messages", role="role", content="content", system="system"),
    "sharegpt": ColumnsConfig(messages="conversations", role="from", content="value", system="system"),
    "alpaca": ColumnsConfig(instruction="instruction", input="input", output="output", system="system", history="history"),
    "text": ColumnsConfig(text="text"),
}
REQUIRED = {"messages": ("messages",), "sharegpt": ("messages",), "alpaca": ("instruction", "output"), "text": ("text",)}

# Names that other data sets use for the required columns: they make the mapping to write, never a silent choice.
LIKELY_NAMES = {
    "messages": ("messages", "conversations", "conversation", "dialog", "dialogue", "chat", "turns"),
    "instruction": ("instruction", "prompt", "question", "query", "problem", "input"),
    "output": ("output", "answer", "response", "completion", "reply", "solution", "target", "chosen"),
    "text": ("text", "content", "document", "body", "article", "passage"),
}


@dataclass(frozen=True)
class Turn:
    """What one speaker says. `trained` is False for an assistant turn of weight 0."""

    role: Role
    content: str
    trained: bool = True


Conversation = tuple[Turn, ...]


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """How the rows of one file are read: the format, and a column name for everything that the format knows."""

    kind: Literal["messages", "sharegpt", "alpaca", "text"]
    columns: ColumnsConfig


def choose_format(row: Row, wanted: str, mapping: ColumnsConfig) -> RowFormat:
    """The format of a file whose first row is `row`; `wanted` is `data.format`, `mapping` is `data.columns`.

    A partial mapping keeps the format's usual names for the rest. Raises UserError that lists the columns found, those needed and the
    mapping to write.
    """
    if isinstance(row.value, str):
        if wanted not in ("auto", "text"):
            problem = Problem(
                path="data.format", got=f"{wanted} for {row.file.name}", expected="text for a .txt file", fix="data.format=text"
            )
            raise UserError(problem)
        return RowFormat(kind="text", columns=USUAL_COLUMNS["text"])
    kinds = [wanted] if wanted != "auto" else ["messages", "sharegpt", "alpaca", "text"]
    for kind in kinds:
        columns = _mapped(USUAL_COLUMNS[kind], mapping)
        if all(getattr(columns, needed) in row.value for needed in REQUIRED[kind]) and _mapping_fits(row, kind, mapping):
            return _with_turn_keys(RowFormat(kind=kind, columns=columns), row, mapping)
    raise UserError(_wrong_columns(row, kinds, mapping))


def parse(row: Row, form: RowFormat) -> Conversation | str:
    """The conversation (or, for `text`, the document) in `row`. Raises UserError that names the row."""
    if isinstance(row.value, str):
        return row.value
    if form.kind == "text":
        return _text(row, row.value, form.columns.text, f"`{form.columns.text}`")
    return _alpaca(row, form.columns) if form.kind == "alpaca" else _turns(row, form.columns)


def _turns(row: Row, columns: ColumnsConfig) -> Conversation:
    entries = row.value.get(columns.messages)
    if not isinstance(entries, list) or not entries:
        raise _wrong(row, got=f"`{columns.messages}` = {excerpt(entries)}", expected="a list of turns with at least one turn")
    turns = [_turn(row, entry, f"turn {number} of `{columns.messages}`", columns) for number, entry in enumerate(entries, 1)]
    return (*_system(row, columns), *turns)


def _turn(row: Row, entry: Any, which: str, columns: ColumnsConfig) -> Turn:
    if not isinstance(entry, dict):
        raise _wrong(row, got=f"{which} = {excerpt(entry)}", expected=f'{{"{columns.role}": ..., "{columns.content}": ...}}')
    for key in (columns.role, columns.content):
        if key not in entry:
            raise _wrong(
                row,
                got=f"{which} with the keys {_listed(entry)}",
                expected=f"the keys {columns.role}, {columns.content}",
                fix="data.columns.role=KEY data.columns.content=KEY",
            )
    if entry.get("tool_calls"):
        raise _wrong(row, got=f"{which} with `tool_calls`", expected="plain text turns (tool calls cannot be trained on)")
    role = entry[columns.role]
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(row, got=f"{which} with the role {excerpt(role)!r}", expected=f"one of {', '.join(ROLES)}")
    weight = entry.get("weight")
    if weight not in (None, 0, 1):
        raise _wrong(row, got=f"{which} with `weight` = {excerpt(weight)}", expected="0 (not trained on) or 1")
    return Turn(ROLES[role], _text(row, entry, columns.content, f"`{columns.content}` of {which}"), trained=weight != 0)


def _alpaca(row: Row, columns: ColumnsConfig) -> Conversation:
    turns = list(_system(row, columns))
    history = row.value.get(columns.history) or []
    if not isinstance(history, list):
        raise _wrong(row, got=f"`{columns.history}` = {excerpt(history)}", expected='a list of ["question", "answer"]')
    for number, pair in enumerate(history, 1):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise _wrong(row, got=f"pair {number} of `{columns.history}` = {excerpt(pair)}", expected='["question", "answer"]')
        turns += [Turn("user", pair[0]), Turn("assistant", pair[1])]
    question = _text(row, row.value, columns.instruction, f"`{columns.instruction}`")
    if row.value.get(columns.input):
        question += "\n" + _text(row, row.value, columns.input, f"`{columns.input}`")
    answer = _text(row, row.value, columns.output, f"`{columns.output}`")
    return (*turns, Turn("user", question), Turn("assistant", answer))


def _system(row: Row, columns: ColumnsConfig) -> Conversation:
    if not row.value.get(columns.system):
        return ()
    return (Turn("system", _text(row, row.value, columns.system, f"`{columns.system}`")),)


def _wrong(row: Row, got: str, expected: str, fix: str = "") -> UserError:
    return UserError(Problem(path=row.where, got=got, expected=expected, fix=fix))


def _text(row: Row, holder: dict, key: str, what: str) -> str:
    if key not in holder:
        raise _wrong(row, got=f"no {what}; the row has {_listed(holder)}", expected=f"text in {what}")
    value = holder[key]
    if not isinstance(value, str):
        kind = {type(None): "null", list: "a list", dict: "an object"}.get(type(value), f"a {type(value).__name__}")
        got = f"{what} is {kind}" + (f": {excerpt(value)}" if value is not None else "")
        raise _wrong(row, got=got, expected="text")
    return value


def _mapped(usual: ColumnsConfig, mapping: ColumnsConfig) -> ColumnsConfig:
    chosen = {f.name: getattr(mapping, f.name) for f in fields(mapping) if getattr(mapping, f.name) is not None}
    return replace(usual, **{name: value for name, value in chosen.items() if getattr(usual, name) is not None})


def _mapping_fits(row: Row, kind: str, mapping: ColumnsConfig) -> bool:
    """Whether every column that the user names belongs to `kind` and is there: a mapping is never ignored."""
    named = {f.name: getattr(mapping, f.name) for f in fields(mapping) if getattr(mapping, f.name) is not None}
    known = all(getattr(USUAL_COLUMNS[kind], name) is not None for name in named)
    return known and all(column in row.value for name, column in named.items() if name not in ("role", "content"))


def _with_turn_keys(form: RowFormat, row: Row, mapping: ColumnsConfig) -> RowFormat:
    """Messages and ShareGPT differ in the keys of a turn; the first turn settles them where the mapping does not."""
    if form.kind not in ("messages", "sharegpt"):
        return form
    turns = row.value[form.columns.messages]
    first = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], dict) else {}
    for kind in (form.kind, "messages", "sharegpt"):
        usual = USUAL_COLUMNS[kind]
        columns = replace(form.columns, role=mapping.role or usual.role, content=mapping.content or usual.content)
        if columns.role in first and columns.content in first:
            return RowFormat(kind=kind, columns=columns)
    return form


def _wrong_columns(row: Row, kinds: list[str], mapping: ColumnsConfig) -> Problem:
    needed = []
    for kind in kinds:
        columns = _mapped(USUAL_COLUMNS[kind], mapping)
        needed.append(f"{kind}: " + ", ".join(getattr(columns, name) for name in REQUIRED[kind]))
    got = f"the columns {_listed(row.value)}"
    for name, column in vars(mapping).items():
        if column is not None and all(getattr(USUAL_COLUMNS[kind], name) is None for kind in kinds):
            got += f"; data.columns.{name}={column}, which the format {kinds[0]} does not have"
        elif column is not None and name not in ("role", "content") and column not in row.value:
            got += f"; data.columns.{name}={column}, which is not there"
    expected = f"the columns of a format ({'; '.join(needed)})"
    return Problem(path=row.where, got=got, expected=expected, fix=_suggested_mapping(row, kinds))


def _suggested_mapping(row: Row, kinds: list[str]) -> str:
    for kind in kinds:
        found = {name: next((c for c in LIKELY_NAMES[name] if c in row.value), None) for name in REQUIRED[kind]}
        if all(found.values()):
            return " ".join(f"data.columns.{name}={column}" for name, column in found.items())
    needed = REQUIRED["alpaca"] if "alpaca" in kinds else REQUIRED[kinds[0]]
    return " ".join(f"data.columns.{name}=COLUMN" for name in needed)


def _listed(row: dict) -> str:
    return ", ".join(map(str, row)) or "(none)"
