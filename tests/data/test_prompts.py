"""Prompts that a run answers on the way: lists, lines of a text file, rows of data; with the ids that training gives them."""

from __future__ import annotations

import pytest

from framework.config.errors import UserError
from framework.config.schema import DataConfig
from framework.data.prepare import prepare
from framework.data.prompts import encode_prompts, read_prompts
from framework.data.sources import holds_conversations
from framework.models.generate import prompt_ids


def turns(*contents: str) -> dict:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]}


def test_a_text_file_has_a_prompt_in_each_line(tmp_path):
    (tmp_path / "prompts.txt").write_text("Who are you?\n\n  What is 2 + 3?  \r\nlast\u2028line")
    assert read_prompts(str(tmp_path / "prompts.txt")) == ["Who are you?", "What is 2 + 3?", "last\u2028line"]


def test_p8_a_row_is_asked_for_its_last_answer_with_the_ids_that_training_gives_it(chatml, write_jsonl):
    path = write_jsonl([turns("Hi", "Hello", "How are you?", "Fine, thanks."), turns("Bye", "See you")])
    first, second = encode_prompts(read_prompts(path), chatml, as_turns=True, longest=999)
    assert (first.text, second.text) == ("How are you?", "Bye")
    data = prepare(DataConfig(train=path, train_on="last"), chatml, seed=0, show_progress=False).train
    for prompt, sample in ((first, data[0]), (second, data[1])):
        assert prompt.ids == sample.input_ids[: sample.trained.argmax()].tolist()


def test_p8_a_text_is_a_users_turn_or_the_beginning_of_a_text_with_the_ids_of_inference(chatml):
    ((turn,), (text,)) = (encode_prompts(["Who are you?"], chatml, as_turns=as_turns, longest=999) for as_turns in (True, False))
    assert turn.ids == prompt_ids(chatml, [{"role": "user", "content": "Who are you?"}])
    assert text.ids == prompt_ids(chatml, "Who are you?")


def test_which_of_the_two_follows_from_the_training_data(write_jsonl):
    assert holds_conversations(DataConfig(train=write_jsonl([turns("Hi", "Hello")])))
    assert not holds_conversations(DataConfig(train=write_jsonl([{"text": "A document."}], "text.jsonl")))


def test_prompts_that_cannot_be_asked_are_named(chatml, write_jsonl, tmp_path):
    with pytest.raises(UserError, match=r"(?s)number 1, of .*number 3, of .*expected 1 to 19: the model reads at most 20"):
        encode_prompts(["long " * 30, "short", "long " * 40], chatml, as_turns=False, longest=20)
    with pytest.raises(UserError, match="more than 100 prompts"):
        read_prompts(["again"] * 101)
    with pytest.raises(UserError, match="eval.prompts: got a conversation that starts with its only answer"):
        read_prompts(write_jsonl([{"messages": [{"role": "assistant", "content": "Hi"}]}]))
    with pytest.raises(UserError, match="eval.prompts"):
        read_prompts(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(UserError, match="no prompt in"):
        read_prompts(str(tmp_path / "empty.txt"))
