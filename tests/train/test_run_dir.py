"""What a run directory says about its run, and who is blamed when it cannot be written."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from framework.config.errors import UserError
from framework.config.schema import LlamaConfig, ModelConfig, OptimizerConfig, RecipeConfig, RopeScaling, TrainerConfig
from framework.train.run_dir import git_revision, read_config, read_environment, read_summary, write_run_dir, write_summary

RECIPE = RecipeConfig(
    name="näme: with #signs",
    model=ModelConfig(arch=LlamaConfig(rope_scaling=RopeScaling(kind="yarn", factor=4.0))),
    optimizer=OptimizerConfig(lr=1e-07, betas=(0.9, 0.999)),
    trainer=TrainerConfig(devices=2, max_steps=10),
)


def test_workers_read_the_very_recipe_that_was_composed(tmp_path):
    config = write_run_dir(tmp_path / "run", RECIPE, overrides=["optimizer.lr=1e-7"], command=["train.py", "+recipe=x"])
    assert read_config(config) == read_config(tmp_path / "run") == RECIPE


def test_command_line_and_overrides_are_kept_ready_to_be_pasted(tmp_path):
    write_run_dir(tmp_path, RECIPE, overrides=["name=a b", "zero=3"], command=["train.py", "name=a b", "zero=3"])
    assert (tmp_path / "command.txt").read_text() == "train.py 'name=a b' zero=3\n"
    assert (tmp_path / "overrides.txt").read_text() == "name=a b\nzero=3\n"
    assert (tmp_path / "logs").is_dir()


def test_the_environment_names_versions_and_hardware(tmp_path):
    write_run_dir(tmp_path, RECIPE, overrides=[], command=[])
    environment = read_environment(tmp_path)
    assert environment["packages"]["torch"] and environment["packages"]["lightning"]
    assert environment["cores"] == os.cpu_count()
    assert isinstance(environment["gpus"], list)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    return subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def test_the_git_revision_says_whether_the_code_was_changed(tmp_path):
    code = tmp_path / "framework" / "__init__.py"
    code.parent.mkdir()
    code.write_text("one = 1\n")
    assert git_revision(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    assert git_revision(tmp_path) is None, "nothing is committed"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    revision = git(tmp_path, "rev-parse", "HEAD")
    assert git_revision(tmp_path) == {"revision": revision, "dirty": False}
    (tmp_path / "notes.txt").write_text("not part of the code")
    assert git_revision(tmp_path) == {"revision": revision, "dirty": False}
    code.write_text("one = 2\n")
    assert git_revision(tmp_path) == {"revision": revision, "dirty": True}


def test_an_installed_package_inside_somebodys_repository_has_no_revision(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "mine")
    (tmp_path / "framework").mkdir()
    (tmp_path / "framework" / "__init__.py").write_text("")
    assert git_revision(tmp_path) is None


def test_a_run_directory_that_cannot_be_written_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"(?s)file/run.*runs_dir=FOLDER"):
        write_run_dir(tmp_path / "file" / "run", RECIPE, overrides=[], command=[])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named(tmp_path):
    (tmp_path / "overrides.txt").symlink_to("/dev/full")
    with pytest.raises(UserError, match="No space left on device"):
        write_run_dir(tmp_path, RECIPE, overrides=["name=" + 10_000 * "x"], command=[])


def test_a_summary_replaces_the_earlier_one_as_a_whole(tmp_path):
    write_summary(tmp_path, ended="failed", status=1)
    write_summary(tmp_path, ended="done", loss=1.25)
    assert read_summary(tmp_path) == {"ended": "done", "loss": 1.25}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
