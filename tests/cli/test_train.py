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


def test_failed_jobs_do_not_stop_a_sweep_and_are_named_at_its_end(tmp_path):
    good, faults = {"steps": "6"}, ({"1": "raise"}, {"0": "raise"}, {"1": "SIGKILL"}, {"0": "SIGKILL"})
    behaviour = {"by seed": {str(seed): fault for seed, fault in enumerate((good, *faults, good))}}
    done = train(tmp_path, json.dumps(behaviour), "-m", "seed=0,1,2,3,4,5", "trainer.devices=2")
    assert done.returncode == 1
    for rank in (0, 1):
        assert f"error: rank {rank} of 2 failed: ValueError: boom in step 5" in done.stderr
        assert f"error: rank {rank} of 2 failed: killed by SIGKILL" in done.stderr
    assert "2 of 6 jobs done, failed:" in done.stderr
    dirs = run_dirs(tmp_path)
    assert [path.name for path in dirs] == ["0", "1", "2", "3", "4", "5"]
    assert [read_config(path).seed for path in dirs] == [0, 1, 2, 3, 4, 5]
    assert [read_environment(path)["sweep_job"] for path in dirs] == [0, 1, 2, 3, 4, 5]
    assert read_summary(dirs[1]) == {"ended": "failed", "status": 1, "reason": "rank 1 of 2 failed: ValueError: boom in step 5"}
    assert alive(tmp_path) == []


class Sweep:
    """Two jobs of two ranks, the first of which is running."""

    def __init__(self, folder: Path, behaviour: str, waits_for: str) -> None:
        self.folder = folder
        command = [sys.executable, str(TINY_TRAIN), behaviour, *ARGUMENTS, "-m", "seed=0,1", "trainer.devices=2"]
        command.append("trainer.stop_grace_seconds=1")
        self.process = subprocess.Popen(command, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while not list(folder.rglob(waits_for)) and time.monotonic() < deadline:
            time.sleep(0.02)

    def end(self) -> tuple[int, str, str]:
        """Exit status, what was shown, how the only job that began ended."""
        _, stderr = self.process.communicate(timeout=30)
        (run_dir,) = run_dirs(self.folder)
        return self.process.returncode, stderr, read_summary(run_dir)["ended"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_job_and_the_sweep(tmp_path, number, status):
    sweep = Sweep(tmp_path, "{}", "running_1")
    sweep.process.send_signal(number)
    code, stderr, ended = sweep.end()
    assert (code, ended) == (status, "stopped"), stderr
    assert f"stopped by {number.name} after step" in stderr
    assert alive(tmp_path) == []


def test_a_signal_after_the_last_step_of_a_job_stops_the_sweep_although_the_job_is_done(tmp_path):
    sweep = Sweep(tmp_path, json.dumps({"steps": "10", "all": "slow save"}), "finishing.json")
    sweep.process.send_signal(signal.SIGTERM)
    _, stderr = sweep.process.communicate(timeout=30)
    assert sweep.process.returncode == 143 and "the run is done" in stderr
    assert len(run_dirs(tmp_path)) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_the_job_and_the_sweep(tmp_path, rank):
    sweep = Sweep(tmp_path, "{}", "running_1")
    (pid_file,) = tmp_path.rglob(f"pid_{rank}")
    os.kill(int(pid_file.read_text()), signal.SIGTERM)
    code, stderr, ended = sweep.end()
    assert (code, ended) == (143, "stopped"), stderr
    assert "stopped by a signal to one of its ranks after step" in stderr
    assert alive(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hanging_rank_of_a_sweep_ends_after_the_grace_time(tmp_path, rank):
    sweep = Sweep(tmp_path, json.dumps({str(rank): "hang"}), f"running_{1 - rank}")
    sweep.process.send_signal(signal.SIGINT)
    code, stderr, ended = sweep.end()
    assert (code, ended) == (130, "stopped"), stderr
    assert "stopped by SIGINT; rank 0, 1 did not end in time and had to be killed" in stderr
    assert alive(tmp_path) == []


def alive(folder: Path) -> list[int]:
    """Ranks of any job that still run."""
    pids = [int(file.read_text()) for file in folder.rglob("pid_*")]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


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
