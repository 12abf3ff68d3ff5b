"""How recipes are found, built on one another and overridden, and that a wrong one is explained as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from framework.cli.check import check_everything
from framework.config.check import check_settings
from framework.config.compose import compose
from framework.config.errors import Problem, UserError
from framework.config.paths import asset_dir
from framework.config.schema import RecipeConfig
from framework.config.typed import to_dict

RECIPES = sorted(path.stem for path in asset_dir("recipes").glob("*.yaml"))
NAMED = dict.fromkeys(("optimizer", "schedule", "logger"), "name")
DISCRIMINATORS = NAMED | {
    "zero": "stage",
    "precision": "compute_dtype",
    "offload": "optimizer",
    "model": "arch",
    "data": "format",
    "kernels": "mode",
}
"""The key that a group's option is there to set."""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def recipe(*arguments: str) -> RecipeConfig:
    """What the arguments mean, files and hardware not looked at."""
    return compose(arguments).recipe


def problems(*arguments: str, check=None) -> dict:
    with pytest.raises(UserError) as error:
        compose(arguments, check=check)
    return {problem.path: problem for problem in error.value.problems}


# ---- the shipped recipes
@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_compose(name):
    assert recipe(f"+recipe={name}").name == name


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_are_short_and_begin_with_how_to_run_them(name):
    lines = (asset_dir("recipes") / f"{name}.yaml").read_text().splitlines()
    assert len(lines) <= 30
    assert lines[0].startswith("# ") and any("scripts/train.py" in line for line in lines[:3])


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_choose_options_and_never_restate_what_an_option_sets(name):
    body = yaml.safe_load((asset_dir("recipes") / f"{name}.yaml").read_text())
    restated = [f"{group}.{key}" for group, key in DISCRIMINATORS.items() if key in body.get(group, {})]
    assert restated == []


def test_every_option_sets_the_key_that_the_group_is_about():
    for group, key in DISCRIMINATORS.items():
        for option in (asset_dir("conf") / group).glob("*.yaml"):
            assert key in yaml.safe_load(option.read_text()), option


def test_every_shipped_option_composes():
    groups = {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in asset_dir("conf").iterdir() if group.is_dir()}
    for turn in range(max(map(len, groups.values()))):
        choices = {group: options[turn % len(options)] for group, options in groups.items()}
        compose([f"{group}={option}" for group, option in choices.items()])


def test_conf_holds_no_setting_that_the_schema_does_not_know():
    for option in asset_dir("conf").glob("*/*.yaml"):
        known = to_dict(RecipeConfig())[option.parent.name]
        assert set(yaml.safe_load(option.read_text())) <= set(known), option


# ---- finding a recipe
def test_a_recipe_needs_no_plus():
    assert recipe("recipe=quickstart") == recipe("+recipe=quickstart")


@pytest.mark.parametrize("given", ["./mine.yaml", "mine.yaml", "sub/../mine.yaml", "{folder}/mine.yaml", "~/mine.yaml", "./mine"])
def test_a_recipe_can_be_a_file(folder, monkeypatch, given):
    monkeypatch.setenv("HOME", str(folder))
    (folder / "sub").mkdir()
    write(folder / "mine.yaml", "name: mine\n")
    assert recipe(f"+recipe={given.format(folder=folder)}").name == "mine"


def test_a_recipe_file_may_have_an_odd_name(folder):
    write(folder / "my run (2).yaml", "name: odd\n")
    assert recipe("+recipe=./my run (2).yaml").name == "odd"


def test_an_option_of_the_users_comes_before_the_shipped_one_of_its_name(folder):
    write(folder / "own/zero/2.yaml", "stage: 2\nprefetch_bytes: 77\n")
    write(folder / "own/config.yaml", "name: a recipe that is called config\n")
    assert recipe("--config-dir", "own", "+recipe=llama_sft").zero.prefetch_bytes == 77
    assert recipe("--config-dir", "own", "+recipe=quickstart", "zero=2").zero.prefetch_bytes == 77
    assert recipe("--config-dir", "own", "+recipe=quickstart", "zero=3").zero.prefetch_bytes != 77
    assert recipe("--config-dir", "own", "+recipe=config").name == "a recipe that is called config"


