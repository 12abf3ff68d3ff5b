"""P41: one new directory per job."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from framework.config.errors import UserError
from framework.config.run_folder import RunFolders


def test_p41_commands_that_start_together_get_different_folders(tmp_path):
    with ThreadPoolExecutor() as pool:
        claimed = list(pool.map(lambda _: RunFolders().claim(str(tmp_path), "run", None), range(8)))
    assert len(set(claimed)) == 8
    assert all(folder.is_dir() and folder.is_absolute() and folder.parent == tmp_path / "run" for folder in claimed)


def test_p41_the_jobs_of_a_sweep_are_numbered_in_one_folder(tmp_path):
    sweep, other = RunFolders(), RunFolders()
    jobs = [sweep.claim(str(tmp_path), "run", number) for number in range(3)]
    assert [job.name for job in jobs] == ["0", "1", "2"]
    assert len({job.parent for job in jobs}) == 1
    assert other.claim(str(tmp_path), "run", 0).parent != jobs[0].parent


def test_a_relative_folder_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RunFolders().claim("runs", "a/b", None).parent == tmp_path / "runs/a/b"


def test_a_place_where_nothing_can_be_made_is_a_users_problem(tmp_path):
    Path(tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="runs_dir: got .*file"):
        RunFolders().claim(str(tmp_path / "file"), "run", None)
