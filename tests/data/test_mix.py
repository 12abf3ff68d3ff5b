"""Several sources: one after the other, or mixed in exact proportions of tokens at any time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from framework.config.check import check_settings
from framework.config.compose import compose
from framework.config.errors import UserError
from framework.config.schema import ColumnsConfig, DataConfig, RecipeConfig, SourceConfig
from framework.config.typed import from_dict, to_dict
from framework.data.batches import StepBatches
from framework.data.dataset import TokenDataset, TokenDatasetBuilder
from framework.data.mix import joined, weighted
from framework.data.prepare import Prepared, prepare
from framework.data.sources import peek
from tests.data.templates import chat


def samples(source: int, count: int, longest: int) -> TokenDataset:
    """`count` samples of different lengths, whose tokens are all the number of their source."""
    builder, lengths = TokenDatasetBuilder(), np.random.default_rng(source).integers(2, longest + 1, count)
    for length in lengths:
        builder.add(np.full(length, source, np.int32), np.arange(length) > 0)
    return builder.build()


SOURCES = [samples(0, 3000, 30), samples(1, 400, 100), samples(2, 50, 10)]
WEIGHTS = [0.2, 5.0, 0.05]


def mixed(weights=WEIGHTS, seed=0):
    taken = weighted(SOURCES, weights, seed)
    parts = [part.samples for part in taken]
    return taken, joined(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])


def test_p37_an_epoch_has_every_source_in_proportion_to_its_weight():
    taken, everything, _ = mixed()
    shares = np.array([part.samples.total_tokens for part in taken]) / everything.total_tokens
    assert np.allclose(shares, np.array(WEIGHTS) / sum(WEIGHTS), rtol=0.005)
    assert [part.passes for part in taken] == [
        part.samples.total_tokens / source.total_tokens for part, source in zip(taken, SOURCES, strict=True)
    ]
    assert taken[0].passes < 1 < taken[1].passes, "one in part, one several times"
    whole = int(taken[1].passes)
    assert whole * len(SOURCES[1]) <= len(taken[1].samples) <= (whole + 1) * len(SOURCES[1])


def test_sources_are_joined_sample_by_sample():
    everything = joined(SOURCES)
    inside = [source[i].input_ids.tolist() for source in SOURCES for i in range(len(source))]
    assert [everything[i].input_ids.tolist() for i in range(len(everything))] == inside
    assert everything.trained_tokens == sum(source.trained_tokens for source in SOURCES)


def test_an_epoch_is_about_as_long_as_all_sources_together():
    _, everything, _ = mixed([1, 1, 0.1])
    assert everything.total_tokens == pytest.approx(sum(source.total_tokens for source in SOURCES), rel=0.02)


def test_what_is_taken_depends_on_the_seed_alone():
    lengths = [np.diff(mixed(seed=seed)[0][0].samples.offsets).tolist() for seed in (1, 1, 2)]
    assert lengths[0] == lengths[1] != lengths[2]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_p37_the_realised_share_of_tokens_is_within_a_percent_of_the_weights_over_1000_steps(world_size, shuffle):
    """From the first hundred steps on nearly so, over the ends of epochs, and on all ranks together."""
    _, everything, source_of = mixed()
    ranks = [
        StepBatches(
            everything, micro_batch_size=2, accumulate=4, rank=rank, world_size=world_size, seed=3, shuffle=shuffle, source_of=source_of
        )
        for rank in range(world_size)
    ]
    tokens, steps = np.zeros(len(SOURCES)), 0
    for epoch in range(1000):
        for rank in ranks:
            rank.set_epoch(epoch)
        for step in zip(*ranks, strict=True):
            for micro_batch in (micro_batch for rank in step for micro_batch in rank):
                predicted = micro_batch["input_ids"][micro_batch["labels"] != -100].numpy()
                tokens += np.bincount(predicted, minlength=len(SOURCES))
            steps += 1
            if steps == 1000:
                break
        if steps == 1000:
            break
    trained = np.array([source.trained_tokens / source.total_tokens for source in SOURCES])
    shares = tokens / trained / (tokens / trained).sum()
    assert np.allclose(shares, np.array(WEIGHTS) / sum(WEIGHTS), rtol=0.01)


def test_p38_every_epoch_of_a_mix_is_in_a_new_order_that_all_ranks_share():
    _, everything, source_of = mixed()
    batches = StepBatches(everything, micro_batch_size=4, accumulate=1, seed=3, source_of=source_of)
    first = [step[0]["input_ids"].shape for step in batches]
    assert first == [step[0]["input_ids"].shape for step in batches]
    batches.set_epoch(1)
    assert first != [step[0]["input_ids"].shape for step in batches]


def test_sources_that_are_too_small_for_their_weights_are_refused():
    with pytest.raises(UserError, match="data.train: got weights 1, 1e-06 for sources of"):
        weighted(SOURCES[:2], [1, 1e-6], 0)


# ---- from a recipe to samples
@pytest.fixture
def three(write_jsonl):
    """Files of three formats."""
    return (
        write_jsonl([chat(f"question {n}", "hi") for n in range(40)], "a.jsonl"),
        write_jsonl([{"question": f"what is {n}", "output": "hello the user"} for n in range(30)], "b.jsonl"),
        write_jsonl([{"text": "hello world " * 9}] * 20, "c.jsonl"),
    )


def test_without_weights_sources_follow_each_other_each_read_in_its_own_way(chatml, three):
    sources = [three[0], SourceConfig(path=three[1], columns=ColumnsConfig(instruction="question"), max_rows=10)]
    prepared = prepare(DataConfig(train=sources, max_rows=15, validation_fraction=0.2), chatml, seed=0, show_progress=False)
    assert [(counts.setting, counts.read, counts.kept, counts.held_out) for counts in prepared.ledger.sources] == [
        ("data.train[0]", 15, 12, 3), ("data.train[1]", 10, 8, 2),
    ]  # fmt: skip
    texts = [chatml.decode(prepared.train[i].input_ids) for i in range(len(prepared.train))]
    assert len(texts) == 20 and all("question" in text for text in texts[:12]) and all("what is" in text for text in texts[12:])
    assert len(prepared.validation) == 5 and prepared.source_of is None


def test_with_weights_the_ledger_says_how_often_each_source_is_passed_over(chatml, three, tmp_path):
    sources = [
        SourceConfig(path=three[0], weight=1),
        SourceConfig(path=three[1], columns=ColumnsConfig(instruction="question"), weight=3),
        SourceConfig(path=three[2], weight=1),
    ]
    prepared = prepare(DataConfig(train=sources, max_tokens=32), chatml, seed=0, show_progress=False)
    tokens = [counts.tokens for counts in prepared.ledger.sources]
    assert sum(tokens) == prepared.train.total_tokens and len(prepared.source_of) == len(prepared.train)
    assert np.allclose(np.array(tokens) / sum(tokens), [0.2, 0.6, 0.2], rtol=0.005)
    assert [counts.samples for counts in prepared.ledger.sources] == np.bincount(prepared.source_of).tolist()
    assert f"weight 3: {tokens[1] / sum(tokens):.2%} of the tokens of an epoch, which passes over it " in prepared.ledger.table()
    assert set(chatml.decode(prepared.stop_ids).split()) == {"<|im_end|>"}
    prepared.save(tmp_path / "prepared")
    loaded = Prepared.load(tmp_path / "prepared")
    assert loaded.ledger == prepared.ledger and np.array_equal(loaded.source_of, prepared.source_of)


def test_a_wrong_row_of_one_source_is_named_with_it(chatml, three, write_jsonl):
    config = DataConfig(train=[three[0], write_jsonl(["{broken"] * 9, "d.jsonl"), "nowhere.jsonl"])
    assert [problem.path.rpartition("/")[2] for problem in peek(config)] == [*(f"d.jsonl:{n}" for n in range(1, 6)), "data.train[2]"]
    with pytest.raises(UserError, match="d.jsonl:1: got broken JSON"):
        prepare(config, chatml, seed=0, show_progress=False)


def test_a_list_can_be_written_on_the_command_line_and_comes_back_from_the_file_of_a_run():
    words = ["+recipe=llama_sft", "data.train=[a.jsonl,{path:b.jsonl,columns:{text:body}}]", "data.validation_fraction=0"]
    recipe = compose(words).recipe
    assert recipe.data.train == ["a.jsonl", SourceConfig(path="b.jsonl", columns=ColumnsConfig(text="body"))]
    assert from_dict(RecipeConfig, json.loads(json.dumps(to_dict(recipe)))) == recipe
    assert compose([*words[:1], "data.train=a.jsonl"]).recipe.data.train == "a.jsonl"


def test_a_list_in_a_recipe_is_read_and_its_mistakes_are_all_named(tmp_path):
    recipe = tmp_path / "mine.yaml"
    sources = ["path: a.jsonl, wight: 2", "path: b.jsonl, format: alpcaa", "path: c.jsonl, max_rows: many"]
    recipe.write_text("defaults: [quickstart]\ndata:\n  train:\n" + "".join(f"    - {{{source}}}\n" for source in sources))
    with pytest.raises(UserError) as caught:
        compose([f"+recipe={recipe}"])
    message = str(caught.value)
    assert "data.train[0].wight: got a key that does not exist" in message and "expected data.train[0].weight" in message
    assert "data.train[1].format: got alpcaa" in message and "mine.yaml:3" in message
    assert "data.train[2].max_rows: got many" in message


@pytest.mark.parametrize(("train", "said"), [
    ([], "data.train: got an empty list"),
    ([SourceConfig(weight=1)], "data.train[0].path: got nothing"),
    ([SourceConfig(path="a", weight=1), "b"], "data.train: got no weight for data.train[1] and one for the others"),
    ([SourceConfig(path="a", weight=0)], "data.train[0].weight: got 0"),
    ([SourceConfig(path="a", max_rows=0)], "data.train[0].max_rows: got 0"),
])  # fmt: skip
def test_settings_of_sources_that_make_no_sense_are_named(train, said):
    problems = check_settings(RecipeConfig(data=DataConfig(train=train)))
    assert said in "\n".join(map(str, problems))


def test_validation_data_have_no_weights():
    problems = check_settings(RecipeConfig(data=DataConfig(train="a", validation=["b", SourceConfig(path="c", weight=2)])))
    assert "data.validation[1].weight: got 2\n    expected no weight: validation data are all used, once" in "\n".join(map(str, problems))


def test_p37_packs_of_a_mix_keep_the_shares_and_their_documents(chatml, three):
    """Each pack has one source."""
    sources = [SourceConfig(path=three[0], weight=1), SourceConfig(path=three[1], columns=ColumnsConfig(instruction="question"), weight=3)]
    prepared = prepare(DataConfig(train=sources, max_tokens=128, packing=True), chatml, seed=0, show_progress=False)
    tokens = [counts.tokens for counts in prepared.ledger.sources]
    assert np.allclose(np.array(tokens) / sum(tokens), [0.25, 0.75], rtol=0.005)
    assert len(prepared.source_of) == len(prepared.train) == sum(counts.packs for counts in prepared.ledger.sources)
    for index, source in enumerate(prepared.source_of):
        pack = prepared.train[index]
        assert ("what is" in chatml.decode(pack.input_ids)) == (source == 1)
