"""What a chat template does with tools: definitions, calls, and answers of tools, put through it as at inference.

Templates differ in what they take. `ToolTemplate` tries out on a small conversation, once and only when a row has tools, whether
definitions are written at all and whether the arguments of a call have to be an object (as transformers documents it) or JSON text (as
the templates of DeepSeek want it, which raise for an object). A template that leaves something out is refused, never trained on.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from framework.config.errors import Problem, UserError
from framework.data.files import excerpt
from framework.data.turns import Conversation, Turn

NAME, KEY, CALL_ID = "probe_weather", "probe_town", "callprobe"  # Mistral's templates demand ids of nine characters
DEFINITION = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {KEY: {"type": "string", "description": "Where."}}, "required": [KEY]},
    },
}
CALL = {"id": CALL_ID, "type": "function", "function": {"name": NAME, "arguments": {KEY: "Rome"}}}
QUESTION = Turn("user", "Yes?")
DIALOGUE = (
    QUESTION,
    Turn("assistant", "", tool_calls=(CALL,)),
    Turn("tool", "sun", name=NAME, tool_call_id=CALL_ID),
    Turn("assistant", "Yes."),
)


class ToolTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def apply(self, where: str, conversation: Conversation, *, prompt: bool = False) -> str:
        """`conversation` as text, with `prompt` ready for the next answer. UserError names `where`."""
        turns = conversation.turns
        as_text = any(turn.tool_calls for turn in turns) and self._arguments_as_text
        return self._apply(where, conversation, prompt=prompt, as_text=as_text)

    def check(self, where: str, conversation: Conversation) -> None:
        """Raises UserError where the conversation has tools and the template does not write them."""
        if conversation.tools and not self._takes_definitions:
            fix = "model.chat_template=/path/to/template.jinja, or rows without `tools`"
            got = f"{len(conversation.tools)} tools, which the chat template leaves out"
            raise UserError(Problem(path=where, got=got, expected="a chat template that writes `tools`, as Qwen3's does", fix=fix))

    @cached_property
    def _takes_definitions(self) -> bool:
        return NAME in self._apply("model.chat_template", Conversation((QUESTION,), (DEFINITION,)), prompt=True, as_text=False)

    @cached_property
    def _arguments_as_text(self) -> bool:
        example = Conversation(DIALOGUE, (DEFINITION,))
        try:
            self._apply("model.chat_template", example, prompt=False, as_text=False)
            return False
        except UserError:
            pass  # as JSON text, perhaps
        try:
            return KEY in self._apply("model.chat_template", example, prompt=False, as_text=True)
        except UserError:
            return False  # it takes neither, and will say so about the row

    def _apply(self, where: str, conversation: Conversation, *, prompt: bool, as_text: bool) -> str:
        messages = [message(turn, arguments_as_text=as_text) for turn in conversation.turns]
        tools = list(conversation.tools) or None
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template is the user's program: whatever it raises is what is wrong with it
            roles = ", ".join(turn.role + " (tool calls)" * bool(turn.tool_calls) for turn in conversation.turns)
            got = f"turns that the chat template refuses ({error}); their roles: {roles}"
            raise UserError(Problem(path=where, got=got, expected="an order of roles that the template accepts")) from error


def message(turn: Turn, *, arguments_as_text: bool = False) -> dict[str, Any]:
    """A turn as chat templates take it."""
    found: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_calls:
        found["tool_calls"] = [_with_text(call) for call in turn.tool_calls] if arguments_as_text else list(turn.tool_calls)
    if turn.reasoning is not None:
        found["reasoning_content"] = turn.reasoning
    if turn.name is not None:
        found["name"] = turn.name
    if turn.tool_call_id is not None:
        found["tool_call_id"] = turn.tool_call_id
    return found


def written_calls(turn: Turn, rendered: str) -> str | None:
    """None where `rendered` holds the turn's text and all calls in their order, with all arguments; else what is missing."""
    if turn.content.strip() not in rendered:
        return "the text"
    at = 0
    for number, call in enumerate(turn.tool_calls, 1):
        function = call["function"]
        found = rendered.find(function["name"], at)
        if found < 0:
            return f"call {number} ({function['name']})"
        at = found + len(function["name"])
        for key, value in function["arguments"].items():
            if not (_stands_in(rendered, key, at) and _stands_in(rendered, value, at)):
                return f"argument {key} ({excerpt(value)}) of call {number}"
    return None


def _stands_in(text: str, value: Any, start: int) -> bool:
    """Whether `value`, where it is text or a number, stands in `text`, as it is or as JSON writes it."""
    if isinstance(value, bool | list | dict) or value is None:
        return True  # written in ways that differ in spaces and case
    spellings = (
        (str(value), json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]) if isinstance(value, str) else (str(value),)
    )
    return any(text.find(spelling, start) >= 0 for spelling in spellings)


def _with_text(call: dict) -> dict:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
