"""The tokenised cache: made once, keyed by content alone, never half, never believed, and safe under several jobs and kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import framework.data.cache
import framework.data.fingerprint
import framework.data.source_tokens
from framework.config.errors import UserError
from framework.config.schema import ColumnsConfig, DataConfig, SourceConfig
from framework.data.cache import Entry, EntryWriter, cache_folder, obtain
from framework.data.flat import BLOCK_BYTES, content_digest
from framework.data.prepare import prepare
from tests.data.templates import CHATML, LLAMA3, chat

ROWS = [chat(f"question {n}", "hello " * (n % 9 + 1)) for n in range(40)]


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def run(cache, tokenizer_with):
    """`run(train, **options)`: the prepared data, and whether anything was tokenised for it."""

    def prepared(train, *, tokenizer=None, seed=0, thoroughly=False, **options):
        config = DataConfig(**{"train": train, "cache_dir": str(cache), **options})
        before = entries(cache)
        made = prepare(config, tokenizer or tokenizer_with(CHATML), seed=seed, show_progress=True, thoroughly=thoroughly)
        return made, entries(cache) != before

    return prepared


def entries(cache: Path) -> set[tuple[str, int]]:
    return {(folder.name, folder.stat().st_ino) for folder in (cache / "tokens").glob("*")}


def tokens_of(data) -> list[list[int]]:
    return [data[i].input_ids.tolist() for i in range(len(data))]


def stored_at(prepared) -> Path:
    (folder,) = prepared.folders
    return folder


# ---- what the key is made of
def test_a_second_run_tokenises_nothing_and_says_so(run, write_jsonl, capsys):
    path = write_jsonl(ROWS)
    first, made = run(path)
    assert made and f"data.train: 40 rows in tokens are now in {stored_at(first)}" in capsys.readouterr().out
    second, made = run(path)
    assert not made and f"data.train: 40 rows in tokens from the cache, {stored_at(first)}" in capsys.readouterr().out
    assert tokens_of(first.train) == tokens_of(second.train) and first.ledger == second.ledger and first.stop_ids == second.stop_ids


@pytest.mark.parametrize("options", [
    {"max_tokens": 30, "on_too_long": "truncate"}, {"max_tokens": 30, "on_too_long": "drop"}, {"packing": True}, {"seed": 7},
    {"validation_fraction": 0.2}, {"shuffle": False}, {"num_workers": 3}, {"format": "messages"},
    {"columns": ColumnsConfig(messages="messages")},
], ids=str)  # fmt: skip
def test_p29_what_changes_no_token_of_a_row_uses_the_same_entry(run, write_jsonl, options):
    path = write_jsonl(ROWS)
    run(path)
    assert not run(path, **options)[1]


def test_p29_paths_and_times_and_the_place_in_a_list_do_not_matter(run, write_jsonl, tmp_path):
    path = write_jsonl(ROWS)
    run(path)
    os.utime(path, (1, 1))
    copied = tmp_path / "elsewhere" / "other.jsonl"
    copied.parent.mkdir()
    copied.write_bytes(Path(path).read_bytes())
    assert not run(str(copied.parent))[1]
    assert not run([SourceConfig(path=str(copied), weight=2), SourceConfig(path=path, weight=1)], validation=path)[1]


@pytest.mark.parametrize("what", ["a byte", "template", "special tokens", "vocabulary", "train_on", "max_rows", "version", "kind of file"])
def test_p29_what_may_change_tokens_makes_another_entry(run, write_jsonl, tokenizer_with, monkeypatch, what):
    path = write_jsonl(ROWS)
    run(path)
    options, tokenizer = {}, tokenizer_with(CHATML)
    if what == "a byte":
        path = write_jsonl([chat("question 0", "Hello"), *ROWS[1:]])
    elif what == "template":
        tokenizer.chat_template = CHATML + "{# another #}"
    elif what == "special tokens":
        tokenizer = tokenizer_with(LLAMA3)
        tokenizer.chat_template = CHATML
    elif what == "vocabulary":
        tokenizer.add_tokens(["question"])
    elif what == "version":
        monkeypatch.setattr(framework.data.fingerprint, "FORMAT_VERSION", 0)
    elif what == "kind of file":
        path = write_jsonl(ROWS, "train.json")
    else:
        options = {"train_on": "last"} if what == "train_on" else {"max_rows": 39}
    assert run(path, tokenizer=tokenizer, **options)[1]


def test_p29_a_call_of_the_tokenizer_leaves_nothing_in_the_key(run, write_jsonl, tokenizer_with):
    path, tokenizer = write_jsonl(ROWS), tokenizer_with(CHATML)
    run(path, tokenizer=tokenizer)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=5)
    assert not run(path, tokenizer=tokenizer)[1]


def test_digests_of_large_files_are_remembered_until_anything_about_a_file_changes(run, write_jsonl, monkeypatch, cache):
    monkeypatch.setattr(framework.data.fingerprint, "REMEMBERED_BYTES", 1)
    path = write_jsonl(ROWS)
    run(path)
    assert not (cache / "digests").exists(), "written to a moment ago: another write might not show"
    monkeypatch.setattr(framework.data.fingerprint, "SETTLED_SECONDS", -60)
    run(path)
    (note,) = (cache / "digests").iterdir()
    wrong = json.loads(note.read_text()) | {"sha256": "0" * 64}
    note.write_text(json.dumps(wrong))
    assert run(path)[1], "the remembered digest is used"
    text = Path(path).read_text()
    Path(path).write_text(text.replace("question 0", "question O"))
    os.utime(path, ns=(wrong["stat"][1], wrong["stat"][1]))  # of the same size and time as before
    assert run(path)[1] and json.loads(note.read_text())["sha256"] != "0" * 64


def test_the_cache_lies_where_the_desktop_standard_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / "framework"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder(None) == Path("~/.cache/framework").expanduser()
    assert cache_folder("~/x") == Path("~/x").expanduser()


# ---- what is written
def test_an_array_is_written_piece_by_piece_and_its_digest_is_that_of_the_whole(tmp_path):
    writer = EntryWriter(tmp_path)
    ids, rng = writer.array("ids", np.int32), np.random.default_rng(0)
    pieces = [rng.integers(0, 9, size).astype(np.int32) for size in (3, 0, BLOCK_BYTES // 4, 5, BLOCK_BYTES // 2)]
    for piece in pieces:
        ids.append(piece)
    writer.finish({"said": 1})
    entry, whole = Entry(tmp_path, thoroughly=True), np.concatenate(pieces)
    assert np.array_equal(entry.array("ids"), whole) and isinstance(entry.array("ids"), np.memmap) and entry.facts == {"said": 1}
    digests = []
    for stored in (entry.stored("ids"), framework.data.flat.Stored(whole)):
        stored.identify(Collected(digests))
    assert digests == [content_digest(whole).encode()] * 2


class Collected:
    def __init__(self, into: list) -> None:
        self.update = into.append


def damage(folder: Path, how: str) -> None:
    ids = folder / "ids.bin"
    if how == "cut off":
        os.truncate(ids, ids.stat().st_size - 4)
    elif how == "a flipped bit":
        data = bytearray(ids.read_bytes())
        data[len(data) // 2] ^= 1
        ids.write_bytes(data)
    elif how == "a missing file":
        (folder / "offsets.bin").unlink()
    elif how == "torn facts":
        (folder / "entry.json").write_text((folder / "entry.json").read_text()[:100])
    elif how == "changed facts":
        (folder / "entry.json").write_text((folder / "entry.json").read_text().replace('"rows": 40', '"rows": 41'))
    elif how == "foreign":
        (folder / "entry.json").write_text('{"arrays": {}}')
    else:
        (folder / "entry.json").unlink()


@pytest.mark.parametrize(("how", "said"), [
    ("cut off", "ids.bin has "), ("a flipped bit", "ids.bin is damaged near byte 0"), ("a missing file", "offsets.bin is missing"),
    ("torn facts", "entry.json is damaged"), ("changed facts", "entry.json is damaged"), ("foreign", "entry.json is damaged"),
    ("no facts", None),
])  # fmt: skip
def test_a_damaged_entry_is_made_anew_and_that_is_said(run, write_jsonl, capsys, how, said):
    path = write_jsonl(ROWS)
    first, _ = run(path)
    right = tokens_of(first.train)
    damage(stored_at(first), how)
    again, made = run(path)
    assert made and tokens_of(again.train) == right and Entry(stored_at(again), thoroughly=True)
    output = capsys.readouterr().out
    assert said is None or (f"cannot be used ({said}" in output and "it is made anew" in output)


def test_of_a_large_entry_blocks_are_checked_and_thoroughly_all_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(framework.data.cache, "BLOCKS_CHECKED", 3)
    writer = EntryWriter(tmp_path)
    writer.array("ids", np.int32).append(np.zeros(7 * BLOCK_BYTES // 4, np.int32))
    writer.finish({})
    with (tmp_path / "ids.bin").open("r+b") as file:
        file.seek(BLOCK_BYTES)
        file.write(b"x")
    Entry(tmp_path)
    with pytest.raises(ValueError, match="ids.bin is damaged near byte 4,194,304"):
        Entry(tmp_path, thoroughly=True)
    with (tmp_path / "ids.bin").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(ValueError, match="damaged"):
        Entry(tmp_path)


def test_rows_with_problems_leave_no_entry(run, write_jsonl, cache):
    with pytest.raises(UserError, match="broken JSON"):
        run(write_jsonl([*ROWS, "{broken"]))
    assert entries(cache) == set()


@pytest.mark.parametrize(("becomes", "said"), [(lambda path: path.write_text(""), "changed"), (Path.unlink, "deleted")])
def test_a_file_that_changes_while_it_is_read_is_refused(run, write_jsonl, monkeypatch, cache, becomes, said):
    path = write_jsonl(ROWS)
    usual = framework.data.source_tokens.encode_rows

    def touching(*args, **options):
        yield from usual(*args, **options)
        becomes(Path(path))

    monkeypatch.setattr(framework.data.source_tokens, "encode_rows", touching)
    with pytest.raises(UserError, match=f"data.train: got .*train.jsonl, which was {said} while it was read"):
        run(path)
    assert entries(cache) == set()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, where nobody can make a folder")
@pytest.mark.parametrize("place", ["/proc/nowhere", "a file"])
def test_a_cache_that_cannot_be_written_says_what_to_write(run, write_jsonl, cache, place):
    path = write_jsonl(ROWS)
    cache.write_text("")
    with pytest.raises(UserError) as caught:
        run(path, cache_dir=str(cache) if place == "a file" else place)
    message = str(caught.value)
    assert message.startswith("data.cache_dir: got ") and "write    data.cache_dir=" in message


def test_the_cache_is_not_blamed_for_a_file_elsewhere(cache, tmp_path):
    with pytest.raises(FileNotFoundError, match="gone.jsonl"):
        obtain(cache, "key", lambda writer: (tmp_path / "gone.jsonl").stat(), say=print)


def test_a_full_disk_is_told_with_what_to_write_and_leaves_nothing(cache):
    """A limit on the size of files stands for the full disk: the system refuses the same write."""
    process = job(cache, "key", rows=100, most_file_bytes=300_000)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and "Traceback" not in output
    assert f"data.cache_dir: got {cache} (File too large, after 0.0" in output
    assert "write    data.cache_dir=/path/on/a/larger/disk" in output
    assert list((cache / "tokens").iterdir()) == []


# ---- several jobs
def job(*arguments: object, **options: object) -> subprocess.Popen:
    """`python cache_job.py CACHE KEY`, with `rows`, `pause_at`, `go_on` and `most_file_bytes`."""
    words = [*map(str, arguments), *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]
    command = [sys.executable, Path(__file__).with_name("cache_job.py"), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(process: subprocess.Popen, word: str) -> None:
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(f"the job ended without saying {word!r}")


@pytest.mark.parametrize("row", [0, 25, 39])
def test_a_job_killed_at_any_row_leaves_nothing_that_a_later_one_would_use(cache, tmp_path, row):
    process = job(cache, "key", pause_at=row, go_on=tmp_path / "never")
    wait_for(process, "paused")
    process.send_signal(signal.SIGKILL)
    process.wait()
    (left,) = (cache / "tokens").iterdir()
    assert left.name == "key.partial" and not (left / "entry.json").exists()
    output = job(cache, "key").communicate(timeout=60)[0]
    assert "made 40 rows" in output and [folder.name for folder in (cache / "tokens").iterdir()] == ["key"]


def test_a_second_job_waits_for_the_first_and_takes_what_it_has_made(cache, tmp_path):
    first = job(cache, "key", pause_at=10, go_on=tmp_path / "go on")
    wait_for(first, "paused")
    second = job(cache, "key")
    wait_for(second, "waiting for another job that prepares the same data")
    (tmp_path / "go on").touch()
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert "made 40 rows" in outputs[0] and "found 40 rows" in outputs[1] and len(entries(cache)) == 1


def test_jobs_that_start_together_make_one_entry(cache):
    outputs = [process.communicate(timeout=60)[0] for process in [job(cache, "key") for _ in range(4)]]
    assert sorted(output.splitlines()[-1] for output in outputs) == ["found 40 rows"] * 3 + ["made 40 rows"]


def test_where_the_job_that_it_waits_for_is_killed_the_second_one_does_the_work(cache, tmp_path):
    first = job(cache, "key", pause_at=10, go_on=tmp_path / "never")
    wait_for(first, "paused")
    second = job(cache, "key")
    wait_for(second, "waiting")
    first.send_signal(signal.SIGKILL)
    first.wait()
    output = second.communicate(timeout=60)[0]
    assert second.returncode == 0 and "made 40 rows" in output and len(entries(cache)) == 1


def test_without_locks_each_makes_its_own_and_one_wins(cache, monkeypatch):
    monkeypatch.setattr(framework.data.cache, "_locked", lambda *_: False)
    seen = []

    def make(writer):
        writer.array("ids", np.int32).append(np.arange(3, dtype=np.int32))
        if not seen:
            seen.append(None)
            obtain(cache, "key", make, say=seen.append)  # another job, meanwhile
        return {"by": len(seen)}

    entry, was_there = obtain(cache, "key", make, say=seen.append)
    assert not was_there and entry.array("ids").tolist() == [0, 1, 2]
    assert [folder.name for folder in (cache / "tokens").glob("key*") if (folder / "entry.json").exists()] == ["key"]


def test_what_was_left_by_a_killed_job_on_other_data_is_swept_and_what_is_being_made_is_not(cache, tmp_path):
    killed, going_on = (job(cache, key, pause_at=1, go_on=tmp_path / "go on") for key in ("a", "b"))
    for process in (killed, going_on):
        wait_for(process, "paused")
    killed.kill()
    killed.wait()
    assert len(list((cache / "tokens").glob("*.partial"))) == 2
    assert job(cache, "c").wait(60) == 0
    assert [folder.name for folder in (cache / "tokens").glob("*.partial")] == ["b.partial"]
    (tmp_path / "go on").touch()
    assert going_on.wait(60) == 0 and {name for name, _ in entries(cache)} == {"b", "c"}
