"""Turns to tokens: the whole conversation through the tokenizer's own chat template, and which of its tokens are trained.

    text     <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n Hello <|im_end|> \\n
    trained  .          . .  .          .  .            .         .  1     1          .

A conversation is rendered once and tokenised once. An assistant turn is trained from the first token after the prompt that inference
would give for it (the template over the turns before, with `add_generation_prompt`) to its stop token, the special token that
follows the answer. That prompt must be a prefix of the conversation, in text and in tokens, so training sees exactly the ids of inference.

Unusual: nothing is assumed about any template. One for which this does not hold (it rewrites an answer, writes no stop token, refuses
the order of roles, glues prompt and answer into one token) is refused with the row and the place where it fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from framework.config.errors import Problem, UserError
from framework.data.conversations import Conversation
from framework.data.files import excerpt


@dataclass(frozen=True, eq=False)
class Encoded:
    """One row in tokens."""

    ids: np.ndarray
    """[tokens] int32"""
    trained: np.ndarray
    """[tokens] bool: is this token a target of the loss? Never the first one, which nothing predicts."""


@dataclass(frozen=True)
class _Rendered:
    """A conversation in text, with the prompt of each assistant turn (by index in `turns`)."""

    where: str
    turns: Conversation
    text: str
    prompts: dict[int, str]

    @property
    def texts(self) -> list[str]:
        return [self.text, *self.prompts.values()]


class ChatEncoder:
    """Encodes conversations with one tokenizer. Raises UserError at once for a tokenizer that cannot do it."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            fix = "model.chat_template=/path/to/template.jinja"
            raise _wrong("model.chat_template", "a tokenizer without a chat template", "a template to train on conversations", fix)
        if not tokenizer.is_fast:
            raise _wrong("model.tokenizer", type(tokenizer).__name__, "a fast tokenizer (tokenizer.json)")
        self.tokenizer = tokenizer
        marked = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = np.array(sorted(marked | set(tokenizer.all_special_ids)), dtype=np.int32)

    def encode(self, conversations: list[tuple[str, Conversation]]) -> list[Encoded | UserError]:
        """Each (place of the row, conversation) in tokens, or what is wrong with it; one call of the tokenizer for all."""
        rendered = [_caught(self._render, where, turns) for where, turns in conversations]
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

    def _render(self, where: str, turns: Conversation) -> _Rendered:
        """Text of the conversation and of each assistant turn's prompt, which must be a prefix of it."""
        text = self._apply(where, turns, prompt=False)
        prompts = {}
        for index, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            if index == 0:
                raise _wrong(where, "a conversation that starts with the assistant", "a turn for it to answer")
            prompt = prompts[index] = self._apply(where, turns[:index], prompt=True)
            if not text.startswith(prompt):
                at = _common_prefix(text, prompt)
                got = (
                    f"a chat template whose prompt for turn {index + 1} is not how the conversation goes on: the prompt has "
                    f"{excerpt(prompt[at:])!r} where the conversation has {excerpt(text[at:])!r}"
                )
                raise _wrong(where, got, "template(turns before, add_generation_prompt=True) to be a prefix of template(all turns)")
        return _Rendered(where, turns, text, prompts)

    def _mark(self, one: _Rendered, ids: np.ndarray, spans: np.ndarray, prompt_ids: list[np.ndarray]) -> Encoded:
        """ids [tokens] of the conversation, spans [tokens, 2]: the characters of its text that each token covers."""
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2].tolist() == [bos, bos]:
            raise _wrong(one.where, f"a chat template that starts with {self.tokenizer.bos_token!r} twice", "one")
        trained = np.zeros(len(ids), dtype=bool)
        special = np.flatnonzero(np.isin(ids, self.special_ids))
        starts = [len(prompt) for prompt in prompt_ids] + [len(ids)]
        for number, index in enumerate(one.prompts):
            start, next_start = starts[number], starts[number + 1]
            if not np.array_equal(ids[:start], prompt_ids[number]):
                self._refuse_tokens(one, index, ids, prompt_ids[number])
            stop = self._stop_position(one, index, special[(special >= start) & (special < next_start)], spans)
            trained[start : stop + 1] = one.turns[index].trained
        return Encoded(ids, trained)

    def _stop_position(self, one: _Rendered, index: int, special: np.ndarray, spans: np.ndarray) -> int:
        """Which of the positions `special`, all within the turn, is its stop token: the one that follows the answer's text directly.

        White space may lie between, and templates may trim the answer. The text before the answer (an empty thinking block) may contain
        the same words, so that its later occurrences are tried too.
        """
        answer, start = one.turns[index].content, len(one.prompts[index])
        for spelling in (answer, answer.strip()):
            at = one.text.find(spelling, start)
            while at >= 0:
                end = at + len(spelling)
                later = special[spans[special, 1] > end]
                if len(later) and not one.text[end : spans[later[0], 0]].strip():
                    return int(later[0])
                at = one.text.find(spelling, at + 1)
        rendered = one.text[start:]
        if answer.strip() not in rendered:
            got = f"a chat template that changes the text of turn {index + 1}: {excerpt(answer)!r} became {excerpt(rendered)!r}"
            fix = "take out of the row what the template removes (Qwen3 drops the thinking of earlier turns)"
            raise _wrong(one.where, got, "the assistant's text as it is written in the row", fix)
        after = rendered[rendered.index(answer.strip()) + len(answer.strip()) :]
        got = f"no special token after the answer of turn {index + 1} in {one.where}: {excerpt(after)!r}"
        fix = "model.chat_template=/path/to/template.jinja   with {{ eos_token }} after the assistant's text"
        raise _wrong("model.chat_template", got, "a stop token after each assistant turn, for the model to learn where to stop", fix)

    def _refuse_tokens(self, one: _Rendered, index: int, ids: np.ndarray, prompt: np.ndarray) -> None:
        shared = min(len(ids), len(prompt))
        differ = ids[:shared] != prompt[:shared]
        at = int(differ.argmax()) if differ.any() else shared
        training, inference = (self.tokenizer.convert_ids_to_tokens(part[max(at - 2, 0) : at + 3].tolist()) for part in (ids, prompt))
        got = f"prompt and answer of turn {index + 1} that share a token: training would see {training}, inference {inference}"
        fix = "take the white space off the answer's start (or off the end of the template's prompt)"
        raise _wrong(one.where, got, "an answer that starts at a token of its own", fix)

    def _apply(self, where: str, turns: Conversation, *, prompt: bool) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template is the user's program: whatever it raises is what is wrong with it
            got = f"turns that the chat template refuses ({error}); their roles: {', '.join(turn.role for turn in turns)}"
            raise _wrong(where, got, "an order of roles that the template accepts") from error


class TextEncoder:
    """Encodes documents: beginning-of-sequence token where the tokenizer wants one, the text, end-of-sequence token.

    All of them are trained but the first, which nothing predicts.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise _wrong("model.tokenizer", "a tokenizer without an end-of-sequence token", "one, to separate documents")
        self.tokenizer = tokenizer
        self.start = [tokenizer.bos_token_id] if tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id] else []

    def encode(self, documents: list[tuple[str, str]]) -> list[Encoded | UserError]:
        batch = self.tokenizer([text for _, text in documents], add_special_tokens=False, verbose=False)["input_ids"]
        rows = [np.array(self.start + ids + [self.tokenizer.eos_token_id], dtype=np.int32) for ids in batch]
        return [Encoded(ids, np.arange(len(ids)) > 0) for ids in rows]


def _wrong(path: str, got: str, expected: str, fix: str = "") -> UserError:
    return UserError(Problem(path=path, got=got, expected=expected, fix=fix))


def _caught(step, *arguments):
    try:
        return step(*arguments)
    except UserError as error:
        return error


def _common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
