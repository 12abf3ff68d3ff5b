"""Data sets of a hub that answers on 127.0.0.1: what is asked of it and kept, and how each refusal ends. Processes of their own: the
libraries read the address of the hub when they are imported."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.data.hub_server import CARD, Hub, Repository, serving
from tests.data.templates import chat

FIND = """
import json, sys
from pathlib import Path
from framework.config.errors import UserError
from framework.data.hub import hub_files
from framework.data.read import read_rows
for name in sys.argv[2:]:
    try:
        found = [row.value["text"] for file in hub_files(name, "data.train", Path(sys.argv[1])) for row in read_rows(file)]
    except UserError as error:
        found = str(error)
    print(json.dumps([name, found]))
"""


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def table(*texts: str) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)
    return file.getvalue()


SEVERAL = {
    "README.md": CARD.encode(),
    "data/train-00000-of-00002.parquet": table("one", "two"),
    "data/train-00001-of-00002.parquet": table("three"),
    "data/test-00000-of-00001.parquet": table("four"),
}
PLAIN = {"train.jsonl": lines("now"), "test.jsonl": lines("asked")}


@pytest.fixture(scope="module")
def hub():
    chats = "".join(json.dumps(chat(text, "hi")) + "\n" for text in ("one", "two", "three")).encode()
    repositories = {
        "org/several": Repository(SEVERAL),
        "org/plain": Repository(PLAIN, {"v1": {"train.jsonl": lines("then")}}),
        "org/gated": Repository(PLAIN, gated=True),
        "org/chats": Repository({"train.jsonl": chats}),
    }
    with serving(repositories) as hub:
        yield hub


def environment(hub: Hub | None, home: Path, *, offline: bool = False) -> dict[str, str]:
    known = {**os.environ, "HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9", "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}
    off = "1" if offline else "0"
    return {**known, "HF_HUB_OFFLINE": off, "HF_DATASETS_OFFLINE": off, "XDG_CACHE_HOME": str(home / "cache")}


def find(hub: Hub | None, home: Path, *names: str, offline: bool = False) -> dict[str, list[str] | str]:
    """What each name gives: the texts of its rows, or what is wrong with it."""
    command = [sys.executable, "-c", FIND, str(home / "cache"), *names]
    done = subprocess.run(command, env=environment(hub, home, offline=offline), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


WANTED = {
    "hub://org/plain": ["now"],
    "hub://org/plain:test@main": ["asked"],
    "hub://org/plain@v1": ["then"],
    "hub://org/several:small/train": ["one", "two"],
    "hub://org/several:large/train": ["one", "two", "three"],
    "hub://org/several:large/test": ["four"],
}
REFUSED = ("hub://org/none", "hub://org/gated", "hub://org/plain@v9", "hub://org/plain:dev", "hub://org/several")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def found(hub, home):
    """By a machine that asks for the first time."""
    return find(hub, home, *WANTED, *REFUSED)


def test_splits_configurations_and_revisions_are_downloaded_once_and_there_without_the_hub(hub, home, found):
    assert {name: found[name] for name in WANTED} == WANTED
    fetched = [asked for asked in hub.asked if asked.startswith("GET") and asked.endswith((".jsonl", ".parquet"))]
    assert len(fetched) == len(set(fetched)) == 6, "each file once, though a file may be in several splits"
    asked = len(hub.asked)
    missing = "hub://org/several:small/test"
    again = find(hub, home, *WANTED, missing, offline=True)
    assert {name: again[name] for name in WANTED} == WANTED and len(hub.asked) == asked
    assert "OfflineModeIsEnabled" in again[missing], "and nothing is made up of what was not asked for before"


def test_each_refusal_says_what_to_do(found):
    assert "data.train: got hub://org/none, which the hub does not have, or not for you" in found["hub://org/none"]
    assert "write    hf auth login" in found["hub://org/gated"] and "to those who were given access" in found["hub://org/gated"]
    assert "has no such revision" in found["hub://org/plain@v9"] and "write    data.train=hub://org/plain" in found["hub://org/plain@v9"]
    assert "expected one of its splits: train, test" in found["hub://org/plain:dev"]
    assert "Please pick one among the available configs: ['small', 'large']" in found["hub://org/several"]


def test_a_hub_that_does_not_answer_is_told_at_once(tmp_path):
    (said,) = find(None, tmp_path, "hub://org/plain").values()
    assert "data.train: got hub://org/plain, which could not be had: " in said and "Connect" in said


def test_a_command_prepares_a_data_set_of_the_hub(hub, tmp_path):
    words = ["prepare", "+recipe=llama_sft", "data.train=hub://org/chats", "data.validation_fraction=0"]
    command = [sys.executable, "-m", "framework", *words]
    done = subprocess.run(command, env=environment(hub, tmp_path), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "hub://org/chats" in done.stdout and " 3 " in done.stdout
