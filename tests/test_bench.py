"""The benchmarks of engine, data and checkpoints run and compare like with like. What they measure of time is not looked at here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.templates import CHATML
from tests.models.families import byte_tokenizer

DATA = Path(__file__).parent.parent / "scripts" / "bench" / "data.py"
ENGINE = Path(__file__).parent.parent / "scripts" / "bench" / "engine.py"
STAGES = "0", "2", "3"  # 1 would take as long as each, and differs from 2 within the engine
OURS = {f"ours-{stage}" for stage in STAGES}
TORCHS = {"ddp", "fsdp2-keep", "fsdp2-reshard"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(printed text, what --json wrote) of one quick run."""
    written = tmp_path_factory.mktemp("bench") / "measured.json"
    done = subprocess.run(
        [sys.executable, ENGINE, "--size", "tiny", "--quick", "--no-offload", "--stages", *STAGES, "--json", written],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(written.read_text())


def rows_of(measured: dict) -> dict[str, dict]:
    return {row["name"]: row for row in measured["rows"]}


def test_every_contestant_has_a_row_and_every_peer_a_ratio(run):
    printed, measured = run
    first_cells = set(re.findall(r"^\| ([\w-]+(?: / [\w-]+)?) \|", printed, flags=re.MULTILINE))
    assert OURS | TORCHS | {"alone", "ours-0 / ddp", "ours-2 / fsdp2-keep", "ours-3 / fsdp2-reshard"} <= first_cells
    assert OURS | TORCHS <= rows_of(measured).keys()


def test_all_contestants_train_alike(run):
    losses = {name: row["losses"] for name, row in rows_of(run[1]).items() if name != "alone"}
    for name, mine in losses.items():
        assert mine == pytest.approx(losses["ddp"], rel=1e-4), name


def test_a_contestant_with_state_in_host_memory_is_profiled():
    line = [sys.executable, ENGINE, "--size", "tiny", "--quick", "--profile", "ours-3-offload-all"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "ms/step" in done.stdout, done.stderr


def test_the_loss_falls_so_that_a_wrong_update_would_show(run):
    losses = rows_of(run[1])["ddp"]["losses"]
    assert losses[-1] < 0.99 * losses[0]


def test_ranks_that_do_not_exchange_lose_differently(run):
    """The check of losses can tell training together from training alone."""
    rows = rows_of(run[1])
    assert rows["alone"]["losses"][-1] != pytest.approx(rows["ddp"]["losses"][-1], rel=1e-4)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how many bytes a socket has sent")
def test_the_kernel_counts_the_bytes_that_the_engine_says_it_sends(run):
    for name in OURS:
        row = rows_of(run[1])[name]
        assert row["sent_bytes"] == pytest.approx(row["own_sent_bytes"], rel=0.05), name


@pytest.mark.skipif(sys.platform != "linux", reason="the bytes in use are glibc's count")
def test_the_c_library_counts_the_model_state_that_the_engine_says_it_holds(run):
    """And little else: the rest are Python's objects."""
    for name in OURS:
        row = rows_of(run[1])[name]
        assert 0 <= row["resting_bytes"] - row["own_resting_bytes"] < 2**20, name


# ---- data
@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """(printed text, what --json wrote) of one quick run."""
    written = tmp_path_factory.mktemp("bench") / "measured.json"
    done = subprocess.run([sys.executable, DATA, "--quick", "--json", written], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(written.read_text())


def test_the_benchmark_of_data_makes_the_tokens_that_datasets_makes(data):
    """It ends with an error where they differ in number."""
    printed, measured = data
    assert f"preparing {measured['preparing']['tokens']:,} tokens of text" in printed and measured["preparing"]["tokens"] > 10_000


def test_packs_are_fuller_than_those_of_first_fit(data):
    for row in data[1]["packing"]:
        assert row["unpacked"] < row["first_fit"] < row["ours"] <= 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's own memory from mapped files")
def test_memory_grows_by_less_than_the_tokens_of_a_row(data):
    """They alone have 120 bytes; their text, and Python's objects for it, many times that."""
    small, large = data[1]["memory"]
    assert large["tokens"] / large["rows"] > 23
    assert large["peak_bytes"] - small["peak_bytes"] < 2**22 + 120 * (large["rows"] - small["rows"])


# ---- checkpoints
def test_the_benchmark_of_checkpoints_loads_what_it_saves_and_compares_with_dcp(tmp_path):
    """It checks by itself, of every contestant, that what was loaded is what was saved, also on one rank."""
    script, written = ENGINE.with_name("checkpoint.py"), tmp_path / "measured.json"
    line = [sys.executable, script, "--size", "tiny", "--quick", "--folder", tmp_path, "--json", written]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = rows_of(json.loads(written.read_text()))
    assert {"disk alone", "ours", "ours, in the background", "DCP", "DCP async_save"} <= rows.keys()
    for name in ("ours", "DCP"):
        assert all(len(rows[name][key]) == 1 for key in ("stall", "save", "load", "load_elsewhere", "export"))
    assert "| ours, in the background / DCP |" in done.stdout
    assert list(tmp_path.iterdir()) == [written], "nothing is left"


# ---- compressed communication
def test_the_benchmark_of_compression_follows_the_same_samples_with_and_without(tmp_path):
    """On a model of a few thousand parameters: losses of the first step are equal, since only later ones see a rounded gradient."""
    script, written = ENGINE.with_name("compressed.py"), tmp_path / "measured.json"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = [
        "model=llama_tiny",
        f"model.tokenizer={tmp_path / 'tokenizer'}",
        *(f"model.arch.{key}={value}" for key, value in sizes.items()),
    ]
    line = [sys.executable, script, "--quick", "--json", written, *model, "data.max_tokens=1024", "optimizer.lr=1e-2"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    exact, compressed = (run["losses"] for run in json.loads(written.read_text())["runs"].values())
    assert exact["3"] < exact["1"] and compressed["1"] == pytest.approx(exact["1"], rel=1e-3)
    assert exact["3"] != compressed["3"] == pytest.approx(exact["3"], rel=1e-2)
    assert re.search(r"^\| last, less that of none \| \+0.0000 \| [+-]0.\d{4} \|$", done.stdout, flags=re.MULTILINE)
