"""Several sources: one after the other, or mixed in exact proportions of tokens at any time."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.cli.fit import facts_of
from framework.config.check import check_settings
from framework.config.compose import compose
from framework.config.errors import UserError
from framework.config.schema import ColumnsConfig, DataConfig, RecipeConfig, SourceConfig
from framework.config.typed import from_dict, to_dict
from framework.data.batches import StepBatches
from framework.data.dataset import TokenDataset, TokenDatasetBuilder
from framework.data.mix import Mix, joined, mix_of
from framework.data.order import permutation
from framework.data.prepare import Prepared, prepare
from framework.data.sources import peek
from tests.data.templates import chat


def samples(source: int, count: int, longest: int) -> TokenDataset:
    """`count` samples of different lengths, whose tokens are all the number of their source."""
    return of_lengths(np.random.default_rng(source).integers(2, longest + 1, count), source)


def of_lengths(lengths, source: int = 0) -> TokenDataset:
    builder = TokenDatasetBuilder()
    for length in lengths:
        builder.add(np.full(length, source, np.int32), np.arange(length) > 0)
    return builder.build()


SOURCES = [samples(0, 3000, 30), samples(1, 400, 100), samples(2, 50, 10)]
WEIGHTS = [0.2, 5.0, 0.05]
EVERYTHING = joined(SOURCES)
SOURCE_OF = np.repeat(range(len(SOURCES)), [len(source) for source in SOURCES])
MIX = mix_of(SOURCES, WEIGHTS)


def epoch_of(epoch: int, mix: Mix = MIX, seed: int = 3, shuffle: bool = True) -> np.ndarray:
    return mix.order(EVERYTHING.lengths, seed, epoch, shuffle=shuffle)


def test_an_epoch_is_about_as_long_as_all_sources_together_and_says_how_often_it_passes_over_each():
    tokens = np.array([source.total_tokens for source in SOURCES])
    assert np.allclose(np.array(MIX.passes) * tokens, np.array(WEIGHTS) / sum(WEIGHTS) * tokens.sum())
    assert MIX.passes[0] < 1 < MIX.passes[1], "one in part, one several times"
    for epoch in range(3):
        assert len(epoch_of(epoch)) == MIX.samples_per_epoch
        assert EVERYTHING.lengths[epoch_of(epoch)].sum() == pytest.approx(EVERYTHING.total_tokens, rel=0.03)


def test_sources_are_joined_sample_by_sample():
    inside = [source[i].input_ids.tolist() for source in SOURCES for i in range(len(source))]
    assert [EVERYTHING[i].input_ids.tolist() for i in range(len(EVERYTHING))] == inside
    assert EVERYTHING.trained_tokens == sum(source.trained_tokens for source in SOURCES)


@pytest.mark.parametrize("shuffle", [True, False])
def test_later_epochs_go_on_with_the_rest_of_each_source_and_none_is_seen_twice_before_all_are_seen_once(shuffle):
    stream = np.concatenate([epoch_of(epoch, shuffle=shuffle) for epoch in range(40)])
    for number, source in enumerate(SOURCES):
        seen = stream[SOURCE_OF[stream] == number]
        assert len(seen) > len(source), "every source is passed over more than once in all"
        for start in range(0, len(seen) - len(source), len(source)):
            assert len(np.unique(seen[start : start + len(source)])) == len(source)
        passes = np.split(seen, range(len(source), len(seen), len(source)))
        assert np.array_equal(passes[0], passes[1][: len(passes[0])]) != shuffle or len(passes[1]) < 2


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=30), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.5, 8), min_size=4, max_size=4),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_an_epoch_is_found_without_those_before_it(lengths, weights, seed, data):
    """The stream, made from its beginning by the rule alone, is what the epochs are parts of."""
    sources = [of_lengths(each) for each in lengths]
    try:
        mix = mix_of(sources, weights[: len(sources)])
    except UserError:
        return
    everything, epoch = joined(sources), data.draw(st.integers(0, 20))
    places = []  # (the token of the mix where the middle of the sample would be, source, sample)
    for number, (source, start, share) in enumerate(zip(sources, mix.starts[:-1], mix.shares, strict=True)):
        given = 0
        for turn in range(int((epoch + 2) * (mix.passes[number] + 1)) + 2):
            for sample in permutation(seed, "epoch", turn, len(source), stream=number):
                length = int(source.lengths[sample])
                places.append(((given + length / 2) / share, number, start + int(sample)))
                given += length
    stream = [sample for _, _, sample in sorted(places, key=lambda place: place[:2])]
    expected = stream[epoch * mix.samples_per_epoch : (epoch + 1) * mix.samples_per_epoch]
    assert mix.order(everything.lengths, seed, epoch, shuffle=True).tolist() == expected


@pytest.mark.parametrize(("world_size", "shuffle"), [(1, True), (3, False)])
def test_p37_the_realised_share_of_tokens_is_within_a_percent_of_the_weights_over_1000_steps(world_size, shuffle):
    """From the first hundred steps on nearly so, over the ends of epochs, and on all ranks together."""
    ranks = [
        StepBatches(EVERYTHING, micro_batch_size=8, accumulate=1, rank=rank, world_size=world_size, seed=3, shuffle=shuffle, mix=MIX)
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
            if steps in (100, 1000):
                trained = np.array([source.trained_tokens / source.total_tokens for source in SOURCES])
                shares = tokens / trained / (tokens / trained).sum()
                assert np.allclose(shares, np.array(WEIGHTS) / sum(WEIGHTS), rtol=0.01 if steps == 1000 else 0.05)
        if steps >= 1000:
            break


def test_p17_p38_every_epoch_is_in_a_new_order_that_all_ranks_and_a_resumed_run_share():
    assert np.array_equal(epoch_of(1), epoch_of(1)) and not np.array_equal(epoch_of(1), epoch_of(1, seed=4))
    assert not np.array_equal(np.sort(epoch_of(0)), np.sort(epoch_of(1))), "other samples, too"
    whole = StepBatches(EVERYTHING, micro_batch_size=4, accumulate=2, seed=3, mix=MIX)
    whole.set_epoch(1)
    rest = StepBatches(EVERYTHING, micro_batch_size=4, accumulate=2, seed=3, mix=MIX, first_step=len(whole) + 3)
    for one, other in zip(list(whole)[3:], rest, strict=True):
        assert all(torch.equal(mine["input_ids"], its["input_ids"]) for mine, its in zip(one, other, strict=True))


def test_a_source_of_which_an_epoch_would_have_no_sample_is_refused():
    with pytest.raises(UserError, match=r"data.train\[1\].weight: got 1e-06 of the weights 1, 1e-06") as caught:
        mix_of(SOURCES[:2], [1, 1e-6])
    least = float(caught.value.problems[0].expected.split()[0])
    assert mix_of(SOURCES[:2], [1, least * 1.05]).passes[1] * len(SOURCES[1]) >= 1


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
    assert len(prepared.validation) == 5 and prepared.mix is None


def test_with_weights_the_ledger_says_how_often_each_source_is_passed_over(chatml, three, tmp_path):
    sources = [
        SourceConfig(path=three[0], weight=1),
        SourceConfig(path=three[1], columns=ColumnsConfig(instruction="question"), weight=3),
        SourceConfig(path=three[2], weight=1),
    ]
    prepared = prepare(DataConfig(train=sources, max_tokens=32), chatml, seed=0, show_progress=False)
    tokens = [counts.tokens for counts in prepared.ledger.sources]
    assert sum(tokens) == pytest.approx(prepared.train.total_tokens, abs=2)
    assert np.allclose(np.array(tokens) / sum(tokens), [0.2, 0.6, 0.2], rtol=0.005)
    assert sum(counts.samples for counts in prepared.ledger.sources) == pytest.approx(prepared.mix.samples_per_epoch, abs=2)
    facts = facts_of(prepared.train, prepared.mix)
    assert (facts.samples, facts.tokens) == (prepared.mix.samples_per_epoch, prepared.train.total_tokens)
    assert facts.trained_tokens == pytest.approx(sum(counts.trained_tokens for counts in prepared.ledger.sources), abs=2)
    assert f"weight 3: {tokens[1] / sum(tokens):.2%} of the tokens of an epoch, which passes over it " in prepared.ledger.table()
    assert set(chatml.decode(prepared.stop_ids).split()) == {"<|im_end|>"}
    prepared.save(tmp_path / "prepared")
    loaded = Prepared.load(tmp_path / "prepared")
    assert loaded.ledger == prepared.ledger and loaded.mix == prepared.mix


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
    mix, packs = prepared.mix, prepared.train
    assert mix.samples_per_epoch == pytest.approx(sum(counts.packs for counts in prepared.ledger.sources), abs=1)
    order = np.concatenate([mix.order(packs.lengths, 0, epoch, shuffle=True) for epoch in range(50)])
    second = order >= mix.starts[1]
    assert packs.lengths[order[second]].sum() / packs.lengths[order].sum() == pytest.approx(0.75, rel=0.005)
    assert facts_of(packs, mix).packed == mix.documents_per_epoch > mix.samples_per_epoch
    for index in range(len(packs)):
        assert ("what is" in chatml.decode(packs[index].input_ids)) == (index >= mix.starts[1])