def test_config_dir_adds_recipes_and_options_of_the_users(folder):
    write(folder / "own/mine.yaml", "defaults:\n  - override /zero: large\n")
    write(folder / "own/zero/large.yaml", "stage: 3\nprefetch_bytes: 1000\n")
    assert recipe("--config-dir", "own", "+recipe=mine").zero.prefetch_bytes == 1000
    assert recipe("--config-dir=own", "+recipe=quickstart", "zero=large").zero.stage == 3


def test_a_users_recipe_comes_before_a_shipped_one_of_the_same_name(folder):
    write(folder / "own/quickstart.yaml", "name: mine\n")
    assert recipe("--config-dir", "own", "+recipe=quickstart").name == "mine"


def test_recipes_are_found_through_the_environment(folder, monkeypatch):
    write(folder / "own/mine.yaml", "name: mine\n")
    monkeypatch.setenv("FRAMEWORK_RECIPES", f"/nowhere:{folder}/own")
    assert recipe("+recipe=mine").name == "mine"


def test_a_recipe_builds_on_another(folder):
    write(folder / "child.yaml", "defaults:\n  - sub/parent.yaml\n  - override /zero: 1\nname: child\n")
    write(folder / "sub/parent.yaml", "defaults:\n  - ./grandparent.yaml\n  - override /zero: 3\noptimizer: {lr: 1.0, eps: 1.0}\n")
    write(folder / "sub/grandparent.yaml", "defaults: [quickstart]\noptimizer: {lr: 2.0, weight_decay: 2.0}\n")
    composed = recipe("+recipe=./child.yaml")
    assert (composed.name, composed.zero.stage) == ("child", 1)
    assert (composed.optimizer.lr, composed.optimizer.eps, composed.optimizer.weight_decay) == (1.0, 1.0, 2.0)
    assert composed.trainer.epochs == recipe("+recipe=quickstart").trainer.epochs


# ---- choosing and overriding
def test_a_number_chooses_an_option():
    assert [recipe(f"zero={stage}").zero.stage for stage in range(4)] == [0, 1, 2, 3]
    assert recipe("+zero=3").zero.stage == 3, "a + that is not needed does no harm"


@pytest.mark.parametrize("written", ["2", '"2"'])
def test_a_number_chooses_an_option_in_a_recipe(folder, written):
    write(folder / "mine.yaml", f"defaults:\n  - override /zero: {written}\n")
    assert recipe("+recipe=./mine.yaml").zero.stage == 2


def test_command_line_beats_recipe_beats_option(folder):
    write(folder / "own/zero/mid.yaml", "stage: 2\nprefetch_bytes: 10\nreshard_after_forward: false\n")
    write(folder / "own/mine.yaml", "defaults:\n  - override /zero: mid\nzero: {prefetch_bytes: 20}\n")
    assert recipe("--config-dir", "own", "+recipe=mine").zero.prefetch_bytes == 20
    assert recipe("--config-dir", "own", "+recipe=mine", "zero.prefetch_bytes=30").zero.prefetch_bytes == 30
    assert recipe("--config-dir", "own", "zero.prefetch_bytes=30", "+recipe=mine").zero.prefetch_bytes == 30


def test_an_option_chosen_on_the_command_line_beats_what_the_recipe_sets(folder):
    write(folder / "mine.yaml", "zero: {stage: 1, prefetch_bytes: 7}\nmodel: {path: /models/x}\n")
    for arguments in (["+recipe=./mine.yaml", "zero=3", "model=llama_tiny"], ["model=llama_tiny", "zero=3", "+recipe=./mine.yaml"]):
        composed = recipe(*arguments)
        assert composed.zero.stage == 3
        assert composed.zero.prefetch_bytes == 7, "the option says nothing about it"
        assert composed.model.path is None and composed.model.arch.hidden_size == 128


