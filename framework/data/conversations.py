"""What a row says: the turns of a conversation, a prompt with its completion, or a document, read from one of six row formats.

    messages    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": [...]}
    sharegpt    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    completion  {"prompt": "Hi", "completion": " Hello"} is plain text; two lists of messages are a conversation with a given start
    alpaca      {"instruction": "Add.", "input": "2 and 3", "output": "5", "system": "...", "history": [["Hi", "Hello"]]}
    text        {"text": "A document."}, or a .txt file
    ids         {"input_ids": [...], "labels": [...]}, tokens already (`ids.py`)

`choose_format` settles the format and the column names once per file; `parse` reads one row with them, `turns` its single turns. All raise
UserError and never guess: a wrong column, role or type names the row, what was found, and the setting to write. Needs neither torch nor a
tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from framework.config.errors import Problem, UserError
from framework.config.schema import ColumnsConfig
from framework.data.files import Row, excerpt
from framework.data.ids import MASKS, read_ids
from framework.data.turns import Completion, Conversation, Pretokenised, Turn, listed, read_tools, read_turn, text_in, wrong

USUAL_COLUMNS = {
    "messages": ColumnsConfig(messages="messages", role="role", content="content", system="system", tools="tools"),
    "sharegpt": ColumnsConfig(messages="conversations", role="from", content="value", system="system", tools="tools"),
    "completion": ColumnsConfig(prompt="prompt", completion="completion", role="role", content="content", system="system", tools="tools"),
    "alpaca": ColumnsConfig(instruction="instruction", input="input", output="output", system="system", history="history"),
    "text": ColumnsConfig(text="text"),
    "ids": ColumnsConfig(input_ids="input_ids", labels="labels", loss_mask="loss_mask"),
}
REQUIRED = {
    "messages": ("messages",),
    "sharegpt": ("messages",),
    "completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
    "ids": ("input_ids",),
}

# Names that other data sets use for the required columns: they make the mapping to write, never a silent choice.
LIKELY_NAMES = {
    "messages": ("messages", "conversations", "conversation", "dialog", "dialogue", "chat", "turns"),
    "prompt": ("prompt",),
    "completion": ("completion",),
    "instruction": ("instruction", "prompt", "question", "query", "problem", "input"),
    "output": ("output", "answer", "response", "completion", "reply", "solution", "target", "chosen"),
    "text": ("text", "content", "document", "body", "article", "passage"),
    "input_ids": ("input_ids", "token_ids", "tokens", "ids"),
}
Kind = Literal["messages", "sharegpt", "completion", "alpaca", "text", "ids"]
Yields = Literal["conversations", "completions", "documents", "ids"]


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """How the rows of one file are read: the format, and a column name for everything that the format knows."""

    kind: Kind
    columns: ColumnsConfig
    yields: Yields = "conversations"
    """What a row becomes; `completion` rows are read as text or as lists of messages, as the first row of the file is."""


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
        return RowFormat(kind="text", columns=USUAL_COLUMNS["text"], yields="documents")
    if mapping == ColumnsConfig() and (problem := _preferences(row)):
        raise UserError(problem)
    kinds = [wanted] if wanted != "auto" else list(USUAL_COLUMNS)
    kind = next((kind for kind in kinds if _fits(row, kind, mapping)), None)
    if kind is None:
        raise UserError(_wrong_columns(row, kinds, mapping))
    columns = _mapped(USUAL_COLUMNS[kind], mapping)
    return _with_turn_keys(RowFormat(kind=kind, columns=columns, yields=_yields(row, kind, columns)), row, mapping)


def parse(row: Row, form: RowFormat) -> Conversation | Completion | Pretokenised | str:
    """The conversation, the completion, the tokens or (for `text`) the document in `row`. Raises UserError that names the row."""
    if isinstance(row.value, str):
        return row.value
    columns = form.columns
    if form.kind == "text":
        return text_in(row, row.value, columns.text, f"`{columns.text}`")
    if form.kind == "ids":
        return read_ids(row, columns)
    _check_weight(row, columns)
    if form.yields == "completions":
        return _completion(row, columns)
    if form.kind == "completion":
        prompt = (replace(turn, trained=False) for turn in _turns(row, columns.prompt, columns))
        turns = _with_system(row, columns, (*prompt, *_turns(row, columns.completion, columns)))
    elif form.kind == "alpaca":
        turns = _alpaca(row, columns)
    else:
        turns = _with_system(row, columns, _turns(row, columns.messages, columns))
    return Conversation(turns, () if columns.tools is None else read_tools(row, columns))


def _yields(row: Row, kind: Kind, columns: ColumnsConfig) -> Yields:
    if kind == "completion":
        is_text = any(isinstance(row.value[column], str) for column in (columns.prompt, columns.completion))
        return "completions" if is_text else "conversations"
    return {"text": "documents", "ids": "ids"}.get(kind, "conversations")


def _completion(row: Row, columns: ColumnsConfig) -> Completion:
    for column in (columns.system, columns.tools):
        if row.value.get(column):
            got = f"`{column}` beside a `{columns.prompt}` that is text, in which it has no place"
            fix = f'"{columns.prompt}": [{{"role": "user", "content": ...}}], "{columns.completion}": [{{"role": "assistant", ...}}]'
            raise wrong(row, got=got, expected="lists of messages, or no such column", fix=fix)
    return Completion(*(text_in(row, row.value, column, f"`{column}`") for column in (columns.prompt, columns.completion)))


def _turns(row: Row, column: str, columns: ColumnsConfig) -> tuple[Turn, ...]:
    entries = row.value.get(column)
    if not isinstance(entries, list) or not entries:
        raise wrong(row, got=f"`{column}` = {excerpt(entries)}", expected="a list of turns with at least one turn")
    return tuple(read_turn(row, entry, f"turn {number} of `{column}`", columns) for number, entry in enumerate(entries, 1))


def _alpaca(row: Row, columns: ColumnsConfig) -> tuple[Turn, ...]:
    turns = list(_system(row, columns))
    history = row.value.get(columns.history) or []
    if not isinstance(history, list):
        raise wrong(row, got=f"`{columns.history}` = {excerpt(history)}", expected='a list of ["question", "answer"]')
    for number, pair in enumerate(history, 1):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise wrong(row, got=f"pair {number} of `{columns.history}` = {excerpt(pair)}", expected='["question", "answer"]')
        turns += [Turn("user", pair[0]), Turn("assistant", pair[1])]
    question = text_in(row, row.value, columns.instruction, f"`{columns.instruction}`")
    if row.value.get(columns.input):
        question += "\n" + text_in(row, row.value, columns.input, f"`{columns.input}`")
    answer = text_in(row, row.value, columns.output, f"`{columns.output}`")
    return (*turns, Turn("user", question), Turn("assistant", answer))


def _system(row: Row, columns: ColumnsConfig) -> tuple[Turn, ...]:
    if not row.value.get(columns.system):
        return ()
    return (Turn("system", text_in(row, row.value, columns.system, f"`{columns.system}`")),)


def _with_system(row: Row, columns: ColumnsConfig, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """`turns` after what the column of the system prompt says; UserError where both have one."""
    system = _system(row, columns)
    number = next((number for number, turn in enumerate(turns, 1) if turn.role == "system"), None)
    if system and number is not None:
        again = excerpt(turns[number - 1].content)
        got = f"two system prompts: `{columns.system}` = {excerpt(system[0].content)} and turn {number} = {again}"
        raise wrong(row, got=got, expected=f"one of them: `{columns.system}`, or a turn with the role system")
    return (*system, *turns)


def _check_weight(row: Row, columns: ColumnsConfig) -> None:
    """Raises UserError for a weight of the whole row, which only turns may have."""
    weight = row.value.get("weight")
    if weight not in (None, "", 1, "1") and "weight" not in vars(columns).values():
        got = f"`weight` = {excerpt(weight)} of the whole row"
        fix = '"weight": 0 in the turns that are not to be trained, or the row taken out (a column that means something else: another name)'
        raise wrong(row, got=got, expected="weights of turns, and of sources in data.train", fix=fix)


def _mapped(usual: ColumnsConfig, mapping: ColumnsConfig) -> ColumnsConfig:
    chosen = {f.name: getattr(mapping, f.name) for f in fields(mapping) if getattr(mapping, f.name) is not None}
    return replace(usual, **{name: value for name, value in chosen.items() if getattr(usual, name) is not None})


def _fits(row: Row, kind: str, mapping: ColumnsConfig) -> bool:
    """Whether all columns that `kind` needs are there, and each one that the user names is, and belongs to it: none is ever ignored."""
    columns = _mapped(USUAL_COLUMNS[kind], mapping)
    needed = all(getattr(columns, name) in row.value for name in REQUIRED[kind])
    named = {f.name: getattr(mapping, f.name) for f in fields(mapping) if getattr(mapping, f.name) is not None}
    known = all(getattr(USUAL_COLUMNS[kind], name) is not None for name in named)
    return needed and known and all(column in row.value for name, column in named.items() if name not in ("role", "content"))


def _with_turn_keys(form: RowFormat, row: Row, mapping: ColumnsConfig) -> RowFormat:
    """Messages and ShareGPT differ in the keys of a turn; the first turn settles them where the mapping does not. Masks have two names."""
    if form.kind == "ids" and mapping.loss_mask is None:
        named = next((name for name in MASKS if name in row.value), form.columns.loss_mask)
        return replace(form, columns=replace(form.columns, loss_mask=named))
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


def _preferences(row: Row) -> Problem | None:
    """Pairs of a better and a worse answer, or answers that were judged: what they say besides would not be trained, silently. A mapping
    of columns says that this is meant."""
    columns = row.value
    expected = "rows with the answer to train on: preferences are not trained; data.columns, where one column of answers is meant"
    if {"chosen", "rejected"} <= columns.keys():
        fix = "rows whose last turn is the chosen answer"
        if isinstance(columns["chosen"], list):
            fix = "data.columns.messages=chosen"
        elif isinstance(columns["chosen"], str):
            fix = f"data.columns.prompt={'prompt' if 'prompt' in columns else 'COLUMN'} data.columns.completion=chosen"
        return Problem(path=row.where, got="preference pairs (the columns `chosen` and `rejected`)", expected=expected, fix=fix)
    answers = next((column for column in ("messages", "conversations", "completion") if column in columns), None)
    if isinstance(columns.get("label"), bool) and answers:
        mapped = "completion" if answers == "completion" else "messages"
        fix = f"the rows whose label is true alone, without that column, or data.columns.{mapped}={answers}"
        return Problem(path=row.where, got="answers that were judged (the column `label` is true or false)", expected=expected, fix=fix)
    return None


def _wrong_columns(row: Row, kinds: list[str], mapping: ColumnsConfig) -> Problem:
    needed = []
    for kind in kinds:
        columns = _mapped(USUAL_COLUMNS[kind], mapping)
        needed.append(f"{kind}: " + ", ".join(getattr(columns, name) for name in REQUIRED[kind]))
    got = f"the columns {listed(row.value)}"
    for name, column in vars(mapping).items():
        if column is not None and all(getattr(USUAL_COLUMNS[kind], name) is None for kind in kinds):
            got += f"; data.columns.{name}={column}, which the format {kinds[0]} does not have"
        elif column is not None and name not in ("role", "content") and column not in row.value:
            got += f"; data.columns.{name}={column}, which is not there"
    expected = f"the columns of a format ({'; '.join(needed)})"
    other = next((kind for kind in USUAL_COLUMNS if _fits(row, kind, mapping)), None)
    fix = _suggested_mapping(row, kinds) if other is None else f"data.format=auto   (these are the columns of {other})"
    return Problem(path=row.where, got=got, expected=expected, fix=fix)


def _suggested_mapping(row: Row, kinds: list[str]) -> str:
    for kind in kinds:
        found = {name: next((c for c in LIKELY_NAMES[name] if c in row.value), None) for name in REQUIRED[kind]}
        if all(found.values()):
            return " ".join(f"data.columns.{name}={column}" for name, column in found.items())
    needed = REQUIRED["alpaca"] if "alpaca" in kinds else REQUIRED[kinds[0]]
    return " ".join(f"data.columns.{name}=COLUMN" for name in needed)
