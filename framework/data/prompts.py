"""What a model is asked while it trains: `eval.prompts` to token ids, as training has seen them (P8).

A file of data has answers of its own; the model is asked for the last one of each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config.errors import Problem, UserError
from framework.config.schema import DataConfig
from framework.data.files import find_files
from framework.data.sources import Faults, Item, Wanted
from framework.data.tool_template import ToolTemplate
from framework.data.turns import Completion, Conversation, Passage, Turn

SETTING = "eval.prompts"
Question = str | Conversation | Completion
MOST_PROMPTS = 100


@dataclass(frozen=True)
class Prompt:
    text: str
    """What a person reads: of a conversation its last turn."""
    ids: list[int]


def read_prompts(prompts: str | list[str]) -> list[Question]:
    """The texts of a list or of the lines of a `.txt` file; or what the rows of another file say. Raises UserError."""
    if isinstance(prompts, list):
        found: list[Question] = list(prompts)
    elif (files := find_files(prompts, SETTING))[0].suffix.lower() == ".txt":
        found = [line.strip() for file in files for line in _lines(file) if line.strip()]
    else:
        faults = Faults()
        rows = Wanted(setting=SETTING, path=prompts, config=DataConfig(), max_rows=MOST_PROMPTS + 1).open().items(faults)
        found = [_question(item) for _, item in rows]
        if faults.count:
            raise UserError(*faults.listed(SETTING))
    if not 0 < len(found) <= MOST_PROMPTS:
        got = f"more than {MOST_PROMPTS} prompts" if found else "no prompt"
        raise UserError(Problem(path=SETTING, got=f"{got} in {prompts}", expected=f"1 to {MOST_PROMPTS}: each is answered every time"))
    return found


def peek_prompts(prompts: str | list[str] | None) -> list[Problem]:
    """What is wrong with them, without a tokenizer."""
    try:
        if prompts is not None:
            read_prompts(prompts)
    except UserError as error:
        return list(error.problems)
    return []


def encode_prompts(found: list[Question], tokenizer: Any, *, as_turns: bool, longest: int) -> list[Prompt]:
    """`as_turns`: a plain text is what a user says, through the chat template. Raises UserError for one of `longest` tokens or more."""
    template, encoded, problems = ToolTemplate(tokenizer), [], []
    for number, item in enumerate(found, start=1):
        if isinstance(item, str) and as_turns:
            item = Conversation((Turn("user", item),))
        if isinstance(item, Conversation):
            text, where = item.turns[-1].content, f"{SETTING}: number {number}"
            template.check(where, item)
            ids = tokenizer(template.apply(where, item, prompt=True), add_special_tokens=False)["input_ids"]
        else:
            text = item.prompt if isinstance(item, Completion) else item
            ids = tokenizer(text)["input_ids"]
        encoded.append(Prompt(text, ids))
        if not 0 < len(ids) < longest:
            expected = f"1 to {longest - 1:,}: the model reads at most {longest:,}"
            problems.append(Problem(path=SETTING, got=f"number {number}, of {len(ids):,} tokens", expected=expected))
    if problems:
        raise UserError(*problems)
    return encoded


def _question(item: Item) -> Question:
    """A row without the answer that is asked for, and what follows it."""
    if isinstance(item, Passage) and item.is_whole:
        return item.text
    if isinstance(item, Completion):
        return item
    if not isinstance(item, Conversation):
        raise UserError(Problem(path=SETTING, got="a long document or a row of tokens", expected="conversations or short texts"))
    answers = [index for index, turn in enumerate(item.turns) if turn.role == "assistant"]
    turns = item.turns[: answers[-1]] if answers else item.turns
    if not turns:
        raise UserError(Problem(path=SETTING, got="a conversation that starts with its only answer", expected="a turn to answer"))
    return Conversation(turns, item.tools)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Problem(path=SETTING, got=f"{file} ({error})", expected="a readable text file in UTF-8")) from error
