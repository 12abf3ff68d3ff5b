"""Text without a chat template: documents and prompts with completions get the ids that inference gives, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import framework.data.plain
import framework.data.tokenize
from framework.config.errors import UserError
from framework.data.plain import CompletionEncoder, TextEncoder, token_ids
from framework.data.tokenize import encode_rows
from framework.data.turns import Completion, Passage


def encoded(tokenizer, texts, block=None):
    """The ids of each document, which the tokenizer gets in pieces, and we in blocks of so many characters."""
    passages = []
    for number, text in enumerate(texts):
        parts = [text[at : at + block] for at in range(0, len(text), block)] if block and text else [text]
        passages += [(f"r:{number}", Passage(part, n == 0, n < len(parts) - 1)) for n, part in enumerate(parts)]
    documents, current = [], []
    for _, part in encode_rows(passages, tokenizer, yields="documents", train_on="assistant", num_workers=1):
        current.append(part.ids)
        if not part.more:
            documents.append(np.concatenate(current))
            current = []
    assert not current
    return documents


def test_documents_end_with_eos_and_start_with_bos_only_where_the_tokenizer_wants_it(tokenizer_with):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_with(None)
    text = "hello 12"
    plain = tokenizer(text, add_special_tokens=False).input_ids
    (document,) = encoded(tokenizer, [text])
    assert document.tolist() == [*plain, tokenizer.eos_token_id]
    special = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    (document,) = encoded(tokenizer, [text])
    assert document.tolist() == [tokenizer.bos_token_id, *plain, tokenizer.eos_token_id]


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


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Characters that the tokenizer got in each call."""
    seen = []

    def counted(tokenizer, texts):
        seen.append(sum(map(len, texts)))
        return token_ids(tokenizer, texts)

    monkeypatch.setattr(framework.data.plain, "token_ids", counted)
    return seen


@pytest.mark.parametrize("split_special_tokens", [False, True])
def test_p8_tokens_are_those_of_the_tokenizer_whatever_was_set_before(tokenizer_with, split_special_tokens):
    tokenizer = tokenizer_with(None)
    texts = ["hello the user asks", "", "World</s> 12", "\u4f60\u597d\u3002 don't"]
    tokenizer(texts, truncation=True, max_length=2, padding="max_length", split_special_tokens=True)
    tokenizer.split_special_tokens = split_special_tokens
    expected = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    tokenizer(texts, truncation=True, max_length=2, padding="max_length", split_special_tokens=not split_special_tokens)
    assert token_ids(tokenizer, texts) == expected and token_ids(tokenizer, []) == []
    assert (tokenizer.eos_token_id in expected[2]) is not split_special_tokens


@pytest.fixture
def small_pieces(monkeypatch):
    for module in (framework.data.plain, framework.data.tokenize):
        monkeypatch.setattr(module, "CHARACTERS_AT_ONCE", 200)
    monkeypatch.setattr(framework.data.plain, "AROUND_A_CUT", 60)


WORDS = st.sampled_from(
    ["hello", "World", "the user", "\n", "\n\n", "  ", "12", "\u00e9\u2713", "\u4f60\u597d\u3002", "don't", "x_y", ", ", "</s>", "\t"]
)


def test_p4_a_long_document_in_pieces_has_the_tokens_of_the_whole(tokenizer_with, small_pieces):
    tokenizer = tokenizer_with(None)

    @settings(max_examples=50, deadline=None)
    @given(st.lists(WORDS, min_size=100, max_size=300), st.lists(WORDS, max_size=5), st.sampled_from([None, 61, 170, 1000]))
    def same(long, short, block):
        documents = ["".join(long), "".join(short), " ".join(long)]
        for ids, text in zip(encoded(tokenizer, documents, block), documents, strict=True):
            assert ids.tolist() == [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]

    same()


def test_no_call_of_the_tokenizer_gets_much_text(tokenizer_with, small_pieces, calls):
    encoded(tokenizer_with(None), ["the user asks. " * n for n in (1000, 1, 2, 3, 50, 7, 100)] + ["x" * 500 + " the user" * 200])
    assert len(calls) > 1 and max(calls) <= 500 + 200


def test_p4_a_tokenizer_that_cannot_be_cut_takes_a_long_document_whole_and_one_beyond_memory_not_at_all(
    tokenizer_with, small_pieces, monkeypatch
):
    """It puts something before every text that no text has inside."""
    from tokenizers import normalizers

    tokenizer = tokenizer_with(None)
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("~")
    text = "hello the user, " * 100
    (ids,) = encoded(tokenizer, [text], block=100)
    assert ids.tolist() == [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    monkeypatch.setattr(framework.data.plain, "MOST_UNCUT_CHARACTERS", 1000)
    with pytest.raises(UserError, match="r:0: got 1,000 characters in which this tokenizer's tokens have no place to be cut"):
        encoded(tokenizer, [text], block=100)


def test_p4_a_tokenizer_that_puts_a_space_before_every_text_is_cut_at_a_space(tokenizer_with, small_pieces, calls):
    """As those of Llama 2."""
    from tokenizers import normalizers, pre_tokenizers

    tokenizer = tokenizer_with(None)
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "hello the user,  asks. \n" * 100
    whole = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    assert encoded(tokenizer, [text])[0].tolist() == whole and max(calls) < 500 < len(text)


def test_of_a_document_all_but_the_first_token_is_trained_also_where_a_piece_begins(tokenizer_with, small_pieces):
    encoder = TextEncoder(tokenizer_with(None))
    pieces = list(encoder.pieces([("r:1", Passage("hello the user, " * 100))]))
    parts = encoder.encode(pieces)
    assert len(parts) > 2 and [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
    assert np.flatnonzero(~np.concatenate([part.trained for part in parts])).tolist() == [0]
