"""From files to data sets: every row is accounted for, over-long rows are named, text is chunked, rows are held out by the seed."""

from __future__ import annotations

import gzip
import json
import multiprocessing
from itertools import islice, pairwise

import numpy as np
import pytest

import framework.data.plain
import framework.data.read_texts
import framework.data.source_tokens
import framework.data.tokenize
from framework.config.errors import UserError
from framework.config.schema import DataConfig, SourceConfig
from framework.data.batches import StepBatches
from framework.data.files import short_names
from framework.data.prepare import Prepared, prepare
from framework.data.tokenize import encode_rows
from framework.data.turns import Conversation, Turn
from tests.data.templates import CHATML, chat


def run(tokenizer, path, seed=0, **options):
    return prepare(DataConfig(train=path, **options), tokenizer, seed=seed, show_progress=False)


def texts(tokenizer, data):
    return [tokenizer.decode(data[i].input_ids) for i in range(len(data))]


def test_conversations_become_samples_in_the_order_of_the_file(chatml, write_jsonl):
    prepared = run(chatml, write_jsonl([chat("hello", "hi"), chat("how are you", "Yes!")]))
    assert texts(chatml, prepared.train) == [
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n",
        "<|im_start|>user\nhow are you<|im_end|>\n<|im_start|>assistant\nYes!<|im_end|>\n",
    ]
    assert prepared.validation is None
    assert prepared.stop_ids == (chatml.convert_tokens_to_ids("<|im_end|>"),)


def test_prompts_with_completions_become_samples_without_a_chat_template(tokenizer_with, write_jsonl):
    tokenizer = tokenizer_with(None)
    rows = [{"prompt": "what is a question?", "completion": completion} for completion in (" hello", "  ")] + [
        {"prompt": "", "completion": "a"}
    ]
    prepared = run(tokenizer, write_jsonl(rows))
    assert texts(tokenizer, prepared.train) == ["what is a question? hello</s>"]
    assert prepared.ledger.sources[0].dropped == {"empty completion": 1, "empty prompt": 1}
    assert prepared.stop_ids == (tokenizer.eos_token_id,)


def test_of_prompts_that_are_conversations_only_the_completion_is_trained(chatml, write_jsonl):
    prompt = chat("hello", "hi", "how are you")["messages"]
    prepared = run(chatml, write_jsonl([{"prompt": prompt, "completion": [{"role": "assistant", "content": "Yes!"}]}]))
    sample = prepared.train[0]
    assert chatml.decode(sample.input_ids[sample.trained]) == "Yes!<|im_end|>"
    with pytest.raises(UserError, match="1 rows: no assistant turn to train on"):
        run(chatml, write_jsonl([{"prompt": prompt, "completion": [{"role": "user", "content": "hi"}]}]))


@pytest.mark.parametrize(("train_on", "trained"), [
    ("assistant", ["hi<|im_end|>", "Yes!<|im_end|>"]),
    ("last", ["Yes!<|im_end|>"]),
    ("all", ["user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n<|im_start|>user\nhow are you<|im_end|>\n"
             "<|im_start|>assistant\nYes!<|im_end|>\n"]),
])  # fmt: skip
def test_whose_tokens_are_trained_is_a_setting(chatml, write_jsonl, train_on, trained):
    """Generation stops at the token that ends an answer, also where tokens behind it are trained."""
    prepared = run(chatml, write_jsonl([chat("hello", "hi", "how are you", "Yes!")]), train_on=train_on)
    sample = prepared.train[0]
    starts = np.flatnonzero(sample.trained & ~np.roll(sample.trained, 1))
    ends = np.flatnonzero(sample.trained & ~np.append(sample.trained[1:], False))
    spans = [chatml.decode(sample.input_ids[start : end + 1]) for start, end in zip(starts, ends, strict=True)]
    assert spans == trained and prepared.stop_ids == (chatml.convert_tokens_to_ids("<|im_end|>"),)


def test_p7_with_train_on_all_an_answer_of_weight_0_is_all_that_is_not_trained(chatml, write_jsonl):
    row = chat("hello", "hi", "how are you", "Yes!")
    row["messages"][1]["weight"] = 0
    sample = run(chatml, write_jsonl([row]), train_on="all").train[0]
    assert chatml.decode(sample.input_ids[1:][~sample.trained[1:]]) == "hi<|im_end|>"
    row["messages"][2]["weight"] = 0
    with pytest.raises(UserError, match="train.jsonl:1: got turn 3 of the role user with weight 0 and data.train_on=all"):
        run(chatml, write_jsonl([row]), train_on="all")


