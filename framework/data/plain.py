"""Plain text to tokens, without a chat template: documents, and prompts with their completions.

    document     [bos]  A  document .  eos          trained: all but the first token, which nothing predicts
    completion   [bos]  2 + 3 =  |  5  eos          trained: from the bar on

The beginning-of-sequence token is there where the tokenizer itself puts one.

Unusual: a prompt is always tokenised as inference does it, by itself. Where prompt and completion would share a token, the completion is
tokenised by itself, too, which is how the model will be asked to go on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from framework.config.errors import Problem, UserError
from framework.data.template import Encoded
from framework.data.turns import Completion


class TextEncoder:
    """Encodes documents."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.start, self.eos_id = tokenizer, _start(tokenizer), _eos_id(tokenizer, "to separate documents")

    def encode(self, documents: list[tuple[str, str]]) -> list[Encoded | UserError]:
        batch = self.tokenizer([text for _, text in documents], add_special_tokens=False, verbose=False)["input_ids"]
        rows = [np.array(self.start + ids + [self.eos_id], dtype=np.int32) for ids in batch]
        return [Encoded(ids, np.arange(len(ids)) > 0, (self.eos_id,)) for ids in rows]


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