def test_settings_that_only_the_schema_knows_can_be_set_without_a_plus():
    assert recipe("+recipe=llama_pretrain", "model.arch.rope_theta=1e6").model.arch.rope_theta == 1e6
    assert recipe("+recipe=llama_pretrain", "model.arch.rope_scaling.factor=2").model.arch.rope_scaling.factor == 2.0


def test_a_small_number_in_a_recipe_is_a_number(folder):
    write(folder / "mine.yaml", "optimizer: {lr: 1e-4, eps: '1e-9'}\n")
    composed = recipe("+recipe=./mine.yaml")
    assert (composed.optimizer.lr, composed.optimizer.eps) == (1e-4, 1e-9)


def test_the_words_of_the_command_line_are_kept():
    assert compose(["+recipe=quickstart", "zero=3", "hydra.verbose=true"]).overrides == ("+recipe=quickstart", "zero=3")


# ---- mistakes
def test_every_mistake_on_the_command_line_is_reported_at_once():
    found = problems("+recipe=quickstart", "zero=7", "optimizer.learning_rate=1e-4", "zreo=3", "trainer.max_steps=ten", "logger=tensorbord")
    assert set(found) == {"zero", "optimizer.learning_rate", "zreo", "trainer.max_steps", "logger"}
    assert found["zero"].expected == "one of 0, 1, 2, 3"
    assert found["optimizer.learning_rate"].fix == "optimizer.lr=1e-4"
    assert found["zreo"].fix == "zero=3"
    assert found["logger"].fix == "logger=tensorboard"


def test_every_mistake_in_a_recipe_is_reported_at_once_with_its_line(folder):
    write(folder / "mine.yaml", "defaults: []\noptimizer:\n  learning_rate: 1\ntrainer: {max_stps: 3,\n  devices: two}\nzero: 3\n")
    found = problems("+recipe=./mine.yaml")
    assert set(found) == {"optimizer.learning_rate", "trainer.max_stps", "trainer.devices", "zero"}
    assert "mine.yaml:3" in found["optimizer.learning_rate"].got
    assert "mine.yaml:5" in found["trainer.devices"].got
    assert found["zero"].fix == "- override /zero: 3"


def test_mistakes_of_all_layers_come_together():
    wrong = ["optimzer.lr=1", "precision.compute_dtype=fp16", "data.train=nowhere.jsonl", "schedule.warmup_ratio=2"]
    found = problems("+recipe=quickstart", *wrong, check=check_everything)
    assert set(found) == {"optimzer.lr", "precision.compute_dtype", "data.train", "schedule.warmup_ratio"}


def test_what_only_follows_from_a_mistake_is_not_reported():
    assert set(problems("+recipe=llama_stf", check=check_everything)) == {"recipe"}
    assert set(problems("+recipe=llama_sft", "trainer.epochs=null", "trainer.max_stps=10", check=check_everything)) == {"trainer.max_stps"}


ON_4_RANKS = ("+recipe=quickstart", "trainer.devices=4", "trainer.global_batch_size=8", "trainer.micro_batch_size=1")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["zero.stgae=3", "zero.shard_size=3"], {"zero.stgae", "zero.shard_size"}),
        (["zero.stgae=3", "zero.secondary_shard_size=2", "offload.params=cpu"], {"zero.stgae"}),
        (["zero.stgae=7", "zero.prefetch_bytes=x"], {"zero.stgae", "zero.stage", "zero.prefetch_bytes"}),
        (["zero.nothing=1", "zero.shard_size=3"], {"zero.nothing", "zero.shard_size"}),
        (["trainer.max_stps=10", "trainer.global_batch_size=6"], {"trainer.max_stps", "trainer.global_batch_size"}),
        (["trainer.devces=3", "trainer.global_batch_size=6"], {"trainer.devces"}),
        (["trainer.global_batch_size", "=", "6"], {"trainer.global_batch_size"}),
        (["trainer.devices=three", "trainer.global_batch_size=6"], {"trainer.devices"}),
        (["optimizer.learning_rate=-1", "optimizer.eps=0"], {"optimizer.learning_rate", "optimizer.lr", "optimizer.eps"}),
        (["schedule.name=cosin", "schedule.warmup_ratio=3"], {"schedule.name", "schedule.warmup_ratio"}),
    ],
)
def test_a_mistyped_key_or_value_hides_nothing_of_its_group_and_what_was_meant_counts(words, told):
    """What cannot be told (how many ranks are three?) is not used for anything."""
    assert set(problems(*ON_4_RANKS, *words, check=check_settings)) == told


