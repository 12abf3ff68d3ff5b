"""Turns to tokens: the whole conversation through the tokenizer's own chat template, and which of its tokens are trained.

    text     <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n Hello <|im_end|> \\n
    trained  .          . .  .          .  .            .         .  1     1          .

A conversation is rendered once and tokenised once. An assistant turn is trained from the first token after the prompt that inference
would give for it (the template over the turns before, with `add_generation_prompt`) to its stop token, the special token that
follows the answer. That prompt must be a prefix of the conversation, in text and in tokens, so training sees exactly the ids of inference.

Unusual: nothing is assumed about any template. One for which this does not hold (it rewrites an answer, writes no stop token, refuses
the order of roles, leaves out a turn, glues prompt and answer into one token) is refused with the row and the place where it fails. So two
turns of one role in a row are legal wherever the template writes both of them.

[Note: tool calls] How a template writes a call is its own affair, so that the end of such a turn cannot be found by looking for a text.
It is the last stop token before the content of the next turn, and where that begins is seen by rendering the conversation once more
with another content there. Which token stops a turn is learnt from a plain answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from framework.config.errors import Problem, UserError
from framework.config.schema import TrainOn
from framework.data.files import excerpt
from framework.data.tool_template import ToolTemplate, written_calls
from framework.data.turns import ROLES, Conversation, Turn

SETTING = "model.chat_template"
PROBE = (Turn("user", "Yes?"), Turn("assistant", "Yes."))
TEMPLATE_FIX = "model.chat_template=/path/to/template.jinja"
STOP_EXPECTED = "a stop token after each assistant turn, for the model to learn where to stop"
CALLS_FIX = f"{TEMPLATE_FIX}   that writes `tool_calls`"
STOP_FIX = f"{TEMPLATE_FIX}   with {{{{ eos_token }}}} after the assistant's text"


@dataclass(frozen=True, eq=False)
class Encoded:
    """One row in tokens."""

    ids: np.ndarray
    """[tokens] int32"""
    trained: np.ndarray
    """[tokens] bool: is this token a target of the loss? Never the first one, which nothing predicts."""
    stops: tuple[int, ...]
    """Tokens that end a trained answer (for a document, its separator)."""
    more: bool = False
    """These are not all tokens of the row: the next ones follow."""


@dataclass(frozen=True)
class _Rendered:
    """A conversation in text, with prompts of assistant turns (by index in `turns`)."""

    where: str
    turns: tuple[Turn, ...]
    text: str
    prompts: dict[int, str]
    """Of the answers that have to be found."""
    ends: dict[int, int]
    """By which character of `text` a turn with tool calls has ended."""

    @property
    def texts(self) -> list[str]:
        return [self.text, *self.prompts.values()]


class ChatEncoder:
    """Encodes conversations with one tokenizer. Raises UserError at once for a tokenizer that cannot do it."""

    def __init__(self, tokenizer: Any, train_on: TrainOn = "assistant") -> None:
        if not tokenizer.chat_template:
            raise _wrong(SETTING, "a tokenizer without a chat template", "a template to train on conversations", TEMPLATE_FIX)
        if not tokenizer.is_fast:
            raise _wrong("model.tokenizer", type(tokenizer).__name__, "a fast tokenizer (tokenizer.json)")
        self.tokenizer, self.tools, self.train_on = tokenizer, ToolTemplate(tokenizer), train_on
        marked = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = np.array(sorted(marked | set(tokenizer.all_special_ids)), dtype=np.int32)
        self._check_template()

    def encode(self, conversations: list[tuple[str, Conversation]]) -> list[Encoded | UserError]:
        """Each (place of the row, conversation) in tokens, or what is wrong with it; one call of the tokenizer for all."""
        rendered = [_caught(self._render, where, conversation) for where, conversation in conversations]
        texts = [text for one in rendered if isinstance(one, _Rendered) for text in one.texts]
        batch = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False) if texts else None
        results: list[Encoded | UserError] = []
        at = 0
        for one in rendered:
            if isinstance(one, UserError):
                results.append(one)
                continue
            ids = [np.array(batch["input_ids"][i], dtype=np.int32) for i in range(at, at + len(one.texts))]
            spans = np.array(batch["offset_mapping"][at], dtype=np.int64).reshape(-1, 2)
            results.append(_caught(self._mark, one, ids[0], spans, ids[1:]))
            at += len(one.texts)
        return results

    def _check_template(self) -> None:
        """Raises UserError for what no row could make good. What the template says to rows alone (their roles, say) is left to them."""
        from jinja2 import TemplateSyntaxError, UndefinedError

        question, answer = Conversation(PROBE[:1]), PROBE[1].content
        try:
            text = self._apply(SETTING, Conversation(PROBE))
        except UserError as error:
            cause = error.__cause__
            if not isinstance(cause, TemplateSyntaxError | UndefinedError):
                return
            got = f"a template that fails on a question and its answer ({cause}{_line_of(cause)})"
            raise _wrong(SETTING, got, "a Jinja template that writes `messages`", TEMPLATE_FIX) from error
        try:
            bare, prompt = (self._apply(SETTING, question, prompt=prompt) for prompt in (False, True))
        except UserError:
            return
        start, at = _common_prefix(text, bare), text.rfind(answer)
        if at < start:
            return
        batch = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = np.array(batch["offset_mapping"]).reshape(-1, 2)[np.isin(batch["input_ids"], self.special_ids)]
        special = spans[:, 0].tolist()
        if not any(place >= at + len(answer) for place in special):
            got = f"a template with no special token after an answer, which it writes as {excerpt(text[start:])!r}"
            raise _wrong(SETTING, got, STOP_EXPECTED, STOP_FIX)
        if self.train_on != "all" and prompt == bare == text[:start] and text[start:at].strip():  # of special tokens or of plain text
            got = f"a template without a generation prompt, from which the model would learn to write {excerpt(text[start:at])!r}"
            fix = f"{TEMPLATE_FIX}   that ends with {{% if add_generation_prompt %}}...{{% endif %}}: what stands before each answer"
            raise _wrong(SETTING, got, "a template with `add_generation_prompt`, as inference uses it", fix)

    def _render(self, where: str, conversation: Conversation) -> _Rendered:
        """Text of the conversation and of the prompt of each answer to be found, which must be a prefix of it."""
        turns = conversation.turns
        self.tools.check(where, conversation)
        text = self._apply(where, conversation)
        self._check_complete(where, conversation, text)
        prompts: dict[int, str] = {}
        for index in self._answers(where, turns):
            if index == 0:
                raise _wrong(where, "a conversation that starts with the assistant", "a turn for it to answer")
            before = replace(conversation, turns=turns[:index])
            prompt = prompts[index] = self._apply(where, before, prompt=True)
            if not text.startswith(prompt):
                at = _common_prefix(text, prompt)
                got = (
                    f"a chat template whose prompt for turn {index + 1} is not how the conversation goes on: the prompt has "
                    f"{excerpt(prompt[at:])!r} where the conversation has {excerpt(text[at:])!r}{_same_role(turns, index)}"
                )
                raise _wrong(where, got, "template(turns before, add_generation_prompt=True) to be a prefix of template(all turns)")
        for index, turn in enumerate(turns):
            if turn.tool_calls and index not in prompts and not self._is_written(where, conversation, index, text):
                raise _wrong(where, f"a chat template that leaves out the tool calls of turn {index + 1}", "every call", CALLS_FIX)
        called = [index for index in prompts if turns[index].tool_calls]
        ends = {index: self._end(where, conversation, index, text, prompts) for index in called}
        return _Rendered(where, turns, text, prompts, ends)

    def _answers(self, where: str, turns: tuple[Turn, ...]) -> list[int]:
        """Assistant turns whose place in the tokens must be known: those that are trained; where all turns are, those that are not, too."""
        answers = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
        if self.train_on == "all":
            for index, turn in enumerate(turns):
                if not turn.trained and turn.role != "assistant":
                    got = f"turn {index + 1} of the role {turn.role} with weight 0 and data.train_on=all"
                    raise _wrong(where, got, "weights of the assistant's turns only, or another data.train_on")
            return answers
        return [index for index in (answers[-1:] if self.train_on == "last" else answers) if turns[index].trained]

    def _end(self, where: str, conversation: Conversation, index: int, text: str, prompts: dict[int, str]) -> int:
        """The character of `text` where what follows turn `index` has begun: [Note: tool calls]."""
        turns, following = conversation.turns, index + 1
        if following == len(turns):
            return len(text)
        if following in prompts:
            return len(prompts[following])
        return _common_prefix(text, self._apply(where, _changed(conversation, following, content=True)))

    def _check_complete(self, where: str, conversation: Conversation, text: str) -> None:
        """Every turn that is not the assistant's stands in `text`, those of a role in their order."""
        turns, ends = conversation.turns, dict.fromkeys(ROLES.values(), 0)
        for index, turn in enumerate(turns):
            content = turn.content.strip()
            if turn.role == "assistant":
                continue
            found = text.find(content, ends[turn.role])
            if found < 0 and turn.role == "tool":
                found = max(text.find(json.dumps(content, ensure_ascii=ascii)[1:-1]) for ascii in (False, True))
            elsewhere = content and (text.count(content) > 1 or content in self._frame)  # words of another turn, or of the template
            if found < 0 or (elsewhere and not self._is_written(where, conversation, index, text)):
                said = f"{turn.role}: {excerpt(content)!r}"
                got = f"a chat template that leaves out or changes turn {index + 1} ({said}){_same_role(turns, index)}"
                raise _wrong(where, got, "every turn as it is written in the row", TEMPLATE_FIX)
            ends[turn.role] = max(ends[turn.role], found + len(content))

    @cached_property
    def _frame(self) -> str:
        """What the template writes around turns, as far as a question and its answer show it."""
        try:
            return self._apply(SETTING, Conversation(PROBE))
        except UserError:  # it takes other conversations
            return ""

    def _is_written(self, where: str, conversation: Conversation, index: int, text: str) -> bool:
        """Whether another content (or other calls) of turn `index` would make another text than `text`."""
        has_calls = bool(conversation.turns[index].tool_calls)
        return self._apply(where, _changed(conversation, index, content=not has_calls)) != text

    def _mark(self, one: _Rendered, ids: np.ndarray, spans: np.ndarray, prompt_ids: list[np.ndarray]) -> Encoded:
        """ids [tokens] of the conversation, spans [tokens, 2]: the characters of its text that each token covers."""
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2].tolist() == [bos, bos]:
            raise _wrong(one.where, f"a chat template that starts with {self.tokenizer.bos_token!r} twice", "one")
        trained, stops = np.full(len(ids), self.train_on == "all"), set()
        trained[:1] = False
        special = np.flatnonzero(np.isin(ids, self.special_ids))
        starts = [len(prompt) for prompt in prompt_ids] + [len(ids)]
        for number, index in enumerate(one.prompts):
            start, next_start = starts[number], starts[number + 1]
            if not np.array_equal(ids[:start], prompt_ids[number]):
                self._refuse_tokens(one, index, ids, prompt_ids[number])
            within = special[(special >= start) & (special < next_start)]
            if one.turns[index].tool_calls:
                stop = self._stop_of_calls(one, index, within, ids, spans)
            else:
                stop = self._stop_position(one, index, within, ids, spans)
            _check_reasoning(one, index, one.text[len(one.prompts[index]) : spans[stop, 0]])
            trained[start : stop + 1] = one.turns[index].trained
            if one.turns[index].trained:
                stops.add(int(ids[stop]))
        return Encoded(ids, trained, tuple(sorted(stops)))

    def _stop_position(self, one: _Rendered, index: int, special: np.ndarray, ids: np.ndarray, spans: np.ndarray) -> int:
        """Which of the positions `special` is the turn's stop token: the first one of its kind to follow the answer's text directly.

        White space may lie between, and templates may trim the answer. The text before the answer (an empty thinking block) may contain
        the same words, so that its later occurrences are tried too; but beyond a token that stops turns another turn has begun.
        """
        answer, start = one.turns[index].content, len(one.prompts[index])
        for spelling in (answer, answer.strip()):
            at = one.text.find(spelling, start)
            while at >= 0:
                end = at + len(spelling)
                later = special[spans[special, 1] > end]
                if len(later) and not one.text[end : spans[later[0], 0]].strip():
                    if ids[later[0]] not in ids[special[spans[special, 1] <= at]]:
                        return int(later[0])
                at = one.text.find(spelling, at + 1)
        rendered = one.text[start:]
        if answer.strip() not in rendered:
            got = f"a chat template that changes the text of turn {index + 1}: {excerpt(answer)!r} became {excerpt(rendered)!r}"
            fix = "take out of the row what the template removes (Qwen3 drops the thinking of earlier turns), or data.train_on=last"
            raise _wrong(one.where, got, "the assistant's text as it is written in the row", fix)
        after = rendered[rendered.index(answer.strip()) + len(answer.strip()) :]
        got = f"no special token after the answer of turn {index + 1} in {one.where}: {excerpt(after)!r}"
        raise _wrong(SETTING, got, STOP_EXPECTED, STOP_FIX)

    def _stop_of_calls(self, one: _Rendered, index: int, special: np.ndarray, ids: np.ndarray, spans: np.ndarray) -> int:
        """The same for a turn with tool calls: [Note: tool calls]. Its text and its calls must all be there."""
        stops = special[(spans[special, 1] <= one.ends[index]) & np.isin(ids[special], self._plain_stops)]
        if not len(stops):
            expected = f"{self.tokenizer.convert_ids_to_tokens(list(self._plain_stops))}, as after its answers"
            after = one.text[len(one.prompts[index]) : one.ends[index]]
            raise _wrong(one.where, f"a chat template that ends the tool calls of turn {index + 1} with {excerpt(after[-40:])!r}", expected)
        stop = int(stops[-1])
        rendered = one.text[len(one.prompts[index]) : spans[stop, 0]]
        if (missing := written_calls(one.turns[index], rendered)) is not None:
            got = f"a chat template that leaves out {missing} of turn {index + 1}: it became {excerpt(rendered)!r}"
            raise _wrong(one.where, got, "the text and every call of the turn", CALLS_FIX)
        return stop

    @cached_property
    def _plain_stops(self) -> tuple[int, ...]:
        """The token that ends an answer without tool calls."""
        (probe,) = self.encode([(SETTING, Conversation(PROBE))])
        if isinstance(probe, UserError):
            raise probe
        return probe.stops

    def _refuse_tokens(self, one: _Rendered, index: int, ids: np.ndarray, prompt: np.ndarray) -> None:
        shared = min(len(ids), len(prompt))
        differ = ids[:shared] != prompt[:shared]
        at = int(differ.argmax()) if differ.any() else shared
        training, inference = (self.tokenizer.convert_ids_to_tokens(part[max(at - 2, 0) : at + 3].tolist()) for part in (ids, prompt))
        got = f"prompt and answer of turn {index + 1} that share a token: training would see {training}, inference {inference}"
        fix = "take the white space off the answer's start (or off the end of the template's prompt)"
        raise _wrong(one.where, got, "an answer that starts at a token of its own", fix)

    def _apply(self, where: str, conversation: Conversation, *, prompt: bool = False) -> str:
        return self.tools.apply(where, conversation, prompt=prompt)


