"""Text without a chat template: documents and prompts with completions get the ids that inference gives, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import framework.data.plain
from framework.data.plain import CompletionEncoder, TextEncoder
from framework.data.turns import Completion


def test_documents_end_with_eos_and_start_with_bos_only_where_the_tokenizer_wants_it(tokenizer_with):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_with(None)
    text = "hello 12"
    plain = tokenizer(text, add_special_tokens=False).input_ids
    (document,) = TextEncoder(tokenizer).encode([("r:1", text)])
    assert document.ids.tolist() == [*plain, tokenizer.eos_token_id]
    special = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    (document,) = TextEncoder(tokenizer).encode([("r:1", text)])
    assert document.ids.tolist() == [tokenizer.bos_token_id, *plain, tokenizer.eos_token_id]


def complete(tokenizer, prompt, completion):
    (result,) = CompletionEncoder(tokenizer).encode([("rows.jsonl:7", Completion(prompt, completion))])
    return result


@pytest.mark.parametrize(("prompt", "completion"), [("what is 2 + 3?", " 5"), ("hello\n", "World"), ("the user ", "asks"), ("he", "llo")])
def test_p5_p8_a_completion_is_trained_behind_the_ids_that_inference_gives_for_its_prompt(tokenizer_with, prompt, completion):
    """Also where tokenised together they would share a token."""
    tokenizer = tokenizer_with(None)
    encoded = complete(tokenizer, prompt, completion)
    start = tokenizer(prompt).input_ids
    assert encoded.ids[: len(start)].tolist() == start and not encoded.trained[: len(start)].any()
    assert encoded.trained[len(start) :].all() and encoded.stops == (tokenizer.eos_token_id,)
    assert tokenizer.decode(encoded.ids[len(start) :]) == completion + tokenizer.eos_token


def test_a_completion_that_this_tokenizer_cannot_take_apart_is_refused(tokenizer_with):
    """A tokenizer that puts a space before every text, as those of Llama 2 do."""
    from tokenizers import pre_tokenizers

    tokenizer = tokenizer_with(None)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert complete(tokenizer, "what is a", " question").trained.any()
    assert "rows.jsonl:7: got a prompt and a completion that this tokenizer cannot take apart" in str(complete(tokenizer, "he", "llo"))


class Counting:
    """A tokenizer that remembers how many characters it got in its longest call."""

    def __init__(self, tokenizer):
        self.tokenizer, self.most = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, texts, **options):
        self.most = max(self.most, len(texts) if isinstance(texts, str) else sum(map(len, texts)))
        return self.tokenizer(texts, **options)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(framework.data.plain, "CHARACTERS_AT_ONCE", 200)
    monkeypatch.setattr(framework.data.plain, "AROUND_A_CUT", 60)


WORDS = st.sampled_from(
    ["hello", "World", "the user", "\n", "\n\n", "  ", "12", "\u00e9\u2713", "\u4f60\u597d\u3002", "don't", "x_y", ", ", "</s>", "\t"]
)


def test_p4_a_long_document_in_pieces_has_the_tokens_of_the_whole(tokenizer_with, small_pieces):
    tokenizer = tokenizer_with(None)

    @settings(max_examples=50, deadline=None)
    @given(st.lists(WORDS, min_size=100, max_size=300), st.lists(WORDS, max_size=5))
    def same(long, short):
        documents = ["".join(long), "".join(short), " ".join(long)]
        encoded = TextEncoder(tokenizer).encode([(f"r:{n}", text) for n, text in enumerate(documents)])
        for row, text in zip(encoded, documents, strict=True):
            assert row.ids.tolist() == [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]

    same()


def test_no_call_of_the_tokenizer_gets_much_text(tokenizer_with, small_pieces):
    counting = Counting(tokenizer_with(None))
    TextEncoder(counting).encode(
        [(f"r:{n}", "the user asks. " * n) for n in (1000, 1, 2, 3, 50, 7, 100)] + [("r:x", "x" * 500 + " the user" * 200)]
    )
    assert counting.most <= 500 + 200


def test_p4_a_tokenizer_that_cannot_be_cut_takes_a_long_document_whole(tokenizer_with, small_pieces):
    """As those of Llama 2, which put a space before every text."""
    from tokenizers import normalizers

    tokenizer = tokenizer_with(None)
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("~")
    text = "hello the user, " * 100
    (row,) = TextEncoder(tokenizer).encode([("r:1", text)])
    assert row.ids.tolist() == [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    assert np.count_nonzero(~row.trained) == 1
