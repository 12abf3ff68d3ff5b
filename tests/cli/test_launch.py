"""The supervisor: real processes that raise, die, hang and are interrupted, on either rank: right status, first error last, none left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from framework.cli.rendezvous import rank_environment, reserved_port
from framework.train.run_dir import finishing_path, read_finishing

ROOT = Path(__file__).resolve().parents[2]
SUPERVISE = Path(__file__).with_name("supervise.py")
MARK = "TEST_LAUNCH_MARK"
PATIENCE_SECONDS = 20


class Run:
    """One supervised run of tiny ranks in a process of its own."""

    def __init__(self, run_dir: Path, behaviour: dict[str, str], ranks: int = 2, grace_seconds: float = 10.0, **popen) -> None:
        self.run_dir, self.mark = run_dir, uuid.uuid4().hex
        run_dir.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, str(SUPERVISE), str(ranks), str(run_dir), json.dumps(behaviour), str(grace_seconds)],
            env={**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **popen,
        )

    def wait_until_running(self, ranks=(0, 1)) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all((self.run_dir / f"running_{rank}").exists() for rank in ranks):
            assert time.monotonic() < deadline, f"ranks did not start: {self.log(0)}{self.log(1)}"
            time.sleep(0.02)

    def end(self) -> int:
        """Wait for the end; the exit status. Nothing that the run started may be left."""
        try:
            self.stdout, self.stderr = self.process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            self.process.kill()
            left = self.left()
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert left == [], "processes were left behind"
        return self.process.returncode

    def left(self) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def log(self, rank: int) -> str:
        return (self.run_dir / "logs" / f"rank_{rank}.log").read_text()

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        os.kill(int((self.run_dir / f"pid_{rank}").read_text()), number)

    def last_words(self, lines: int = 2) -> str:
        return "\n".join(self.stderr.rstrip().splitlines()[-lines:])


# ---- a run that goes well


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_that_goes_well_ends_with_zero_and_says_nothing_itself(tmp_path, ranks):
    run = Run(tmp_path, {"steps": "6"}, ranks=ranks)
    assert run.end() == 0
    assert run.stderr == ""
    assert f"rank 0 of {ranks} runs" in run.stdout
    assert "rank 1" not in run.stdout
    assert [f"rank {rank} of {ranks} runs" in run.log(rank) for rank in range(ranks)] == [True] * ranks


def test_ranks_find_the_framework_from_any_working_directory(tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from framework.cli.launch import launch\n"
        "print(launch([sys.executable, '-c', 'import framework; print(framework.__file__)'], ranks=1, run_dir='run').status)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(ROOT / "framework" / "__init__.py"), "0"]


def test_cores_are_shared_between_ranks_unless_the_user_says_otherwise():
    cores = len(os.sched_getaffinity(0))
    assert rank_environment({}, 0, 1, 1)["OMP_NUM_THREADS"] == str(cores)
    assert rank_environment({}, 1, 2, 1)["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert rank_environment({"OMP_NUM_THREADS": "5"}, 1, 2, 1)["OMP_NUM_THREADS"] == "5"


def test_ports_of_runs_that_start_together_differ_and_are_not_handed_out_by_the_system():
    lowest_automatic = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with reserved_port() as first, reserved_port() as second, reserved_port() as third:
        assert len({first, second, third}) == 3
        assert max(first, second, third) < lowest_automatic or lowest_automatic <= 2048


def test_on_a_terminal_rank_0_sees_a_terminal_and_the_log_keeps_only_the_last_form_of_a_rewritten_line(tmp_path):
    rank = "import sys; t = sys.stdout.isatty(); print('half\\r\\033[Kwhole', t)"
    program = (
        f"import sys; from framework.cli.launch import launch; launch([sys.executable, '-c', {rank!r}], ranks=1, run_dir={str(tmp_path)!r})"
    )
    in_a_terminal = f"import pty, sys; sys.exit(pty.spawn([sys.executable, '-c', {program!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", in_a_terminal], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, capture_output=True
    )
    assert b"half\r\033[Kwhole True" in done.stdout
    assert (tmp_path / "logs" / "rank_0.log").read_text() == "whole True\n"


def test_a_console_that_goes_away_does_not_end_the_run(tmp_path):
    run = Run(tmp_path, {"steps": "30"})
    run.process.stdout.close()
    run.process.stdout = None
    assert run.end() == 0
    assert "rank 0 of 2 runs" in run.log(0)


# ---- failures of a rank


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_ends_all_ranks_and_is_shown_last(tmp_path, rank):
    run = Run(tmp_path, {str(rank): "raise"})
    assert run.end() == 1
    assert run.last_words() == f"error: rank {rank} of 2 failed: ValueError: boom in step 5\nlog:   {tmp_path}/logs/rank_{rank}.log"
    assert "in _misbehave" in run.stderr
    assert "Connection closed by peer" not in run.stderr + run.stdout
    assert run.log(rank).rstrip().endswith("ValueError: boom in step 5")
    assert run.log(1 - rank).rstrip().endswith("Connection closed by peer [127.0.0.1]:8245")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSEGV"])
def test_a_rank_killed_by_a_signal_is_named_although_the_others_complain_first(tmp_path, rank, number):
    run = Run(tmp_path, {str(rank): number})
    assert run.end() == 1
    assert re.match(rf"error: rank {rank} of 2 failed: killed by {number} \(signal \d+\)", run.last_words())
    assert "Connection closed by peer" not in run.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mistake_of_the_users_passes_through_with_status_2_and_no_traceback(tmp_path, rank):
    run = Run(tmp_path, {str(rank): "mistake"})
    assert run.end() == 2
    assert run.stderr.rstrip().endswith("data.train: got nothing.jsonl\n    expected a file that exists\n    write    data.train=FILE")
    assert "Traceback" not in run.stderr + run.stdout
    assert "data.train: got nothing.jsonl" in run.log(rank)


def test_the_same_mistake_on_every_rank_is_shown_once(tmp_path):
    run = Run(tmp_path, {"all": "mistake"})
    assert run.end() == 2
    assert (run.stderr + run.stdout).count("data.train: got nothing.jsonl") == 1


def test_a_rank_that_exits_without_a_word_is_named_with_the_end_of_its_log(tmp_path):
    run = Run(tmp_path, {"1": "exit 7"})
    assert run.end() == 1
    assert run.last_words(3).startswith("last words of this rank\nerror: rank 1 of 2 failed: exit status 7")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hang_ends_with_the_others_time_limit_and_shows_where_it_hung(tmp_path, rank):
    run = Run(tmp_path, {str(rank): "hang", "timeout": "0.3"}, grace_seconds=0.5)
    assert run.end() == 1
    assert f"rank {rank} hung there and had to be killed" in run.stderr
    assert "in _misbehave" in run.log(rank)
    assert f"error: rank {1 - rank} of 2 failed: RuntimeError: [gloo" in run.last_words()


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_a_rank_that_does_not_listen_is_named(tmp_path, rank):
    run = Run(tmp_path, {str(rank): "abrupt"})
    run.wait_until_running()
    run.signal_rank(rank, signal.SIGTERM)
    assert run.end() == 1
    assert run.last_words().startswith(f"error: rank {rank} of 2 failed: killed by SIGTERM")


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_stops_all_at_the_same_step(tmp_path, rank):
    run = Run(tmp_path, {})
    run.wait_until_running()
    run.signal_rank(rank, signal.SIGTERM)
    assert run.end() == 143, "the run is not done"
    step = (tmp_path / "saved_0").read_text()
    assert (tmp_path / "saved_1").read_text() == step
    assert run.last_words(1) == f"stopped by a signal to one of its ranks after step {step}"


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path):
    run = Run(tmp_path, {"0": "raise", "1": "deaf", "timeout": "0"}, grace_seconds=0.5)
    assert run.end() == 1
    assert "error: rank 0 of 2 failed: ValueError" in run.last_words()


# ---- stopping


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_the_supervisor_stops_all_ranks_at_the_same_step_and_they_save(tmp_path, number, status):
    run = Run(tmp_path, {})
    run.wait_until_running()
    run.process.send_signal(number)
    assert run.end() == status
    step = (tmp_path / "saved_0").read_text()
    assert (tmp_path / "saved_1").read_text() == step == str(read_finishing(tmp_path).step)
    assert run.last_words(1) == f"stopped by {number.name} after step {step}"


def test_ranks_that_stopped_in_time_may_take_longer_to_save(tmp_path):
    run = Run(tmp_path, {"all": "slow save"}, grace_seconds=0.5)
    run.wait_until_running()
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert (tmp_path / "saved_0").exists() and (tmp_path / "saved_1").exists()
    assert "still saving" in run.stderr


def test_a_save_on_the_way_may_take_longer_than_the_grace_time(tmp_path):
    run = Run(tmp_path, {"all": "save"}, grace_seconds=0.5)
    run.wait_until_running()
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert (tmp_path / "saved_0").exists() and (tmp_path / "saved_1").exists()
    assert run.last_words(1) == "stopped by SIGINT after step 5"


def test_an_error_while_saving_after_a_stop_is_an_error(tmp_path):
    run = Run(tmp_path, {"1": "bad save"})
    run.wait_until_running()
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 1
    assert "error: rank 1 of 2 failed: OSError: [Errno 28] No space left on device" in run.last_words()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_hang_ends_after_the_grace_time_when_the_run_is_stopped(tmp_path, rank, number, status):
    run = Run(tmp_path, {str(rank): "hang"}, grace_seconds=0.5)
    run.wait_until_running(ranks=[])
    wait_for(tmp_path / "running_0" if rank == 1 else tmp_path / "running_1")
    run.process.send_signal(number)
    assert run.end() == status
    assert f"stopped by {number.name}; rank 0, 1 did not end in time and had to be killed" == run.last_words(1)


def test_a_signal_after_the_last_step_changes_nothing(tmp_path):
    """The summary says that the run is done: so does the exit status."""
    run = Run(tmp_path, {"steps": "10", "all": "slow save"})
    wait_for(finishing_path(tmp_path))
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 0
    assert run.last_words(1) == "SIGTERM came after the last step: the run is done"


def test_a_second_ctrl_c_kills_at_once(tmp_path):
    run = Run(tmp_path, {"all": "deaf"}, grace_seconds=60)
    run.wait_until_running()
    run.process.send_signal(signal.SIGINT)
    time.sleep(1.3)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert run.last_words(1) == "stopped by SIGINT; killed by a second signal before everything was saved"


def test_one_ctrl_c_that_arrives_twice_is_still_one(tmp_path):
    run = Run(tmp_path, {"all": "slow save"})
    run.wait_until_running()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert (tmp_path / "saved_0").exists()


def test_ctrl_c_before_the_first_step_ends_the_run(tmp_path):
    run = Run(tmp_path, {"all": "abrupt"})
    run.wait_until_running()
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert run.last_words(1) == "stopped by SIGINT"


# ---- nothing is left


@pytest.mark.parametrize("how", ["end", "supervisor killed"])
def test_what_ranks_started_ends_with_them(tmp_path, how):
    run = Run(tmp_path, {"all": "children", "steps": "25"} if how == "end" else {"all": "children"})
    run.wait_until_running()
    if how == "end":
        assert run.end() == 0
        return
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 5
    while run.left() and time.monotonic() < deadline:
        time.sleep(0.02)
    run.end()


def test_a_supervisor_killed_with_deaf_ranks_leaves_none(tmp_path):
    run = Run(tmp_path, {"all": "deaf"})
    run.wait_until_running()
    run.process.kill()
    run.process.wait()
    time.sleep(1)
    run.end()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
