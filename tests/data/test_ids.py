"""Rows of token ids: what is trained, what stops, and every way in which they can be wrong."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.feather
import pytest

from framework.config.errors import UserError
from framework.config.schema import ColumnsConfig, DataConfig
from framework.data.prepare import prepare
from framework.data.sources import peek


def run(tokenizer, path, **options):
    return prepare(DataConfig(train=path, **options), tokenizer, seed=0, show_progress=False)


@pytest.mark.parametrize(("row", "trained"), [
    ({}, [False, True, True, True]),
    ({"labels": [-100, -100, 7, 8]}, [False, False, True, True]),
    ({"labels": [5, 6, 7, -100]}, [False, True, True, False]),
    ({"loss_mask": [0, 1, 0, 1]}, [False, True, False, True]),
    ({"loss_mask": [True, False, True, False]}, [False, False, True, False]),
    ({"trained": [0, 0, 0, 1]}, [False, False, False, True]),
    ({"attention_mask": [1, 1, 1, 1], "token_type_ids": [0, 0, 0, 0]}, [False, True, True, True]),
])  # fmt: skip
def test_labels_or_a_mask_say_what_is_trained_and_never_the_first_token(chatml, write_jsonl, row, trained):
    """As transformers has it: labels are not shifted, and nothing predicts the first token."""
    sample = run(chatml, write_jsonl([{"input_ids": [5, 6, 7, 8], **row}])).train[0]
    assert sample.input_ids.tolist() == [5, 6, 7, 8] and sample.trained.tolist() == trained


def test_tables_and_other_names_of_columns_are_read_alike(chatml, tmp_path):
    rows = [{"tokens": [5, 6, 7], "mask": [False, False, True]}, {"tokens": [8, 9], "mask": [False, True]}]
    pyarrow.feather.write_feather(pyarrow.Table.from_pylist(rows), str(tmp_path / "rows.feather"))
    prepared = run(chatml, str(tmp_path / "rows.feather"), columns=ColumnsConfig(input_ids="tokens", loss_mask="mask"))
    assert [prepared.train[i].input_ids.tolist() for i in range(2)] == [[5, 6, 7], [8, 9]]
    assert [prepared.train[i].trained.tolist() for i in range(2)] == [[False, False, True], [False, True]]


def test_a_trained_special_token_at_the_end_stops_generation_and_no_other_does(chatml, write_jsonl):
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    assert run(chatml, write_jsonl([{"input_ids": [5, 6, end]}, {"input_ids": [5, 6]}])).stop_ids == (end,)
    assert run(chatml, write_jsonl([{"input_ids": [5, 6, end], "loss_mask": [1, 1, 0]}])).stop_ids == ()


def test_samples_that_train_nothing_are_counted_and_long_ones_treated_as_conversations_are(chatml, write_jsonl):
    rows = [{"input_ids": [5] * 9}, {"input_ids": [5]}, {"input_ids": []}, {"input_ids": [5, 6], "labels": [-100, -100]}]
    prepared = run(chatml, write_jsonl(rows), max_tokens=4, on_too_long="truncate")
    (counts,) = prepared.ledger.sources
    assert len(prepared.train) == 1 and prepared.train[0].input_ids.tolist() == [5] * 4
    assert counts.dropped == {"no token to train on": 2, "no token": 1} and counts.cut_trained_tokens == 5
    with pytest.raises(UserError, match="train.jsonl:1: got a sample of 9 tokens"):
        run(chatml, write_jsonl(rows), max_tokens=4)


@pytest.mark.parametrize(("row", "said"), [
    ({"input_ids": [5, 330, 6]}, "got the id 330 at position 2 of 3\n    expected ids of this tokenizer, 0 to 329"),
    ({"input_ids": [5, -1]}, "got the id -1 at position 2"),
    ({"input_ids": [5, 2**70]}, f"got the id {2**70} at position 2"),
    ({"input_ids": [5, 1.5]}, "got `input_ids` = [5, 1.5]\n    expected a list of whole numbers"),
    ({"input_ids": "5 6"}, "got `input_ids` = 5 6"),
    ({"input_ids": None}, "got `input_ids` = null"),
    ({"input_ids": [[5, 6]]}, "got `input_ids` = [[5, 6]]"),
    ({"input_ids": [5, 6], "labels": [5]}, "got 1 numbers in `labels` for 2 ids"),
    ({"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, "got the label 6 for the id 5 at position 1\n    expected `labels` that are"),
    ({"input_ids": [5, 6], "loss_mask": [0, 2]}, "got `loss_mask` = [0, 2]\n    expected 0 or 1 for each token"),
    ({"input_ids": [5, 6], "labels": [5, 6], "loss_mask": [0, 1]}, "got `labels` and `loss_mask`\n    expected one of them"),
    ({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}, "got `attention_mask` with zeros: a padded sample"),
])  # fmt: skip
def test_what_cannot_be_a_sample_is_named_with_its_row(chatml, write_jsonl, row, said):
    good = {"input_ids": [5, 6], **{name: [0, 1] for name in row if name == "loss_mask"}}
    with pytest.raises(UserError) as caught:
        run(chatml, write_jsonl([good, json.dumps(row)]))
    assert f"train.jsonl:2: {said}" in str(caught.value)


def test_whose_tokens_are_trained_cannot_be_set_beside_ids(write_jsonl):
    (problem,) = peek(DataConfig(train=write_jsonl([{"input_ids": [5, 6]}]), train_on="last"))
    assert problem.path == "data.train_on" and "labels or loss_mask in the rows" in problem.expected
