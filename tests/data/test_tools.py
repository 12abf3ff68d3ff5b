"""Conversations with tools: calls are trained to their exact end, and a template that leaves out anything of them is refused."""

from __future__ import annotations

import dataclasses

import pytest

from framework.config.errors import UserError
from framework.data.template import ChatEncoder
from framework.data.tool_template import message
from framework.data.turns import Conversation, Turn
from tests.data.templates import CHATML, HEEDLESS, TOOLS, TOOLS_TEXT


def call(name="add", **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


DEFINITIONS = ({"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}},)
ASK, ANSWER = Turn("user", "what is 2 and 3?"), Turn("assistant", "5")
ONE_CALL = (ASK, Turn("assistant", "", tool_calls=(call(a=2, b=3),)), Turn("tool", "5"), ANSWER)
TWO_CALLS = (ASK, Turn("assistant", "One moment.", tool_calls=(call(a=2), call(b=3))), Turn("tool", "2"), Turn("tool", "3"), ANSWER)
LAST = ONE_CALL[:2]
CALL_AFTER_CALL = (*ONE_CALL[:3], Turn("assistant", "", tool_calls=(call(a=5, b=0),)), Turn("tool", "5"), ANSWER, ASK, ANSWER)
NOT_ANSWERED = (ASK, ONE_CALL[1], Turn("assistant", "wait"), Turn("user", "0"), ANSWER)
AWKWARD = (ASK, Turn("assistant", "", tool_calls=(call(text="5</call><|im_end|>\\n<|eot|> 5"),)), Turn("tool", "5"), ANSWER)

CONVERSATIONS = {
    "one call": ONE_CALL,
    "two calls": TWO_CALLS,
    "a call at the end": LAST,
    "a call after a call": CALL_AFTER_CALL,
    "an answer after a call": NOT_ANSWERED,
    "a call with the texts of stop tokens": AWKWARD,
}


def encode(tokenizer, turns, tools=DEFINITIONS, train_on="assistant"):
    (result,) = ChatEncoder(tokenizer, train_on).encode([("rows.jsonl:7", Conversation(turns, tools))])
    if isinstance(result, UserError):
        raise result
    return result


@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize(("template", "as_text"), [(TOOLS, False), (TOOLS_TEXT, True)], ids=["object", "text"])
def test_p5_p8_calls_are_trained_to_their_stop_token_with_the_ids_of_inference(tokenizer_with, template, as_text, turns):
    """Whether the template takes arguments as an object or as JSON text."""
    tokenizer = tokenizer_with(template)
    encoded = encode(tokenizer, turns)
    messages = [message(turn, arguments_as_text=as_text) for turn in turns]

    def template_ids(upto: int, prompt: bool) -> list[int]:
        tools = list(DEFINITIONS)
        return list(tokenizer.apply_chat_template(messages[:upto], tools=tools, add_generation_prompt=prompt, return_dict=False))

    assert encoded.ids.tolist() == template_ids(len(messages), False)
    expected = [False] * len(encoded.ids)
    for index, turn in enumerate(turns):
        if turn.role == "assistant":
            start = len(template_ids(index, True))
            end = len(template_ids(index + 1, False)) - (template is TOOLS)  # a line end after the stop token
            expected[start:end] = [True] * (end - start)
    assert encoded.trained.tolist() == expected
    assert tokenizer.decode(list(encoded.stops)) == ("<|eot|>" if as_text else "<|im_end|>")


def test_p7_a_call_of_weight_0_is_not_trained(tokenizer_with):
    muted = (ASK, Turn("assistant", "", trained=False, tool_calls=(call(a=2, b=3),)), *ONE_CALL[2:])
    tokenizer = tokenizer_with(TOOLS)
    assert encode(tokenizer, muted).ids.tolist() == encode(tokenizer, ONE_CALL).ids.tolist()
    assert tokenizer.decode(encode(tokenizer, muted).ids[encode(tokenizer, muted).trained]) == "5<|im_end|>"


def test_a_row_without_tools_needs_no_template_for_them(chatml):
    assert encode(chatml, (ASK, ANSWER), tools=()).trained.any()


STOP = "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
UNCLOSED = TOOLS.replace(STOP, "{{ '\n' if m.tool_calls else '<|im_end|>\n' }}{% endif %}{% endfor %}")


@pytest.mark.parametrize(("template", "turns", "tools", "said"), [
    (CHATML, (ASK, ANSWER), DEFINITIONS, "1 tools, which the chat template leaves out"),
    (CHATML, ONE_CALL, (), "leaves out call 1 (add) of turn 2: it became ''"),
    (TOOLS.replace("+ c.function.arguments | tojson", ""), ONE_CALL, (), "leaves out argument a (2) of call 1 of turn 2"),
    (TOOLS.replace("+ m.content }}", "+ ('' if m.tool_calls else m.content) }}"), TWO_CALLS, (), "leaves out the text of turn 2"),
    (HEEDLESS, (*LAST[:1], ANSWER, Turn("tool", "18"), ANSWER), (), "leaves out or changes turn 3 (tool: '18')"),
    (UNCLOSED, LAST, (), "ends the tool calls of turn 2 with"),
    ("{{ 1 // 0 if messages[1].tool_calls }}" + TOOLS, ONE_CALL, (), "user, assistant (tool calls), tool, assistant"),
])  # fmt: skip
def test_what_a_template_leaves_out_is_refused_with_the_row(tokenizer_with, template, turns, tools, said):
    with pytest.raises(UserError, match="rows.jsonl:7") as caught:
        encode(tokenizer_with(template), turns, tools)
    assert said in str(caught.value)


@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_a_call_that_is_context_only_may_not_be_left_out_either(tokenizer_with, train_on):
    """Though its name stands in the definitions of tools, which the template writes."""
    turns = (ASK, dataclasses.replace(ONE_CALL[1], trained=False), *ONE_CALL[2:])
    assert encode(tokenizer_with(TOOLS), turns, train_on=train_on).trained.any()
    with pytest.raises(UserError, match=r"rows.jsonl:7: got a chat template that leaves out the tool calls of turn 2"):
        encode(tokenizer_with(TOOLS.replace("m.tool_calls or []", "[]")), turns, train_on=train_on)


def test_an_answer_of_a_tool_may_be_written_as_json_text(tokenizer_with):
    tokenizer = tokenizer_with(TOOLS.replace("+ m.content + '</result>'", "+ m.content | tojson + '</result>'"))
    assert encode(tokenizer, (*LAST, Turn("tool", 'sunny "today"\n'), ANSWER)).trained.any()