def _changed(conversation: Conversation, index: int, *, content: bool) -> Conversation:
    """The conversation with other names of what turn `index` calls, and with another `content` of it."""
    turn = conversation.turns[index]
    names = [{**call["function"], "name": _other(call["function"]["name"])} for call in turn.tool_calls]
    calls = tuple({**call, "function": function} for call, function in zip(turn.tool_calls, names, strict=True))
    other = replace(turn, content=_other(turn.content) if content else turn.content, tool_calls=calls)
    return replace(conversation, turns=(*conversation.turns[:index], other, *conversation.turns[index + 1 :]))


def _other(text: str) -> str:
    """A text that begins with another character."""
    return ("1" if text.lstrip().startswith("0") else "0") + text


def _check_reasoning(one: _Rendered, index: int, rendered: str) -> None:
    reasoning = (one.turns[index].reasoning or "").strip()
    if reasoning not in rendered:
        got = f"a chat template that leaves out `reasoning_content` of turn {index + 1}: {excerpt(reasoning)!r}"
        fix = "data.train_on=last (many templates keep the reasoning of the last answer only), or rows without it"
        raise _wrong(one.where, got, "the reasoning of every trained answer", fix)


def _same_role(turns: tuple[Turn, ...], index: int) -> str:
    """A hint for messages, where it may be the reason that two turns of one role follow each other."""
    if index == 0 or turns[index - 1].role != turns[index].role:
        return ""
    return f"; turns {index} and {index + 1} are both of the role {turns[index].role}"


def _line_of(error: Exception) -> str:
    return f", line {error.lineno}" if getattr(error, "lineno", None) else ""


def _wrong(path: str, got: str, expected: str, fix: str = "") -> UserError:
    return UserError(Problem(path=path, got=got, expected=expected, fix=fix))


def _caught(step, *arguments):
    try:
        return step(*arguments)
    except UserError as error:
        return error


def _common_prefix(a: str, b: str) -> int:
    """How many characters at the start of both are the same."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