def test_p7_with_train_on_last_a_last_answer_of_weight_0_leaves_nothing(chatml, write_jsonl):
    row = chat("hello", "hi", "how are you", "Yes!")
    row["messages"][3]["weight"] = 0
    assert run(chatml, write_jsonl([row, chat("hi", "hi")]), train_on="last").ledger.sources[0].dropped == {
        "no assistant turn to train on": 1
    }


def test_only_an_answer_that_would_be_trained_drops_its_row_for_saying_nothing(chatml, write_jsonl):
    row = chat("hello", "", "how are you", "Yes!")
    dropped = {"empty assistant turn": 1}
    good = chat("hi", "hi")
    assert run(chatml, write_jsonl([row, good])).ledger.sources[0].dropped == dropped
    assert run(chatml, write_jsonl([row, good]), train_on="last").ledger.sources[0].dropped == {}
    row["messages"][1]["weight"] = 0
    for train_on in ("assistant", "last", "all"):
        prepared = run(chatml, write_jsonl([row, good]), train_on=train_on)
        assert prepared.ledger.sources[0].dropped == {} and len(prepared.train) == 2
    sample = run(chatml, write_jsonl([row])).train[0]
    assert chatml.decode(sample.input_ids[sample.trained]) == "Yes!<|im_end|>"


@pytest.mark.parametrize(("row", "train_on"), [({"prompt": "hello", "completion": " hi"}, "all"), ({"text": "hello"}, "last")])
def test_train_on_is_never_ignored(chatml, write_jsonl, row, train_on):
    with pytest.raises(UserError, match=f"data.train_on: got {train_on} with the"):
        run(chatml, write_jsonl([row]), train_on=train_on)


def test_p1_every_row_read_is_kept_held_out_or_dropped_with_its_reason(chatml, write_jsonl):
    rows = [chat(f"question {n}", "hi") for n in range(8)] + [chat("hello", "  "), chat("only a question"), chat("hi", "the user " * 60)]
    prepared = run(chatml, write_jsonl(rows), validation_fraction=0.25, max_tokens=100, on_too_long="drop")
    (counts,) = prepared.ledger.sources
    assert (counts.read, counts.kept, counts.held_out, counts.samples) == (11, 6, 2, 6)
    assert counts.dropped == {"empty assistant turn": 1, "no assistant turn to train on": 1, "longer than data.max_tokens=100": 1}
    assert (len(prepared.train), len(prepared.validation)) == (6, 2)
    assert counts.tokens == prepared.train.total_tokens and counts.trained_tokens == prepared.train.trained_tokens
    table = prepared.ledger.table()
    assert "dropped 1 rows: empty assistant turn" in table and "data.train" in table
    assert json.loads(json.dumps(prepared.ledger.to_json()))["sources"][0]["held_out"] == 2


def test_p2_over_long_rows_are_an_error_that_names_row_length_limit_and_what_to_write(chatml, write_jsonl):
    limit = len(run(chatml, write_jsonl([chat("hi", "hello")])).train[0])
    path = write_jsonl([chat("hi", "hello " * n if n % 2 else "hello") for n in range(2, 16)])
    with pytest.raises(UserError) as caught:
        run(chatml, path, max_tokens=limit)
    message = str(caught.value)
    assert (
        f"train.jsonl:2: got a sample of {len(run(chatml, path).train[1])} tokens\n    expected at most data.max_tokens={limit}" in message
    )
    assert message.count("got a sample of") == 5, "the first five are shown"
    longest = run(chatml, path).train.longest
    assert f"data.max_tokens={longest} (keeps every row), data.on_too_long=drop (loses 7 rows)" in message
    run(chatml, path, max_tokens=longest)


def test_p3_truncation_counts_every_trained_token_that_it_cuts(chatml, write_jsonl):
    rows = [chat("hello", "hi"), chat("hi", "hello " * 50), chat("question " * 50, "hi")]
    whole = run(chatml, write_jsonl(rows))
    cut = run(chatml, write_jsonl(rows), max_tokens=20, on_too_long="truncate")
    (counts,) = cut.ledger.sources
    assert counts.truncated == 1 and cut.train.longest == 20
    assert counts.dropped == {"nothing to train on in the first data.max_tokens=20 tokens": 1}
    assert counts.cut_tokens == len(whole.train[1]) - 20
    assert counts.cut_trained_tokens == whole.train[1].trained.sum() - cut.train[1].trained.sum() > 0
    assert f"{counts.cut_trained_tokens:,} of them trained" in cut.ledger.table()


