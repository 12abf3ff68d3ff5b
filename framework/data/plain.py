"""Rows to tokens without a chat template: documents, prompts with their completions, and what is tokens already.

    document     [bos]  A  document .  eos          trained: all but the first token, which nothing predicts
    completion   [bos]  2 + 3 =  |  5  eos          trained: from the bar on
    ids          as they are                        trained: what the row says

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
from framework.data.turns import Completion, Passage, Pretokenised

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
        return token_ids(self.tokenizer, texts)


class CompletionEncoder:
    """Encodes prompts with their completions."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.start, self.eos_id = tokenizer, _start(tokenizer), _eos_id(tokenizer, "to learn where to stop")

    def encode(self, rows: list[tuple[str, Completion]]) -> list[Encoded | UserError]:
        texts = [text for _, row in rows for text in (row.prompt, row.prompt + row.completion)]
        batch = token_ids(self.tokenizer, texts)
        return [self._joined(where, row, *batch[2 * n : 2 * n + 2]) for n, (where, row) in enumerate(rows)]

    def _joined(self, where: str, row: Completion, prompt: list[int], whole: list[int]) -> Encoded | UserError:
        if whole[: len(prompt)] != prompt:
            text = self._decoded(whole)
            whole = prompt + token_ids(self.tokenizer, [row.completion])[0]
            if self._decoded(whole) != text:
                got = "a prompt and a completion that this tokenizer cannot take apart: they share a token"
                fix = "a prompt that ends, or a completion that starts, at a space or a new line"
                return UserError(Problem(path=where, got=got, expected="a completion that starts at a token of its own", fix=fix))
        ids = np.array(self.start + whole + [self.eos_id], dtype=np.int32)
        return Encoded(ids, np.arange(len(ids)) >= len(self.start) + len(prompt), (self.eos_id,))

    def _decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class IdsEncoder:
    """Takes samples that are ids already, and looks whether they are ids of this tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.vocabulary = len(tokenizer)
        self.special_ids = set(tokenizer.all_special_ids)

    def encode(self, rows: list[tuple[str, Pretokenised]]) -> list[Encoded | UserError]:
        return [self._checked(where, row) for where, row in rows]

    def _checked(self, where: str, row: Pretokenised) -> Encoded | UserError:
        unknown = next((at for at, index in enumerate(row.ids) if not 0 <= index < self.vocabulary), None)
        if unknown is not None:
            got = f"the id {row.ids[unknown]} at position {unknown + 1:,} of {len(row.ids):,}"
            expected = f"ids of this tokenizer, 0 to {self.vocabulary - 1:,}"
            return UserError(Problem(path=where, got=got, expected=expected, fix="model.tokenizer=/the/one/that/made/the/ids"))
        stops = (row.ids[-1],) if row.trained[-1] and row.ids[-1] in self.special_ids else ()
        return Encoded(np.array(row.ids, np.int32), np.array([False, *row.trained[1:]]), stops)


def token_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Of each text alone, without the tokens that a tokenizer puts around it. One in Rust need not note where in the text each token lies,
    which is a quarter of its time."""
    if not texts:
        return []
    if not tokenizer.is_fast or tokenizer.split_special_tokens:
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    core = tokenizer.backend_tokenizer
    core.no_truncation()  # whatever was set before, as transformers does at each of its calls
    core.no_padding()
    core.encode_special_tokens = False
    return [encoding.ids for encoding in core.encode_batch_fast(texts, add_special_tokens=False)]


def _start(tokenizer: Any) -> list[int]:
    return [tokenizer.bos_token_id] if tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id] else []


def _eos_id(tokenizer: Any, purpose: str) -> int:
    if tokenizer.eos_token_id is None:
        got, expected = "a tokenizer without an end-of-sequence token", f"one, {purpose}"
        raise UserError(Problem(path="model.tokenizer", got=got, expected=expected))
    return tokenizer.eos_token_id
