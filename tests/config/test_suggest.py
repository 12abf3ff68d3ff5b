"""Did you mean: likely meanings come first, unlikely ones not at all."""

import pytest

from framework.config.suggest import NAMES_ELSEWHERE, closest, suggest_paths, unknown_key
from framework.config.typed import schema_paths


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("zero.stge", "zero.stage"),
        ("stage", "zero.stage"),
        ("zreo.stage", "zero.stage"),
        ("zreo.stge", "zero.stage"),
        ("zreo", "zero"),
        ("trainer.zero", "zero"),
        ("trainer.lr", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("trainer.learning_rate", "optimizer.lr"),
        ("trainer.max_stps", "trainer.max_steps"),
        ("train.max_steps", "trainer.max_steps"),
        ("model.arch.hiden_size", "model.arch.hidden_size"),
        ("hidden_size", "model.arch.hidden_size"),
        ("gradient_accumulation_steps", "trainer.accumulate"),
        ("trainer.num_train_epochs", "trainer.epochs"),
        ("data.max_seq_length", "data.max_tokens"),
        ("bf16", "precision"),
        ("sed", "seed"),
    ],
)
def test_what_was_meant_comes_first(written, meant):
    assert suggest_paths(written, schema_paths())[0] == meant


@pytest.mark.parametrize("written", ["zero.bad", "foo", "foo.bar", "optimizer.xyz", "zero.stage.x.y"])
def test_nothing_is_proposed_where_nothing_is_near(written):
    assert suggest_paths(written, schema_paths()) == []


def test_a_last_word_of_several_groups_prefers_the_group_that_was_named():
    assert suggest_paths("data.model.path", schema_paths())[0] == "model.path"
    assert suggest_paths("logger.nme", schema_paths())[0] == "logger.name"


def test_every_name_of_another_trainer_leads_to_a_setting_of_ours():
    assert set(NAMES_ELSEWHERE.values()) <= set(schema_paths())
    assert not set(NAMES_ELSEWHERE) & {path.rpartition(".")[2] for path in schema_paths()}, "our own words need no translation"


def test_the_fix_can_be_copied():
    assert unknown_key("optimizer.learning_rate", schema_paths(), "3e-4").fix == "optimizer.lr=3e-4"
    assert unknown_key("zreo", schema_paths(), "3", {"zero": ["0", "1", "2", "3"]}).fix == "zero=3"
    assert unknown_key("bf16", schema_paths(), "true", {"precision": ["bf16", "fp32"]}).fix == "precision=bf16"


def test_without_a_suggestion_the_keys_of_the_group_are_listed():
    assert unknown_key("zero.bad", schema_paths()).expected.startswith("one of zero.stage, zero.shard_size, zero.shard_optimizer")
    assert "which has no keys" in unknown_key("zero.stage.x", schema_paths()).expected


def test_options_know_other_trainers_words_and_near_spellings():
    assert closest("bf16-mixed", ["fp32", "bf16"]) == ["bf16"]
    assert closest("Cosin", ["cosine", "linear"]) == ["cosine"]
    assert closest("7", ["0", "1", "2", "3"]) == []