def test_a_mistyped_key_in_a_recipe_hides_nothing_either(folder):
    write(folder / "mine.yaml", "defaults: [quickstart]\nzero: {stgae: 3, secondary_shard_size: 3}\ntrainer: {devces: 4}\n")
    found = problems("+recipe=./mine.yaml", "trainer.global_batch_size=6", "trainer.micro_batch_size=1", check=check_settings)
    assert set(found) == {"zero.stgae", "zero.secondary_shard_size", "trainer.devces", "trainer.global_batch_size"}
    assert "the 4 ranks" in found["zero.secondary_shard_size"].expected


def test_an_unknown_recipe_names_the_nearest_and_all():
    found = problems("+recipe=llama_stf")["recipe"]
    assert found.fix == "+recipe=llama_sft"
    assert all(name in found.expected for name in RECIPES)


def test_a_file_that_was_meant_is_proposed(folder):
    write(folder / "mine.yaml", "name: x\n")
    assert problems("+recipe=mine")["recipe"].fix == "+recipe=./mine.yaml"
    assert problems("+recipe=./mnie.yaml")["recipe"].fix == "+recipe=mine.yaml"


def test_a_file_without_recipe_in_front_and_a_folder_are_told_apart(folder):
    write(folder / "own/mine.yaml", "name: x\n")
    ((path, problem),) = problems("own/mine.yaml", check=check_everything).items()
    assert problem.fix == "+recipe=own/mine.yaml"
    problem = problems("+recipe=own/")["recipe"]
    assert "a folder" in problem.got and problem.fix == "+recipe=own/mine.yaml"


def test_no_recipe_at_all_says_which_there_are():
    found = problems(check=check_everything)["recipe"]
    assert "quickstart" in found.expected and found.fix == "+recipe=quickstart"


def test_hydras_advice_to_add_a_plus_is_not_given():
    for problem in problems("optimizer.xyz=1", "zreo=3", "+trainer.xyz=1").values():
        assert "+" not in str(problem)


@pytest.mark.parametrize(
    ("argument", "path", "fix"),
    [
        ("quickstart", "quickstart", "+recipe=quickstart"),
        ("--zero=3", "--zero=3", "zero=3"),
        ("--max-steps=3", "--max-steps=3", "trainer.max_steps=3"),
        ("--lr 3", "--lr", "optimizer.lr=3"),
        ("zero = 3", "zero", "zero=3"),
        ("name='it", "name", r""" "name='\'it'" """.strip()),
        ("+recipe=", "recipe", "+recipe=quickstart"),
        ("zero=0,1", "zero", "-m zero=0,1   (a list: zero=[0,1])"),
        ("hydra.run.dir=out", "hydra.run.dir", "runs_dir=out"),
        ("precision=bfloat16", "precision", "precision=bf16"),
        ("logger=null", "logger", "logger=none"),
        ("model.freeze[0]=norm", "model.freeze", '"model.freeze=[norm]"'),
        ("+data.train[1]=b.jsonl", "data.train", '"data.train=[..., b.jsonl]"'),
        ("data.train[0].weight=2", "data.train", '"data.train=[{..., weight: 2}]"'),
        ("zero.stage[0]=2", "zero.stage", "zero.stage=2"),
        ("data.trian[0]=b.jsonl", "data.trian", "data.train=b.jsonl"),
    ],
)
def test_words_that_are_no_settings(argument, path, fix):
    assert problems(*argument.split(" "))[path].fix == fix


