"""`train` from the command line to the ranks: one run directory per job, failures in sweeps, and ranks that torchrun started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from framework.train.run_dir import read_config, read_environment, read_summary

ROOT = Path(__file__).resolve().parents[2]
TINY_TRAIN = Path(__file__).with_name("tiny_train.py")
ARGUMENTS = ["+recipe=quickstart", "name=tiny", "trainer.micro_batch_size=1"]
GOOD = json.dumps({"steps": "6"})


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def train(folder: Path, behaviour: str, *arguments: str, program: tuple[str, ...] = (sys.executable,)) -> subprocess.CompletedProcess:
    command = [*program, str(TINY_TRAIN), behaviour, *ARGUMENTS, *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)


def run_dirs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("config.yaml"))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_run_directory_whatever_the_number_of_ranks(tmp_path, ranks):
    done = train(tmp_path, GOOD, f"trainer.devices={ranks}", "optimizer.lr=3e-5")
    assert done.returncode == 0, done.stderr
    (run_dir,) = run_dirs(tmp_path)
    assert run_dir.parent == tmp_path / "runs" / "tiny"
    assert sorted(path.name for path in (run_dir / "logs").glob("*.log")) == [f"rank_{rank}.log" for rank in range(ranks)]
    assert read_config(run_dir).optimizer.lr == 3e-5
    assert (run_dir / "overrides.txt").read_text().splitlines() == [*ARGUMENTS, f"trainer.devices={ranks}", "optimizer.lr=3e-5"]
    assert "optimizer.lr=3e-5" in (run_dir / "command.txt").read_text()
    assert read_environment(run_dir)["packages"].keys() >= {"torch", "lightning", "hydra-core"}


def test_a_failed_job_does_not_stop_a_sweep_and_is_named_at_its_end(tmp_path):
    behaviour = {"by seed": {"0": {"steps": "6"}, "1": {"1": "raise"}, "2": {"1": "SIGKILL"}, "3": {"steps": "6"}}}
    done = train(tmp_path, json.dumps(behaviour), "-m", "seed=0,1,2,3", "trainer.devices=2")
    assert done.returncode == 1
    assert "error: rank 1 of 2 failed: ValueError: boom in step 5" in done.stderr
    assert "error: rank 1 of 2 failed: killed by SIGKILL" in done.stderr
    assert "2 of 4 jobs done, failed:" in done.stderr
    dirs = run_dirs(tmp_path)
    assert [path.name for path in dirs] == ["0", "1", "2", "3"]
    assert [read_config(path).seed for path in dirs] == [0, 1, 2, 3]
    assert read_summary(dirs[1]) == {"ended": "failed", "status": 1, "reason": "rank 1 of 2 failed: ValueError: boom in step 5"}


def test_ctrl_c_stops_the_job_and_the_sweep(tmp_path):
    command = [sys.executable, str(TINY_TRAIN), "{}", *ARGUMENTS, "-m", "seed=0,1", "trainer.devices=2"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not list(tmp_path.rglob("running_1")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert "stopped by SIGINT after step" in stderr
    (run_dir,) = run_dirs(tmp_path)
    assert read_summary(run_dir)["ended"] == "stopped"


def test_a_users_mistake_on_a_rank_ends_the_command_with_status_2(tmp_path):
    done = train(tmp_path, json.dumps({"1": "mistake"}), "trainer.devices=2")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "data.train: got nothing.jsonl" in done.stderr


def torchrun(ranks: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks))


def test_ranks_that_torchrun_started_share_one_run_directory_and_only_rank_0_speaks(tmp_path):
    done = train(tmp_path, "", "seed=7", program=torchrun(2))
    assert done.returncode == 0, done.stderr
    (run_dir,) = run_dirs(tmp_path)
    assert [(run_dir / f"sum_{rank}").read_text() for rank in (0, 1)] == ["2.0", "2.0"]
    assert f"rank 0 of run {run_dir} with seed 7" in done.stdout
    assert "rank 1 of run" not in done.stdout + done.stderr
    assert f"rank 1 of run {run_dir} with seed 7" in (run_dir / "logs" / "rank_1.log").read_text()


def test_under_torchrun_the_rank_that_failed_shows_its_error_itself(tmp_path):
    done = train(tmp_path, "raise on 1", program=torchrun(2))
    assert done.returncode == 1
    (run_dir,) = run_dirs(tmp_path)
    assert "[rank 1] Traceback" in done.stderr
    assert "ValueError: boom" in done.stderr.rpartition("Root Cause")[2], "torchrun's own last words"
    assert read_summary(run_dir) == {"ended": "failed", "status": 1, "reason": "rank 1 of 2 failed: ValueError: boom"}
    assert "ValueError: boom" in (run_dir / "logs" / "rank_1.log").read_text()
