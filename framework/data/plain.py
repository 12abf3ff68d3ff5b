"""Plain text to tokens, without a chat template: documents, and prompts with their completions.

    document     [bos]  A  document .  eos          trained: all but the first token, which nothing predicts
    completion   [bos]  2 + 3 =  |  5  eos          trained: from the bar on

The beginning-of-sequence token is there where the tokenizer itself puts one.

Unusual: a prompt is always tokenised as inference does it, by itself. Where prompt and completion would share a token, the completion is
tokenised by itself, too, which is how the model will be asked to go on.

[Note: long documents] A tokenizer takes many times the size of a text while it works, so a long document is tokenised in pieces.
It is cut where a word begins, and only where that changes no token: the text around the cut, tokenised whole and in two parts, must
give the same ids. Tokenizers that put a space before every text (those of Llama 2) have no such place and take the document whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from framework.config.errors import Problem, UserError
from framework.data.template import Encoded
from framework.data.turns import Completion

CHARACTERS_AT_ONCE = 1 << 20
"""Of documents, in one call of the tokenizer."""
AROUND_A_CUT = 512
"""Characters on each side that are tokenised to see whether a cut changes a token; words are shorter."""
CUTS_TRIED = 8
WORD_STARTS = re.compile(r"(?<=\S)(?=\s)|(?<=\W)(?=\w)")


class TextEncoder:
    """Encodes documents."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.start, self.eos_id = tokenizer, _start(tokenizer), _eos_id(tokenizer, "to separate documents")

    def encode(self, documents: list[tuple[str, str]]) -> list[Encoded | UserError]:
        found: list[list[np.ndarray]] = [[] for _ in documents]
        pieces = ((number, piece) for number, (_, text) in enumerate(documents) for piece in self._pieces(text))
        for batch in _batches(pieces):
            for (number, _), ids in zip(batch, self._ids([piece for _, piece in batch]), strict=True):
                found[number].append(np.array(ids, dtype=np.int32))
        rows = [np.concatenate([np.array(self.start, np.int32), *parts, np.array([self.eos_id], np.int32)]) for parts in found]
        return [Encoded(ids, np.arange(len(ids)) > 0, (self.eos_id,)) for ids in rows]

    def _pieces(self, text: str) -> Iterator[str]:
        """`text` in pieces whose tokens are those of the whole: [Note: long documents]."""
        start, end = 0, CHARACTERS_AT_ONCE
        while end < len(text):
            cut = self._cut(text, end - CHARACTERS_AT_ONCE // 2, end)
            if cut is not None:
                yield text[start:cut]
                start = cut
            end = cut + CHARACTERS_AT_ONCE if cut is not None else end + CHARACTERS_AT_ONCE // 2
        yield text[start:]

    def _cut(self, text: str, first: int, last: int) -> int | None:
        """A place from `first` to `last` where `text` may be cut; None: none was found."""
        places = [match.start() for match in WORD_STARTS.finditer(text, max(first, last - AROUND_A_CUT), last)]
        for place in reversed(places[-CUTS_TRIED:]):
            before, after = text[place - AROUND_A_CUT : place], text[place : place + AROUND_A_CUT]
            whole, left, right = self._ids([before + after, before, after])
            if whole == left + right:
                return place
        return None

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def _batches(pieces: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Pieces for one call each of the tokenizer, of at most CHARACTERS_AT_ONCE where they are not longer themselves."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for number, piece in pieces:
        if batch and characters + len(piece) > CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
        batch.append((number, piece))
        characters += len(piece)
    if batch:
        yield batch


class CompletionEncoder:
    """Encodes prompts with their completions."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.start, self.eos_id = tokenizer, _start(tokenizer), _eos_id(tokenizer, "to learn where to stop")

    def encode(self, rows: list[tuple[str, Completion]]) -> list[Encoded | UserError]:
        texts = [text for _, row in rows for text in (row.prompt, row.prompt + row.completion)]
        batch = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        return [self._joined(where, row, *batch[2 * n : 2 * n + 2]) for n, (where, row) in enumerate(rows)]

    def _joined(self, where: str, row: Completion, prompt: list[int], whole: list[int]) -> Encoded | UserError:
        if whole[: len(prompt)] != prompt:
            text = self._decoded(whole)
            whole = prompt + self.tokenizer(row.completion, add_special_tokens=False, verbose=False)["input_ids"]
            if self._decoded(whole) != text:
                got = "a prompt and a completion that this tokenizer cannot take apart: they share a token"
                fix = "a prompt that ends, or a completion that starts, at a space or a new line"
                return UserError(Problem(path=where, got=got, expected="a completion that starts at a token of its own", fix=fix))
        ids = np.array(self.start + whole + [self.eos_id], dtype=np.int32)
        return Encoded(ids, np.arange(len(ids)) >= len(self.start) + len(prompt), (self.eos_id,))

    def _decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _start(tokenizer: Any) -> list[int]:
    return [tokenizer.bos_token_id] if tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id] else []


def _eos_id(tokenizer: Any, purpose: str) -> int:
    if tokenizer.eos_token_id is None:
        got, expected = "a tokenizer without an end-of-sequence token", f"one, {purpose}"
        raise UserError(Problem(path="model.tokenizer", got=got, expected=expected))
    return tokenizer.eos_token_id
