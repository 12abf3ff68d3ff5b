"""`scripts/train.py` as a user types it, with real ranks on a tiny model: how it ends, what it leaves, the same losses under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from framework.train.metrics import read_metrics
from framework.train.run_dir import read_summary
from tests.cli.test_fit import row
from tests.data.templates import CHATML
from tests.models.families import byte_tokenizer

TRAIN = str(Path(__file__).parents[2] / "scripts" / "train.py")
STEPS = 4
RECIPE = """
# @package _global_
name: tiny
model:
  arch: {vocab_size: 300, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4,
         max_position_embeddings: 256}
  tokenizer: INPUTS/tokenizer
data: {train: INPUTS/rows.jsonl, validation: INPUTS/validation.jsonl, max_tokens: 128}
trainer: {max_steps: 4, global_batch_size: 4, micro_batch_size: 1, accelerator: cpu}
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """recipe.yaml and what it names, and long_validation.jsonl, which takes longer than anyone wants to wait."""
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder / "tokenizer")
    for name, rows in (("rows", 16), ("validation", 4), ("long_validation", 8_000)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(number)) + "\n" for number in range(rows)))
    (folder / "recipe.yaml").write_text(RECIPE.replace("INPUTS", str(folder)))
    return folder


def command(inputs: Path, runs_dir: Path, *overrides: str, launcher: tuple[str, ...] = (sys.executable,)) -> list[str]:
    return [*launcher, TRAIN, f"+recipe={inputs / 'recipe.yaml'}", f"runs_dir={runs_dir}", *overrides]


def run_dir(runs_dir: Path) -> Path:
    (found,) = (runs_dir / "tiny").iterdir()
    return found


def torchrun(ranks: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks))


def test_a_run_ends_with_status_0_and_torchrun_gives_the_same_losses_to_the_bit(inputs, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ours = command(inputs, tmp_path / "ours", "trainer.devices=2", "zero=3")
    theirs = command(inputs, tmp_path / "theirs", "zero=3", launcher=torchrun(2))
    for line in (ours, theirs):
        done = subprocess.run(line, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    folders = [run_dir(tmp_path / "ours"), run_dir(tmp_path / "theirs")]
    assert [(read_summary(folder)["ended"], read_summary(folder)["steps"]) for folder in folders] == [("done", STEPS)] * 2
    assert [(folder / "export" / "model.safetensors").exists() for folder in folders] == [True, True]
    rows = [[(row.step, row.loss, row.grad_norm, row.val_loss) for row in read_metrics(folder / "metrics.csv")] for folder in folders]
    assert rows[0] == rows[1] and len(rows[0]) == STEPS + 1


def test_ctrl_c_in_a_long_validation_gives_it_up_and_saves_the_model(inputs, tmp_path):
    line = command(
        inputs, tmp_path, "trainer.devices=2", "trainer.stop_grace_seconds=10", f"data.validation={inputs / 'long_validation.jsonl'}"
    )
    process = subprocess.Popen(line, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for shown in process.stdout:
        if shown.startswith(f"step {STEPS}/{STEPS}"):
            break
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.rstrip().splitlines()[-1] == f"stopped by SIGINT after step {STEPS}"
    assert read_summary(run_dir(tmp_path))["ended"] == "stopped"
    assert [row.val_loss for row in read_metrics(run_dir(tmp_path) / "metrics.csv")] == [None] * STEPS
    assert (run_dir(tmp_path) / "export" / "model.safetensors").exists()


def test_a_run_that_fails_says_why_last_and_leaves_no_tokens_behind(inputs, tmp_path):
    line = command(inputs, tmp_path, "trainer.devices=2", "optimizer.lr=1e30")
    done = subprocess.run(line, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "failed: NonFiniteError: step 2" in done.stderr.rstrip().splitlines()[-2]
    assert read_summary(run_dir(tmp_path))["ended"] == "failed"
    assert not (run_dir(tmp_path) / "tokens").exists()


def test_ctrl_c_and_resume_auto_go_on_where_the_run_was(inputs, tmp_path):
    line = command(inputs, tmp_path, "trainer.max_steps=60", "resume=auto", "checkpoint.export=false")
    process = subprocess.Popen(line, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output = []
    for shown in process.stdout:
        output.append(shown)
        if shown.startswith("step  3/60"):
            process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    assert process.returncode == 130
    assert output[0] == f"resume=auto: {tmp_path / 'tiny'} has no checkpoint; a new start\n"
    first = run_dir(tmp_path)
    stopped_at = read_summary(first)["steps"]
    assert 3 <= stopped_at < 60 and f"go on:   the same command with resume={first}\n" in output

    done = subprocess.run(line, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"resuming from {first / 'checkpoints' / f'step_{stopped_at}'}"
    (second,) = [folder for folder in (tmp_path / "tiny").iterdir() if folder != first]
    assert [row.step for row in read_metrics(second / "metrics.csv") if row.loss] == list(range(1, 61))
