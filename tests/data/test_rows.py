"""Rows of data files: every format reads the same rows, and a broken one is named with file and row."""

from __future__ import annotations

import json

import pytest

from framework.config.errors import Problem, UserError
from framework.data.files import Row, find_files, first_rows, read_rows

ROWS = [{"instruction": "When?", "output": "2020-01-01"}, {"instruction": "Wo?", "output": "dort é ✓"}]


def values(path):
    return [row.value for row in read_rows(path)]


@pytest.fixture(params=["jsonl", "json", "json with lines", "parquet"])
def data_file(request, tmp_path):
    """The same rows in each format."""
    if request.param == "parquet":
        import pyarrow
        import pyarrow.parquet

        path = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        return path
    path = tmp_path / ("rows.jsonl" if request.param == "jsonl" else "rows.json")
    lines = "\n".join(json.dumps(row) for row in ROWS)
    path.write_text(json.dumps(ROWS, indent=2) if request.param == "json" else lines)
    return path


def test_every_format_gives_the_same_rows_as_written(data_file):
    """Also text that looks like a date stays text."""
    assert values(data_file) == ROWS
    assert [row.number for row in read_rows(data_file)] == [1, 2]
    assert [row.value for row in first_rows(data_file, 1)] == ROWS[:1]


def test_a_txt_file_is_one_document_with_its_line_ends_made_alike(tmp_path):
    (tmp_path / "book.txt").write_bytes("\ufeffChapter 1\r\n\r\nIt was a dark night.\r\n".encode())
    assert values(tmp_path / "book.txt") == ["Chapter 1\n\nIt was a dark night.\n"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_byte_order_mark_and_windows_line_ends_are_no_part_of_the_data(tmp_path, name):
    text = "\r\n".join(json.dumps(row) for row in ROWS) + "\r\n"
    if name.endswith(".json"):
        text = json.dumps(ROWS, indent=1).replace("\n", "\r\n")
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert values(tmp_path / name) == ROWS


def test_blank_lines_are_skipped_but_counted_as_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n\n{"text": "y"}\n')
    assert [(row.number, row.value["text"]) for row in read_rows(tmp_path / "a.jsonl")] == [(1, "x"), (3, "y")]


def test_broken_lines_are_named_and_reading_goes_on(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": oops}\nnull\n["list"]\n{"text": "y"}\n')
    rows = list(read_rows(tmp_path / "a.jsonl"))
    assert [isinstance(row, Row) for row in rows] == [True, False, False, False, True]
    assert rows[1].path.endswith("a.jsonl:2") and "broken JSON" in rows[1].got and "oops" in rows[1].got
    assert rows[2].path.endswith("a.jsonl:3") and rows[2].got.startswith("null")
    assert rows[3].path.endswith("a.jsonl:4") and "a list" in rows[3].got and "JSON object" in rows[3].expected


@pytest.mark.parametrize("ending", ['{"text": oops}]', '{"text": "y"', '{"text": "y"}', '{"text": "y"},'])
def test_a_broken_json_array_names_the_row(tmp_path, ending):
    (tmp_path / "a.json").write_text('[{"text": "x"}, ' + ending)
    problem = list(read_rows(tmp_path / "a.json"))[-1]
    assert isinstance(problem, Problem) and "broken JSON" in problem.got
    assert problem.path.endswith("a.json row 2") or ("not closed" in problem.got and problem.path.endswith("row 3"))


def test_json_arrays_are_read_piece_by_piece(tmp_path, monkeypatch):
    """Rows that lie across the pieces are whole."""
    monkeypatch.setattr("framework.data.files.FIRST_READ_BYTES", 5)
    rows = [{"text": "é" * n, "n": n} for n in range(40)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    assert values(tmp_path / "a.json") == rows


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xe9t\xe9"}\n')
    problem = list(read_rows(tmp_path / "a.jsonl"))[1]
    assert problem.path.endswith("a.jsonl:2") and "UTF-8" in problem.got


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(UserError, match=r"a\.parquet: got no Parquet file"):
        list(read_rows(tmp_path / "a.parquet"))


def test_files_are_found_by_name_folder_and_glob_in_a_fixed_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", ".hidden.jsonl", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    names = lambda path: [file.name for file in find_files(str(path), "data.train")]  # noqa: E731
    assert names(tmp_path / "b.jsonl") == ["b.jsonl"]
    assert names(tmp_path) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert names(tmp_path / "*.jsonl") == ["a.jsonl", "b.jsonl"]


def test_a_relative_path_is_looked_up_here_and_then_beside_the_recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (shipped,) = find_files("data/framework_qa.jsonl", "data.train")
    assert shipped.parts[-3:] == ("recipes", "data", "framework_qa.jsonl")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "framework_qa.jsonl").write_text("{}")
    assert find_files("data/framework_qa.jsonl", "data.train") == [tmp_path / "data" / "framework_qa.jsonl"]


@pytest.mark.parametrize(("path", "said"), [
    ("nope.jsonl", "does not exist"), ("*.jsonl", "matches no file"), ("folder", "holds readme.md"), ("folder/readme.md", "a .md file"),
])  # fmt: skip
def test_what_cannot_be_found_says_where_it_was_looked_for(tmp_path, monkeypatch, path, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "readme.md").write_text("hi")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="data.validation: got") as caught:
        find_files(path, "data.validation")
    assert said in str(caught.value)