def test_p20_data_on_which_nothing_would_be_trained_are_an_error(chatml, write_jsonl):
    with pytest.raises(UserError, match="nothing is left to train on .*3 rows: nothing to train on in the first"):
        run(chatml, write_jsonl([chat("question " * 50, "hi")] * 3), max_tokens=20, on_too_long="truncate")
    muted = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi", "weight": 0}]}
    with pytest.raises(UserError, match="2 rows: no assistant turn to train on"):
        run(chatml, write_jsonl([muted, chat("hi")]))


def test_problems_of_many_rows_are_reported_together(chatml, write_jsonl):
    rows = ["{broken", chat("hi", "hello"), {"messages": [{"role": "robot", "content": "x"}]}, chat("hi", "hello " * 50), *["null"] * 9]
    with pytest.raises(UserError) as caught:
        run(chatml, write_jsonl(rows), max_tokens=30)
    message = str(caught.value)
    for said in ("train.jsonl:1: got broken JSON", "train.jsonl:3: got turn 1", "train.jsonl:4: got a sample of", "train.jsonl:5: got null",
                 "6 more rows with problems"):  # fmt: skip
        assert said in message


def test_p4_documents_are_joined_with_separators_and_chunked_without_loss(chatml, write_jsonl, tmp_path):
    documents = ["hello world " * 9, "  ", "what is a question", "Yes!\n\nNo.\n"]
    prepared = run(chatml, write_jsonl([{"text": text} for text in documents]), max_tokens=16)
    separator = [chatml.eos_token_id]
    stream = sum((chatml(text, add_special_tokens=False).input_ids + separator for text in documents if text.strip()), [])
    samples = [prepared.train[i] for i in range(len(prepared.train))]
    joined = np.concatenate([samples[0].input_ids, *(sample.input_ids[1:] for sample in samples[1:])])
    assert joined.tolist() == stream and prepared.train.longest == 16
    assert prepared.train.trained_tokens == len(stream) - 1
    (counts,) = prepared.ledger.sources
    assert (counts.read, counts.kept, counts.dropped["empty text"], counts.samples) == (4, 3, 1, len(samples))


