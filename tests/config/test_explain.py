"""Problems are printed with their place and what to write."""

from framework.config.errors import Problem
from framework.config.explain import Origins, key_lines, render


def test_every_key_of_a_file_has_its_line(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("# comment\nzero:\n  stage: 1\n\nmodel: {arch: {hidden_size: 3}}\n")
    lines = key_lines(file)
    assert lines == {"zero": 2, "zero.stage": 3, "model": 5, "model.arch": 5, "model.arch.hidden_size": 5}
    assert key_lines(file, "group")["group.zero.stage"] == 3


def test_an_empty_file_has_no_keys(tmp_path):
    (tmp_path / "a.yaml").write_text("")
    assert key_lines(tmp_path / "a.yaml") == {}


def test_the_place_of_a_setting_is_where_it_was_written_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parent, child = tmp_path / "parent.yaml", tmp_path / "child.yaml"
    parent.write_text("seed: x\nname: x\n")
    child.write_text("\nseed: y\n")
    origins = Origins(["+runs_dir=z"], [(parent, ""), (child, "")])
    place = {path: origins.add(Problem(path=path, got="it", expected="other")).got for path in ("seed", "name", "runs_dir", "zero")}
    assert place == {"seed": "it (child.yaml:2)", "name": "it (parent.yaml:2)", "runs_dir": "it (command line)", "zero": "it"}


def test_problems_are_counted_and_each_says_what_to_write():
    text = render([Problem(path="a.b", got="1", expected="2", fix="a.b=2"), Problem(path="c", got="3", expected="4")])
    assert text == "2 problems:\n\na.b: got 1\n    expected 2\n    write    a.b=2\n\nc: got 3\n    expected 4"
