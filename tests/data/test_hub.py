"""Data sets of the hub: the same code on a local folder laid out like one, and what is said where there is no network."""

from __future__ import annotations

import json

import pytest

from framework.config.compose import compose
from framework.config.errors import UserError
from framework.config.schema import DataConfig
from framework.data.files import find_files
from framework.data.hub import HubName, hub_files, hub_name
from framework.data.prepare import prepare
from framework.data.sources import peek
from tests.data.hub_server import CARD
from tests.data.templates import chat


@pytest.fixture
def folder(tmp_path):
    """Two configurations, the larger one in two files, and a split for tests."""
    data = tmp_path / "set" / "data"
    data.mkdir(parents=True)
    for name, texts in (("train-00000-of-00002", ["one", "two"]), ("train-00001-of-00002", ["three"]), ("test-00000-of-00001", ["four"])):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(chat(text, "hi")) + "\n" for text in texts))
    (tmp_path / "set" / "README.md").write_text(CARD)
    return tmp_path / "set"


@pytest.mark.parametrize(("path", "parts"), [
    ("hub://org/name", ("org/name", None, "train", None)),
    ("hub://squad:test", ("squad", None, "test", None)),
    ("hub://org/name:small/train@v1.2", ("org/name", "small", "train", "v1.2")),
    ("hub://org/na-me.2@main", ("org/na-me.2", None, "train", "main")),
    ("hub://./folder:test", ("./folder", None, "test", None)),
])  # fmt: skip
def test_a_name_says_configuration_split_and_revision_and_can_be_written_on_the_command_line(path, parts):
    name, config, split, revision = parts
    assert hub_name(path, "data.train") == HubName(name=name, config=config, split=split, revision=revision)
    assert compose(["+recipe=llama_sft", f"data.train={path}"]).recipe.data.train == path


def test_for_validation_the_split_is_validation():
    assert hub_name("hub://org/name", "data.validation").split == hub_name("hub://org/name", "data.validation[1]").split == "validation"


@pytest.mark.parametrize("path", ["hub://", "hub://a:b:c", "hub://a:/b", "hub://a@"])
def test_what_is_no_name_is_told_by_the_first_look(path):
    (problem,) = peek(DataConfig(train=path))
    assert problem.path == "data.train" and "hub://NAME[:[CONFIG/]SPLIT][@REVISION]" in problem.expected


def test_rows_of_a_split_are_prepared_like_those_of_files(folder, chatml):
    config = DataConfig(train=f"hub://{folder}:large/train", validation=f"hub://{folder}:large/test")
    prepared = prepare(config, chatml, seed=0, show_progress=False)
    assert [("one", "two", "three")[i] in chatml.decode(prepared.train[i].input_ids) for i in range(3)] == [True] * 3
    assert len(prepared.validation) == 1 and "four" in chatml.decode(prepared.validation[0].input_ids)
    again = prepare(DataConfig(train=str(folder / "data" / "train-*")), chatml, seed=0, show_progress=False)
    assert again.folders == prepared.folders[:1], "the same bytes, so the same tokens"
    assert [file.name for file in hub_files(f"hub://{folder}:small/train", "data.train", folder)] == ["train-00000-of-00002.jsonl"]


@pytest.mark.parametrize(("words", "said"), [
    (":large/dev", "has no split 'dev'\n    expected one of its splits: train, test"),
    ("", "Config name is missing. Please pick one among the available configs: ['small', 'large']"),
    (":huge/train", "BuilderConfig 'huge' not found. Available: ['small', 'large']"),
])  # fmt: skip
def test_a_split_or_configuration_that_is_not_there_is_told_with_those_that_are(folder, words, said):
    with pytest.raises(UserError) as caught:
        hub_files(f"hub://{folder}{words}", "data.train", folder)
    assert said in str(caught.value)


def test_without_a_network_it_is_said_at_once_and_what_to_write(tmp_path):
    """The tests run with HF_HUB_OFFLINE=1."""
    with pytest.raises(UserError) as caught:
        hub_files("hub://org/name", "data.train", tmp_path)
    message = str(caught.value)
    assert message.startswith("data.train: got hub://org/name, which could not be had: ") and "--repo-type dataset" in message


def test_a_kind_of_file_that_nothing_reads_is_refused_by_name(tmp_path):
    (tmp_path / "train.xml").write_text("<a/>")
    with pytest.raises(UserError, match="data.train: got .*train.xml"):
        hub_files(f"hub://{tmp_path}", "data.train", tmp_path)


def test_a_path_is_never_taken_for_a_name_of_the_hub_but_that_is_hinted_at():
    with pytest.raises(UserError) as caught:
        find_files("org/name", "data.train")
    assert "a path that does not exist" in str(caught.value) and "(or data.train=hub://org/name)" in str(caught.value)