def test_p4_a_folder_of_files_of_all_kinds_is_one_stream_in_their_order_and_can_be_resumed_anywhere(chatml, tmp_path, monkeypatch):
    """Through the cache, the longest document in many pieces. An epoch from step k on is the rest of that epoch."""
    for module, name, characters in (
        (framework.data.plain, "CHARACTERS_AT_ONCE", 200), (framework.data.plain, "AROUND_A_CUT", 60),
        (framework.data.tokenize, "CHARACTERS_AT_ONCE", 200), (framework.data.read_texts, "DOCUMENT_CHARACTERS", 150),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, characters)
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = [f"{name} the user asks. hello world " * times for name, times in (("a", 1), ("b", 2), ("c", 40), ("d", 3), ("e", 1))]
    (folder / "1.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:2]))
    (folder / "2.txt").write_text(texts[2])
    (folder / "3.csv").write_text(f"text\n{texts[3]}\n")
    (folder / "4.txt.gz").write_bytes(gzip.compress(texts[4].encode()))
    data = run(chatml, str(folder), max_tokens=16).train
    stream = sum(([*chatml(text, add_special_tokens=False).input_ids, chatml.eos_token_id] for text in texts), [])
    samples = [data[i].input_ids for i in range(len(data))]
    assert np.concatenate([samples[0], *(sample[1:] for sample in samples[1:])]).tolist() == stream

    def steps(first_step):
        return [
            step[0]["input_ids"].tolist() for step in StepBatches(data, micro_batch_size=3, accumulate=1, seed=1, first_step=first_step)
        ]

    assert all(steps(k) == steps(0)[k:] for k in range(1, len(data) // 3, 4)) and steps(0) != sorted(steps(0))


def test_a_tokenizer_without_eos_and_pad_will_do_for_conversations_and_is_refused_for_documents(tokenizer_with, write_jsonl):
    tokenizer = tokenizer_with(CHATML)
    tokenizer.eos_token = tokenizer.pad_token = None
    assert len(run(tokenizer, write_jsonl([chat("hi", "hello")])).train) == 1
    with pytest.raises(UserError, match="got a tokenizer without an end-of-sequence token\n    expected one, to separate documents"):
        run(tokenizer, write_jsonl([{"text": "hello"}], "text.jsonl"))


def test_packed_conversations_are_the_same_ones_in_fewer_samples(chatml, write_jsonl):
    path = write_jsonl([chat("hello " * (n % 5 + 1), "hi") for n in range(30)])
    plain, packed = (run(chatml, path, validation_fraction=0.2, max_tokens=100, packing=packing) for packing in (False, True))
    for name in ("train", "validation"):
        one, other = getattr(plain, name), getattr(packed, name)
        assert len(other) < len(one) == other.documents and other.trained_tokens == one.trained_tokens
        whole = [other.ids[start:stop].tolist() for start, stop in pairwise(other.document_offsets)]
        assert sorted(whole) == sorted(one[i].input_ids.tolist() for i in range(len(one)))
    (counts,) = packed.ledger.sources
    assert (counts.samples, counts.packs) == (24, len(packed.train))
    assert f"\n    packed 24 samples into {len(packed.train)} packs" in packed.ledger.table() and "    packed" not in plain.ledger.table()


def test_p4_packed_text_is_cut_within_each_document_and_no_document_goes_on_in_another(chatml, write_jsonl):
    documents = ["hello world " * 9, "  ", "what is a question", "", "Yes!"]
    prepared = run(chatml, write_jsonl([{"text": text} for text in documents]), max_tokens=16, packing=True)
    pieces = [prepared.train.ids[start:stop].tolist() for start, stop in pairwise(prepared.train.document_offsets)]
    rows = [[*chatml(text, add_special_tokens=False).input_ids, chatml.eos_token_id] for text in documents if text.strip()]
    expected = [row[at : at + 16] for row in rows for at in range(0, max(len(row) - 1, 1), 15)]
    assert sorted(pieces) == sorted(expected) and max(map(len, pieces)) == 16
    assert prepared.train.trained_tokens == sum(len(row) - 1 for row in rows)


def test_held_out_documents_are_in_no_training_chunk(chatml, write_jsonl):
    words = [f"{n:03d}" for n in range(40)]
    prepared = run(chatml, write_jsonl([{"text": word} for word in words]), validation_fraction=0.2, max_tokens=1000)
    sides = ["".join(texts(chatml, data)) for data in (prepared.train, prepared.validation)]
    assert [sum(word in side for word in words) for side in sides] == [32, 8]


def test_the_held_out_rows_depend_on_the_seed_alone(chatml, write_jsonl):
    path = write_jsonl([chat(f"question {n}", "hi") for n in range(30)])
    held_out = [texts(chatml, run(chatml, path, seed=seed, validation_fraction=0.2).validation) for seed in (1, 1, 2)]
    assert held_out[0] == held_out[1] != held_out[2] and len(held_out[0]) == 6


def test_holding_out_of_a_single_row_is_refused(chatml, write_jsonl):
    with pytest.raises(UserError, match="data.validation_fraction: got 0.1 of 1 row"):
        run(chatml, write_jsonl([chat("hi", "hi")]), validation_fraction=0.1)


def test_a_validation_file_has_its_own_line_in_the_ledger(chatml, write_jsonl):
    train, validation = write_jsonl([chat("hi", "hi")] * 3), write_jsonl([chat("hello", "hi")] * 2, "validation.jsonl")
    prepared = run(chatml, train, validation=validation, validation_fraction=0.5)
    assert (len(prepared.train), len(prepared.validation)) == (3, 2)
    assert [counts.setting for counts in prepared.ledger.sources] == ["data.train", "data.validation"]


def test_several_validation_sources_have_names_and_each_sample_knows_its_own(chatml, write_jsonl, tmp_path):
    files = [write_jsonl([chat(text, "hi")] * rows, f"{text}.jsonl") for text, rows in (("train", 3), ("hello", 2), ("question", 1))]
    sources = [files[1], SourceConfig(path=files[2], max_rows=1)]
    prepared = run(chatml, files[0], validation=sources)
    assert prepared.source_names == ("hello", "question") and prepared.validation_source_of.tolist() == [0, 0, 1]
    for name, text in zip(("hello", "hello", "question"), texts(chatml, prepared.validation), strict=True):
        assert name in text
    assert [counts.setting for counts in prepared.ledger.sources] == ["data.train", "data.validation[0]", "data.validation[1]"]
    prepared.save(tmp_path / "prepared")
    loaded = Prepared.load(tmp_path / "prepared")
    assert loaded.source_names == prepared.source_names
    assert loaded.validation_source_of.tolist() == prepared.validation_source_of.tolist()


@pytest.mark.parametrize("packing", [False, True])
def test_held_out_samples_know_the_source_that_they_are_from(chatml, write_jsonl, packing):
    files = [write_jsonl([chat(text, "hi")] * 10, f"{text}.jsonl") for text in ("hello", "question")]
    prepared = run(chatml, files, validation_fraction=0.3, packing=packing, max_tokens=60)
    assert prepared.source_names == ("hello", "question")
    for sample, source in zip(texts(chatml, prepared.validation), prepared.validation_source_of, strict=True):
        assert prepared.source_names[source] in sample and prepared.source_names[1 - source] not in sample
    assert run(chatml, files).source_names == () and run(chatml, files).validation_source_of is None


@pytest.mark.parametrize("missing", [{"train": "hub://org/name"}, {"validation": "nowhere.jsonl"}])
def test_a_source_that_cannot_be_had_is_told_before_another_is_tokenised(chatml, write_jsonl, tmp_path, missing):
    there, cache = write_jsonl([chat("hello", "hi")]), tmp_path / "cache"
    with pytest.raises(UserError, match=r"hub://org/name|nowhere.jsonl"):
        run(chatml, [there, *filter(None, [missing.get("train")])], validation=missing.get("validation"), cache_dir=str(cache))
    assert not cache.exists()


def test_names_of_sources_are_short_as_far_as_they_stay_unique():
    assert short_names(["a/train.jsonl.gz", "b/*.txt", "c/folder/"]) == ["train", "b/*.txt", "folder"]
    assert short_names(["a/train.jsonl", "b/train.csv", "x", "x"]) == ["a/train.jsonl", "b/train.csv", "x (1)", "x (2)"]


def test_max_rows_reads_only_the_first(chatml, write_jsonl):
    prepared = run(chatml, write_jsonl([chat("hello", "hi")] * 3 + ["{broken"]), max_rows=2)
    assert len(prepared.train) == 2 and prepared.ledger.sources[0].read == 2


def test_several_workers_give_the_same_rows_and_the_same_errors_in_the_same_order(chatml):
    rows = [(f"r:{n}", Conversation((Turn("user", f"question {n}"), Turn("assistant", "hello " * (n % 7 + 1))))) for n in range(200)]
    rows[150] = ("r:150", Conversation((Turn("assistant", "x"),)))
    one, two = (list(encode_rows(rows, chatml, yields="conversations", train_on="assistant", num_workers=workers)) for workers in (1, 2))
    for (where, here), (same_where, there) in zip(one, two, strict=True):
        assert where == same_where and type(here) is type(there)
        if isinstance(here, UserError):
            assert where == "r:150" and str(here) == str(there)
        else:
            assert np.array_equal(here.ids, there.ids) and np.array_equal(here.trained, there.trained)


def test_a_worker_that_is_killed_is_told_with_what_to_write(chatml):
    others = set(multiprocessing.active_children())

    def rows():
        for n in range(200):
            yield f"r:{n}", Conversation((Turn("user", "hello"), Turn("assistant", "hi")))
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()

    with pytest.raises(UserError, match="data.num_workers: got 2, of which one was killed, perhaps because") as caught:
        list(encode_rows(rows(), chatml, yields="conversations", train_on="assistant", num_workers=2))
    assert "write    data.num_workers=1" in str(caught.value)


@pytest.mark.parametrize("packing", [False, True])
def test_what_one_process_saves_another_loads_whole(chatml, write_jsonl, tmp_path, packing):
    path = write_jsonl([chat(f"question {n}", "hi") for n in range(10)])
    prepared = run(chatml, path, validation_fraction=0.2, packing=packing, max_tokens=60)
    prepared.save(tmp_path / "prepared")
    loaded = Prepared.load(tmp_path / "prepared")
    assert loaded.ledger == prepared.ledger and loaded.stop_ids == prepared.stop_ids
    for name in ("train", "validation"):
        assert texts(chatml, getattr(loaded, name)) == texts(chatml, getattr(prepared, name))


def test_a_tokenizer_that_cannot_do_it_is_refused_before_rows_are_read(tokenizer_with, write_jsonl):
    with pytest.raises(UserError, match="without a chat template"):
        run(tokenizer_with(None), write_jsonl([chat("hi", "hi")] + ["{broken"] * 3))


def test_p1_a_row_that_gets_lost_on_the_way_is_noticed(chatml, write_jsonl, monkeypatch):
    monkeypatch.setattr(framework.data.source_tokens, "encode_rows", lambda *args, **options: islice(encode_rows(*args, **options), 2))
    with pytest.raises(RuntimeError, match=r"rows of data\.train were lost"):
        run(chatml, write_jsonl([chat("hello", "hi")] * 3))