def test_a_group_or_setting_cannot_be_taken_away_for_then_the_default_would_step_in_unseen():
    found = problems("+recipe=quickstart", "~optimizer", "~trainer.epochs", "~trainer.epoch")
    assert found["~optimizer"].expected == "optimizer as one of adafactor, adamw, adamw_8bit, lion, muon, sgd"
    assert "framework help trainer.epochs" in found["~trainer.epochs"].expected
    assert "does not exist" in found["trainer.epoch"].got


def test_a_second_recipe_is_refused():
    assert "a second recipe" in problems("+recipe=quickstart", "+recipe=llama_sft")["recipe"].got


def test_a_missing_config_dir_is_named():
    assert "/nowhere" in problems("--config-dir", "/nowhere", "+recipe=quickstart")["--config-dir"].got


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("zero:\n  stage: 1\n   lr: 2\n", "mine.yaml:3", "mapping values are not allowed"),
        ("name: x\n\tseed: 1\n", "mine.yaml:2", "'\\t'"),
        ("name: x\nname: y\n", "mine.yaml:2", "duplicate key name"),
        ("defaults:\n  - override /zero: 7\n", "mine.yaml:2", "an unknown zero 7"),
        ("defaults:\n  - override /zreo: 2\n", "mine.yaml:2", "no group zreo"),
        ("defaults:\n  - quickstrat\n", "mine.yaml:2", "an unknown recipe quickstrat"),
        ("defaults:\n  - zero: 3\n", "mine.yaml:2", "`- zero: 3`"),
        ("defaults:\n  - override zero: 3\n", "mine.yaml:2", "`override zero`"),
        ("defaults:\n  - /zero: 3\n", "defaults", "a second choice for zero"),
        ("name: ${nowhere}\n", "name", "nowhere"),
    ],
)
def test_a_broken_recipe_is_explained(folder, text, path, said):
    write(folder / "mine.yaml", text)
    found = problems("+recipe=./mine.yaml")
    assert list(found) == [path]
    assert said in found[path].got


@pytest.mark.parametrize(
    ("text", "said"), [("- a\n", "without keys"), ("just words\n", "without keys"), ("defaults: quickstart\n", "quickstart")]
)
def test_a_file_that_is_no_recipe_is_named(folder, text, said):
    write(folder / "mine.yaml", text)
    ((path, problem),) = problems("+recipe=./mine.yaml").items()
    assert "mine.yaml" in path and said in problem.got


def test_a_typo_in_a_users_option_names_its_file(folder):
    write(folder / "own/zero/mine.yaml", "stage: 3\nprefetch_byte: 1\n")
    found = problems("--config-dir", "own", "+recipe=quickstart", "zero=mine")
    assert "own/zero/mine.yaml:2" in found["zero.prefetch_byte"].got


def test_an_unknown_option_does_not_hide_the_other_mistakes():
    found = problems("+recipe=quickstart", "--foo", "trainer.stps=5", "--lr", "3", "zero=9")
    assert found.keys() >= {"--foo", "--lr", "trainer.stps", "zero"} and "3" not in found


@pytest.mark.parametrize(
    ("word", "path", "fix"),
    [
        ("data.train=[{path: a.jsonl, wieght: 2}]", "data.train[0].wieght", "weight: VALUE"),
        ("optimizer.groups=[{patern: norm}]", "optimizer.groups[0].patern", "pattern: VALUE"),
    ],
)
def test_what_is_wrong_in_an_element_of_a_list_is_mended_as_yaml_says_it(word, path, fix):
    """The command line has no word for one element, so none is proposed."""
    assert problems(word)[path].fix == fix


def test_a_source_of_several_is_mended_by_its_path():
    assert Problem(path="data.train[1]", got="x", expected="a file", fix="data.train[1]=/a.jsonl   (or data.train[1]=hub://x/y)").fix == (
        "path: /a.jsonl   (or path: hub://x/y)"
    )
