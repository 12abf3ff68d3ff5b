"""Dictionaries become the dataclasses of the schema; everything that does not fit is said at once."""

import pytest

from framework.config.errors import UserError
from framework.config.schema import LlamaConfig, ModelConfig, RecipeConfig, RopeScaling
from framework.config.typed import convert, from_dict, schema_paths, to_dict


def problems(data):
    with pytest.raises(UserError) as error:
        from_dict(RecipeConfig, data)
    return {problem.path: problem for problem in error.value.problems}


def test_a_recipe_survives_the_way_through_a_dictionary():
    model = ModelConfig(arch=LlamaConfig(rope_scaling=RopeScaling(kind="yarn", factor=2.0)))
    recipe = RecipeConfig(name="x", model=model)
    assert from_dict(RecipeConfig, to_dict(recipe)) == recipe


def test_what_is_left_out_keeps_its_default():
    assert from_dict(RecipeConfig, {"zero": {"stage": 3}}).zero.prefetch_bytes == RecipeConfig().zero.prefetch_bytes


def test_yaml_reads_1e_4_as_text_and_it_is_a_number_all_the_same():
    assert from_dict(RecipeConfig, {"optimizer": {"lr": "1e-4"}}).optimizer.lr == 1e-4


@pytest.mark.parametrize(("value", "expected"), [(10, 10), (1e3, 1000), ("1e3", 1000), (2.0, 2)])
def test_whole_numbers_may_be_written_as_floats(value, expected):
    steps = from_dict(RecipeConfig, {"trainer": {"max_steps": value}}).trainer.max_steps
    assert steps == expected and type(steps) is int


@pytest.mark.parametrize("value", [1.5, True, "ten", [1], {"a": 1}, float("nan")])
def test_what_is_no_whole_number_is_refused(value):
    assert problems({"trainer": {"max_steps": value}})["trainer.max_steps"].expected == "a whole number"


@pytest.mark.parametrize("value", ["inf", "nan", True, "fast", None])
def test_what_is_no_number_is_refused(value):
    assert problems({"optimizer": {"lr": value}})["optimizer.lr"].expected == "a number"


def test_text_is_not_guessed_from_truth_values():
    assert from_dict(RecipeConfig, {"name": 12}).name == "12"
    assert "name" in problems({"name": True})
    assert problems({"model": {"compile": "yes"}})["model.compile"].expected == "true | false"


def test_a_choice_offers_its_values_and_the_one_that_was_meant():
    found = problems({"precision": {"compute_dtype": "bf16"}})["precision.compute_dtype"]
    assert (found.got, found.expected) == ("bf16", "one of float32, bfloat16, float16, float64")
    assert found.fix == "precision.compute_dtype=bfloat16"
    assert from_dict(RecipeConfig, {"zero": {"stage": "2"}}).zero.stage == 2
    assert "zero.stage" in problems({"zero": {"stage": True}}), "true is not stage 1"


def test_lists_of_fixed_length():
    assert from_dict(RecipeConfig, {"optimizer": {"betas": [0.9, 0.99]}}).optimizer.betas == (0.9, 0.99)
    assert "2 values" in problems({"optimizer": {"betas": [0.9]}})["optimizer.betas"].expected
    assert problems({"optimizer": {"betas": [0.9, "x"]}})["optimizer.betas[1]"].got == "x"


def test_settings_that_may_be_null_are_typed_when_they_are_not():
    assert from_dict(RecipeConfig, {"model": {"arch": {"rope_scaling": {"factor": 4}}}}).model.arch.rope_scaling.factor == 4.0
    assert "model.arch.rope_scaling.kind" in problems({"model": {"arch": {"rope_scaling": {"kind": "linaer"}}}})


def test_a_value_where_a_group_should_be_points_to_the_defaults_list():
    assert problems({"zero": 3})["zero"].fix == "- override /zero: 3"


def test_an_unset_value_is_named():
    assert problems({"data": {"train": "???"}})["data.train"].got == "nothing"


def test_all_problems_come_at_once():
    data = {"zero": {"stge": 1}, "trainer": {"max_steps": "x", "devices": "two"}, "logger": {"name": "w"}, "nme": 1}
    assert set(problems(data)) == {"zero.stge", "trainer.max_steps", "trainer.devices", "logger.name", "nme"}


def test_what_fits_is_kept_beside_what_does_not():
    recipe, found = convert(RecipeConfig, {"seed": 5, "optimizer": {"lr": "x", "eps": 1e-6}})
    assert (recipe.seed, recipe.optimizer.eps, len(found)) == (5, 1e-6, 1)


def test_every_path_of_the_schema_is_known():
    known = schema_paths()
    assert {"zero", "zero.stage", "model.arch.rope_scaling.factor", "data.columns.role", "name"} <= set(known)


def test_a_list_of_settings_is_a_value_whose_items_are_checked():
    group = {"pattern": "embed_tokens", "lr_factor": "1e-1"}
    assert from_dict(RecipeConfig, {"optimizer": {"groups": [group]}}).optimizer.groups[0].lr_factor == 0.1
    assert "optimizer.groups" in schema_paths() and "optimizer.groups.pattern" not in schema_paths()
    found = problems({"optimizer": {"groups": [group, {"patern": "x", "weight_decay": "much"}]}})
    assert found.keys() == {"optimizer.groups[1].patern", "optimizer.groups[1].weight_decay"}
