"""`hydra_main`, the machinery under `train`: run directories, sweeps, exit statuses, and no heavy import before a job starts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from framework.cli.check import check_everything
from framework.config.compose import Composed, hydra_main
from framework.config.errors import Problem, UserError
from framework.config.paths import asset_dir

ROOT = Path(__file__).parents[2]
RECIPES = sorted(file.stem for file in asset_dir("recipes").glob("*.yaml"))
TEXT = "a little text to train on\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture
def jobs() -> list[Composed]:
    """The jobs that `run` has started."""
    return []


@pytest.fixture
def run(folder, jobs):
    """`run("+recipe=...", ...)`: the exit status of a command whose task collects `jobs`; seeds 1-4 make it end in other ways."""

    def task(job: Composed) -> int | None:
        jobs.append(job)
        match job.recipe.seed:
            case 1:
                raise UserError(Problem(path="somewhere", got="this", expected="that"))
            case 2:
                raise RuntimeError("a fault of ours")
            case 3:
                return 7
            case 4:
                raise KeyboardInterrupt
            case 5:
                raise SystemExit(143)
        (job.run_dir / "written").touch()
        return None

    def start(*arguments: str) -> int:
        command = ["+recipe=llama_pretrain", "data.train=text.txt", "trainer.devices=1", *arguments]
        return hydra_main(task, command, check=check_everything)

    return start


def test_a_job_gets_its_recipe_and_a_new_absolute_directory(run, jobs, folder):
    assert run("zero=3") == 0
    (job,) = jobs
    assert job.recipe.zero.stage == 3
    assert job.run_dir.parent == folder / "runs/llama_pretrain"
    assert job.overrides == ("+recipe=llama_pretrain", "data.train=text.txt", "trainer.devices=1", "zero=3")
    assert Path.cwd() == folder, "the working directory stays"
    assert [path.name for path in job.run_dir.iterdir()] == ["written"], "Hydra writes nothing of its own"


def test_two_runs_at_once_do_not_share_a_directory(run, jobs):
    run()
    run()
    assert jobs[0].run_dir != jobs[1].run_dir


def test_the_command_line_is_the_users_own_while_a_job_runs(folder, monkeypatch):
    typed = ["train.py", "+recipe=llama_pretrain", "data.train=text.txt"]
    monkeypatch.setattr(sys, "argv", typed)
    seen = []
    assert hydra_main(lambda job: seen.append(list(sys.argv))) == 0
    assert seen == [typed] and sys.argv is typed


@pytest.mark.parametrize(("seed", "status", "said"), [(1, 2, "somewhere: got this"), (2, 1, "RuntimeError: a fault of ours"), (3, 7, "")])
def test_how_a_job_ends_is_the_exit_status(run, folder, capsys, seed, status, said):
    assert run(f"seed={seed}") == status
    error = capsys.readouterr().err
    assert said in error
    assert ("Traceback" in error) == (seed == 2), "a traceback only for faults of ours"
    assert not list(folder.glob("runs/*/*")), "a job that wrote nothing leaves no directory"


def test_a_mistake_is_reported_without_starting_a_job(run, jobs, folder, capsys):
    assert run("zero=7", "optimizer.learning_rate=1", "optimizer.lr=-1", "data.train=no.txt") == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "optimizer.lr=1" in error and "data.train" in error and "one of 0, 1, 2, 3" in error
    assert jobs == [] and not (folder / "runs").exists()


def test_a_sweep_runs_every_value_in_numbered_directories(run, jobs):
    assert run("-m", "zero=0,3") == 0
    assert [job.recipe.zero.stage for job in jobs] == [0, 3]
    assert [job.run_dir.name for job in jobs] == ["0", "1"]
    assert len({job.run_dir.parent for job in jobs}) == 1


@pytest.mark.parametrize("written", ["zero=range(1,3)", "zero=choice(1,2)", "+zero=1,2"])
def test_numbers_choose_options_in_every_kind_of_sweep(run, jobs, written):
    assert run(written, "-m") == 0
    assert [job.recipe.zero.stage for job in jobs] == [1, 2]


def test_a_failed_job_does_not_stop_a_sweep_and_is_listed(run, jobs, capsys):
    assert run("-m", "seed=2,3,0") == 1
    assert [job.recipe.seed for job in jobs] == [2, 3, 0]
    summary = capsys.readouterr().err.rpartition("1 of 3 jobs done, failed:")[2]
    assert "seed=2  (status 1)" in summary and "seed=3  (status 7)" in summary and "seed=0" not in summary


def test_a_job_that_is_wrong_by_itself_fails_alone(run, jobs):
    assert run("-m", "optimizer.lr=-1,1") == 2
    assert [job.recipe.optimizer.lr for job in jobs] == [1.0]


def test_a_typo_stops_a_sweep_before_it_starts(run, jobs, capsys):
    assert run("-m", "zero=0,7", "optimizer.learning_rate=1,2") == 2
    assert jobs == []
    error = capsys.readouterr().err
    assert "an unknown option 7" in error and "optimizer.lr=1,2" in error


@pytest.mark.parametrize(("seed", "status"), [(4, 130), (5, 143)])
def test_an_interrupt_stops_the_sweep(run, jobs, seed, status):
    try:
        ended = run("-m", f"seed={seed},0")
    except SystemExit as stop:
        ended = stop.code
    assert ended == status
    assert [job.recipe.seed for job in jobs] == [seed]


@pytest.fixture
def launcher(monkeypatch):
    """`launcher(rank)`: this process is that rank of two under torchrun."""

    def be(rank: int) -> None:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        for name, value in (place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}).items():
            monkeypatch.setenv(name, str(value))

    return be


def test_p41_only_rank_0_of_a_launcher_makes_a_directory(folder, launcher):
    jobs = []
    for rank in (0, 1):
        launcher(rank)
        assert hydra_main(lambda job: jobs.append(job), ["+recipe=llama_pretrain", "data.train=text.txt"]) == 0
    assert jobs[0].run_dir.is_dir() and jobs[1].run_dir is None
    assert len(list(folder.glob("runs/*/*"))) == 1


def test_a_sweep_under_a_launcher_is_refused(run, jobs, launcher, capsys):
    launcher(0)
    assert run("-m", "zero=0,1") == 2
    assert "torchrun" in capsys.readouterr().err and jobs == []


# ---- as real commands
def command(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def train(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """`python scripts/train.py ...` from anywhere, which fails if it imports something heavy."""
    watched = (
        "import runpy, sys, atexit\n"
        "atexit.register(lambda: print('heavy:', sorted({'torch', 'lightning', 'transformers', 'datasets', 'numpy'} & set(sys.modules))))\n"
        f"sys.argv = ['train.py', *sys.argv[1:]]; runpy.run_path({str(ROOT / 'scripts/train.py')!r}, run_name='__main__')"
    )
    done = command("-c", watched, *arguments, cwd=cwd, **environment)
    assert "heavy: []" in done.stdout, done.stdout + done.stderr
    return done


def test_p42_help_lists_groups_with_their_options_and_imports_no_torch(tmp_path):
    done = train("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "zero: 0, 1, 2, 3" in done.stdout and f"recipe: {', '.join(RECIPES)}" in done.stdout
    assert "hydra" not in done.stdout.lower(), "the machinery is not the user's concern"


def test_p42_cfg_job_shows_the_settings_and_imports_no_torch(tmp_path):
    done = train("+recipe=llama_sft", "zero=3", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0
    assert "stage: 3" in done.stdout and "name: llama_sft" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_p42_a_mistake_ends_with_status_2_without_traceback_torch_or_waiting(tmp_path):
    began = time.monotonic()
    done = train("+recipe=llama_sft", "zero.stge=3", cwd=tmp_path)
    assert done.returncode == 2
    assert "zero.stage=3" in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - began < 10, "a second on an idle machine"


def test_shell_completion_knows_recipes_and_options(tmp_path):
    done = train("-sc", "query=bash", cwd=tmp_path, COMP_LINE="python train.py +recipe=llama")
    assert {"+recipe=llama_lora", "+recipe=llama_pretrain", "+recipe=llama_qlora"} <= set(done.stdout.split())


def test_a_sweep_with_mistakes_tells_those_of_all_its_values_at_once(tmp_path):
    done = train("-m", "+recipe=llama_pretrain", "zero=0,9", "optimizer.lr=1e-3,x", "trainer.max_stps=1", cwd=tmp_path)
    assert done.returncode == 2
    told = ("zero: got", "trainer.max_stps: got", "warm-up of 50 steps in a run of 1", "optimizer.lr: got", "data.train: got nothing")
    assert all(each in done.stderr for each in told) and "5 problems" in done.stderr, done.stderr
