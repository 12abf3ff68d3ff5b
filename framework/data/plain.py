"""Plain text to tokens, without a chat template: documents, and prompts with their completions.

    document     [bos]  A  document .  eos          trained: all but the first token, which nothing predicts
    completion   [bos]  2 + 3 =  |  5  eos          trained: from the bar on

The beginning-of-sequence token is there where the tokenizer itself puts one.

Unusual: a prompt is always tokenised as inference does it, by itself. Where prompt and completion would share a token, the completion is
tokenised by itself, too, which is how the model will be asked to go on.

[Note: long documents] A tokenizer takes many times the size of a text while it works, so a long document is tokenised in pieces.
It is cut where a word begins, and only where that changes no token: the text around the cut, tokenised whole and in two parts, must
give the same ids. Tokenizers that put a space before every text (those of Llama 2) put it back where the cut has left it out. A tokenizer
that can be cut nowhere takes a document whole, up to a length at which memory would run out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from framework.config.errors import Problem, UserError
from framework.data.template import Encoded
from framework.data.turns import Completion, Passage

CHARACTERS_AT_ONCE = 1 << 20
"""Of documents, in one call of the tokenizer."""
MOST_UNCUT_CHARACTERS = 1 << 26
AROUND_A_CUT = 512
"""Characters on each side that are tokenised to see whether a cut changes a token; words are shorter."""
CUTS_TRIED = 8
WORD_STARTS = re.compile(r"(?<=\S)(?=\s)|(?<=\W)(?=\w)")


class TextEncoder:
    """Encodes documents: in pieces, each of which may be encoded by another process."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.start, self.eos_id = tokenizer, _start(tokenizer), _eos_id(tokenizer, "to separate documents")

    def encode(self, pieces: list[tuple[str, Passage]]) -> list[Encoded]:
        """(place of the document, a piece that `pieces` has cut), in tokens; one call of the tokenizer for all."""
        rows = []
        for (_, piece), ids in zip(pieces, self._ids([piece.text for _, piece in pieces]), strict=True):
            ids = np.array([*(self.start if piece.begins else ()), *ids, *(() if piece.goes_on else (self.eos_id,))], np.int32)
            trained = np.arange(len(ids)) > (0 if piece.begins else -1)
            rows.append(Encoded(ids, trained, (self.eos_id,), more=piece.goes_on))
        return rows

    def pieces(self, documents: Iterable[tuple[str, Passage]]) -> Iterator[tuple[str, Passage]]:
        """Documents in pieces whose tokens together are those of the whole: [Note: long documents]. Raises UserError."""
        text, end, begins = "", CHARACTERS_AT_ONCE, True  # `end`: up to there a place to cut was looked for
        for where, passage in documents:
            text += passage.text
            while end + (AROUND_A_CUT if passage.goes_on else 0) < len(text):
                cut = self._cut(text, end - CHARACTERS_AT_ONCE // 2, end)
                if cut is None:
                    end += CHARACTERS_AT_ONCE // 2
                    continue
                stop, start = cut
                yield where, Passage(text[:stop], begins, goes_on=True)
                text, end, begins = text[start:], CHARACTERS_AT_ONCE, False
            if not passage.goes_on:
                yield where, Passage(text, begins)
                text, end, begins = "", CHARACTERS_AT_ONCE, True
            elif len(text) > MOST_UNCUT_CHARACTERS:
                got = f"{MOST_UNCUT_CHARACTERS:,} characters in which this tokenizer's tokens have no place to be cut"
                expected = "several documents (a row each), or text with words"
                raise UserError(Problem(path=where, got=got, expected=expected))

    def _cut(self, text: str, first: int, last: int) -> tuple[int, int] | None:
        """A place from `first` to `last` where `text` may be cut: where the piece before it ends and the next one begins."""
        places = [match.start() for match in WORD_STARTS.finditer(text, max(first, last - AROUND_A_CUT), last)]
        for place in reversed(places[-CUTS_TRIED:]):
            before = text[place - AROUND_A_CUT : place]
            for start in (place, place + 1) if text[place] == " " else (place,):
                after = text[start : place + AROUND_A_CUT]
                whole, left, right = self._ids([before + text[place:start] + after, before, after])
                if whole == left + right:
                    return place, start
        return None

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


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
