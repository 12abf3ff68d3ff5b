"""Rows of data files: every format reads the same rows, and whatever is broken is named with file and row."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

import framework.data.read_texts
from framework.config.errors import Problem, UserError
from framework.config.schema import DataConfig
from framework.data.files import Row, find_files
from framework.data.prepare import prepare
from framework.data.read import first_rows, read_rows
from framework.data.sources import peek

ROWS = [{"instruction": "When?", "output": "2020-01-01"}, {"instruction": "Wo?", "output": "dort é ✓"}]


def values(path):
    return [row.value for row in read_rows(path)]


def as_csv(rows):
    lines = [",".join(f'"{value}"' for value in row) for row in (ROWS[0], *(row.values() for row in rows))]
    return "\r\n".join(lines) + "\r\n"


def as_lines(rows):
    return "\n".join(map(json.dumps, rows))


def as_array(rows):
    return json.dumps(rows, indent=2)


def packed(path, data: bytes):
    """Write `data` into `path`, compressed as its suffix says."""
    if path.suffix == ".zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(data)
    else:
        path.write_bytes({".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(data))
    return path


@pytest.fixture(params=["rows.jsonl", "rows.json", "lines.json", "rows.csv", "rows.parquet", "rows.arrow", "stream.arrow", "rows.feather",
                        "rows.jsonl.gz", "rows.json.gz", "rows.csv.gz", "rows.jsonl.bz2", "rows.jsonl.xz", "rows.json.xz", "lines.json.bz2",
                        "rows.jsonl.zst", "rows.json.zst", "rows.csv.zst"])  # fmt: skip
def data_file(request, tmp_path):
    """The same rows in each format."""
    path, table = tmp_path / request.param, pyarrow.Table.from_pylist(ROWS)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".feather":
        pyarrow.feather.write_feather(table, str(path))
    elif path.suffix == ".arrow":
        make = pyarrow.ipc.new_stream if path.stem == "stream" else pyarrow.ipc.new_file
        with make(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
    else:
        write = as_csv if ".csv" in path.name else as_lines if ".jsonl" in path.name or "lines" in path.name else as_array
        packed(path, write(ROWS).encode())
    return path


def test_every_format_gives_the_same_rows_as_written(data_file):
    """Also text that looks like a date stays text."""
    assert values(data_file) == ROWS
    first = 2 if ".csv" in data_file.name else 1  # below the header
    assert [row.number for row in read_rows(data_file)] == [first, first + 1]
    assert find_files(str(data_file.parent), "data.train") == [data_file]
    assert [row.value for row in first_rows(data_file, 1)] == ROWS[:1]


def test_a_txt_file_is_one_document_with_its_line_ends_made_alike(tmp_path):
    (tmp_path / "book.txt").write_bytes("\ufeffChapter 1\r\n\r\nIt was a dark night.\r\n".encode())
    assert values(tmp_path / "book.txt") == ["Chapter 1\n\nIt was a dark night.\n"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_byte_order_mark_and_windows_line_ends_are_no_part_of_the_data(tmp_path, name):
    text = "\r\n".join(json.dumps(row) for row in ROWS) + "\r\n"
    if name.endswith(".csv"):
        text = as_csv(ROWS)
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


@pytest.mark.parametrize(("text", "number", "said"), [
    ("\ufffd", 2, "bytes that are not UTF-8 (b'\\xff"),
    ('"two fields', 2, "2 fields"),
    ("a,b,c", 2, "3 fields"),
])  # fmt: skip
def test_a_broken_record_of_csv_is_named_with_its_line_and_reading_goes_on_where_it_can(tmp_path, text, number, said):
    text = text.encode().replace("\ufffd".encode(), b"\xff,x")
    if text.startswith(b'"'):
        text = b'"a\nb",c,d'
        said = "3 fields"
    (tmp_path / "a.csv").write_bytes(b"one,two\n" + text + b"\n\nx,y\n")
    problem, row = read_rows(tmp_path / "a.csv")
    assert problem.path.endswith(f"a.csv:{number}") and said in problem.got
    assert row.value == {"one": "x", "two": "y"} and row.number == 4 + text.count(b"\n")


def test_a_quote_that_is_never_closed_is_named_with_the_line_where_its_record_begins(tmp_path):
    (tmp_path / "a.csv").write_text('one,two\nx,y\nx,"y\n' + "a,b\n" * 100)
    row, problem = read_rows(tmp_path / "a.csv")
    assert row.number == 2 and problem.path.endswith("a.csv:3") and "unexpected end of data" in problem.got


def test_line_ends_and_quotes_within_fields_are_kept(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'prompt,completion\r\n"Say ""hi""\r\nand stop, please",hi\r\n')
    assert values(tmp_path / "a.csv") == [{"prompt": 'Say "hi"\r\nand stop, please', "completion": "hi"}]


def test_a_header_with_a_name_twice_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("text,id,text\na,b,c\n")
    with pytest.raises(UserError, match="a.csv:1: got a header with 'text' more than once"):
        list(read_rows(tmp_path / "a.csv"))


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["breaks off", "is no such file", "is empty", "two files in one"])
def test_a_compressed_file_ends_readably_whatever_happened_to_it(tmp_path, suffix, damage):
    path = packed(tmp_path / f"a.jsonl{suffix}", as_lines([{"text": f"{n} {n * n:x}"} for n in range(20000)]).encode() + b"\n")
    whole = path.read_bytes()
    path.write_bytes(
        {"breaks off": whole[: len(whole) // 2], "is empty": b"", "two files in one": whole * 2}.get(damage, b"no such file" * 99)
    )
    rows = list(read_rows(path))
    if damage == "two files in one" or not rows:
        assert len(rows) == (40000 if damage == "two files in one" else 0) and all(isinstance(row, Row) for row in rows)
        return
    assert isinstance(rows[-1], Problem) and rows[-1].path.endswith(f"a.jsonl{suffix}")
    assert f"a {suffix} file that breaks off or is damaged" in rows[-1].got
    assert all(isinstance(row, Row) for row in rows[:-2])


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.json.gz", "a.csv.xz", "a.txt.bz2"])
@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\r\n\r\n"])
def test_a_file_without_rows_has_none(tmp_path, name, content):
    rows = list(read_rows(packed(tmp_path / name, content)))
    assert rows == [] or (".txt" in name and content == b"\r\n\r\n" and rows[0].value == "\n\n")


@pytest.mark.parametrize("name", ["a.arrow", "a.feather", "a.parquet"])
@pytest.mark.parametrize("content", [b"", b"no such file", b"ARROW1", b"FEA1" * 9])
def test_a_table_that_is_none_is_refused_by_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name.replace(".", "\\.") + ": got (no (Arrow|Parquet) file|a Feather file of version 1)"):
        list(read_rows(tmp_path / name))


def test_an_arrow_file_that_breaks_off_names_the_row(tmp_path):
    table = pyarrow.Table.from_pylist([{"text": "x" * 100}] * 1000)
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    whole = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(whole[: len(whole) // 2])
    rows = list(read_rows(tmp_path / "a.arrow"))
    assert isinstance(rows[-1], Problem) and rows[-1].path.endswith(f"a.arrow row {len(rows)}") and len(rows) > 300


def test_what_datasets_saves_to_disk_is_read_without_its_notes_and_one_split_of_several(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "saved"))
    (file,) = find_files(str(tmp_path / "saved" / "train"), "data.train")
    assert values(file) == ROWS
    with pytest.raises(UserError, match="which holds 2 data sets: test, train"):
        find_files(str(tmp_path / "saved"), "data.train")


def test_notes_of_datasets_beside_other_data_files_are_no_data(tmp_path):
    for name in ("dataset_info.json", "dataset_infos.json", "a.jsonl"):
        (tmp_path / name).write_text("{}")
    assert [file.name for file in find_files(str(tmp_path), "data.train")] == ["a.jsonl"]
    (tmp_path / "a.jsonl").unlink()
    assert [file.name for file in find_files(str(tmp_path), "data.train")] == ["dataset_info.json", "dataset_infos.json"]


@pytest.mark.parametrize("name", ["A.JSONL", "a.Json", "a.CSV", "a.Parquet", "a.JSONL.GZ", "a.jsonl.Zst"])
def test_suffixes_may_be_written_in_capitals(tmp_path, name):
    file, small = tmp_path / name, tmp_path / name.lower().replace("a.", "b.")
    if small.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), small)
    else:
        packed(small, (as_csv if ".csv" in small.name else as_lines if ".jsonl" in small.name else as_array)(ROWS).encode())
    small.rename(file)
    assert find_files(str(tmp_path), "data.train") == [file] and values(file) == ROWS


def test_broken_json_far_into_a_file_is_named(tmp_path):
    lines = ['{"text": "x"}'] * 80000
    lines[73411] = '{"text": "x"'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (problem,) = (row for row in read_rows(tmp_path / "a.jsonl") if isinstance(row, Problem))
    assert problem.path.endswith("a.jsonl:73412") and "broken JSON" in problem.got
    (tmp_path / "a.json").write_text("[" + ",\n".join(lines) + "]")
    *rows, problem = read_rows(tmp_path / "a.json")
    assert problem.path.endswith("a.json row 73412") and len(rows) == 73411


def test_bytes_that_are_not_utf8_in_an_array_are_named_and_reading_goes_on(tmp_path):
    rows = [{"text": "x" * 100}] * 50000
    text = json.dumps(rows).encode().replace(b"x" * 100, b"\xe9t\xe9", 40001).replace(b"\xe9t\xe9", b"x", 40000)
    (tmp_path / "a.json").write_bytes(text)
    read = list(read_rows(tmp_path / "a.json"))
    assert [number for number, row in enumerate(read, 1) if isinstance(row, Problem)] == [40001] and len(read) == 50000
    assert read[40000].path.endswith("a.json row 40001") and "UTF-8" in read[40000].got


@pytest.mark.parametrize("value", ["[" * 100_000, '{"n": ' + "9" * 5000 + "}"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_that_python_cannot_hold_is_named(tmp_path, name, value):
    (tmp_path / name).write_text(f'{{"text": "x"}}\n{value}' if name == "a.jsonl" else f'[{{"text": "x"}}, {value}]')
    row, problem = read_rows(tmp_path / name)
    assert "2" in problem.path and "cannot be read" in problem.got


MEASURE = """
import resource, sys
from pathlib import Path
from framework.config.errors import Problem
from framework.data.read import first_rows, read_rows
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path = Path(sys.argv[1])
first_rows(path, 20)
print([row.number if not isinstance(row, Problem) else str(row) for row in read_rows(path)])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units")
@pytest.mark.parametrize(("name", "start", "end", "said"), [
    ("a.jsonl", b'{"text": "x"}\n[', b'"}\n{"text": "y"}\n', ["[1, ", "a.jsonl:2: got a row of more than 67 MB", "mv a.jsonl", ", 3]"]),
    ("a.json", b'[{"text": "x"}, {"text": "', b'"}]', ["[1, ", "a.json row 2: got a row of more than 67 MB"]),
    ("a.csv", b'one,two\nx,y\nx,"', b'"\n', ["[2, ", "a.csv:3: got a record that is no CSV (a line of more than 67 MB)"]),
])  # fmt: skip
def test_a_line_of_300_mb_is_named_without_being_held(tmp_path, name, start, end, said):
    with (tmp_path / name).open("wb") as file:
        file.write(start)
        for _ in range(300):
            file.write(b"x" * 1_000_000)
        file.write(end)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / name)], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True
    )
    rows, megabytes = done.stdout.splitlines()
    assert all(words in rows for words in said), rows
    assert int(megabytes) < 400


def test_a_document_is_read_in_blocks_that_join_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(framework.data.read_texts, "DOCUMENT_CHARACTERS", 10)
    text = "h\u00e9llo the user \u2713" * 7
    (tmp_path / "a.txt").write_text(text)
    rows = list(read_rows(tmp_path / "a.txt"))
    assert "".join(row.value for row in rows) == text and max(len(row.value) for row in rows) == 10 and {row.number for row in rows} == {1}
    assert [row.goes_on for row in rows] == [True] * (len(rows) - 1) + [False]
    (tmp_path / "a.txt").write_bytes(text.encode() + b"\xff")
    assert isinstance(list(read_rows(tmp_path / "a.txt"))[-1], Problem)


@pytest.mark.parametrize("ending", ['{"text": oops}]', '{"text": "y"', '{"text": "y"}', '{"text": "y"},'])
def test_a_broken_json_array_names_the_row(tmp_path, ending):
    (tmp_path / "a.json").write_text('[{"text": "x"}, ' + ending)
    problem = list(read_rows(tmp_path / "a.json"))[-1]
    assert isinstance(problem, Problem) and "broken JSON" in problem.got
    assert problem.path.endswith("a.json row 2") or ("not closed" in problem.got and problem.path.endswith("row 3"))


@pytest.mark.parametrize("piece", [3, 10, 1 << 20])
@pytest.mark.parametrize(("text", "rows", "said"), [
    ('[{"n": 1}]\n[{"n": 2}]', 1, "content after the end of the array of 1 rows: [{"),
    ('[] {"n": 1}', 0, "content after the end of the array of 0 rows: {"),
    ('[{"n": 1} {"n": 2}]', 1, "no comma"),
    ('[{"n": 1},,{"n": 2}]', 1, "Expecting value: ,"),
    ('[{"n": 1},]', 1, "Expecting value: ]"),
    ('[,{"n": 1}]', 0, "Expecting value: ,"),
])  # fmt: skip
def test_what_is_no_single_json_array_is_named_instead_of_rows_being_dropped(tmp_path, monkeypatch, text, rows, said, piece):
    monkeypatch.setattr("framework.data.read_texts.FIRST_READ_CHARACTERS", piece)
    (tmp_path / "a.json").write_text(text)
    *found, problem = read_rows(tmp_path / "a.json")
    assert [row.value for row in found] == [{"n": 1}][:rows]
    assert problem.path.endswith(f"a.json row {rows + 1}") and said.split(":")[0] in problem.got
    assert piece < 20 or said in problem.got


def test_json_arrays_are_read_piece_by_piece(tmp_path, monkeypatch):
    """Rows that lie across the pieces are whole."""
    monkeypatch.setattr("framework.data.read_texts.FIRST_READ_CHARACTERS", 5)
    rows = [{"text": "é" * n, "n": n} for n in range(40)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    assert values(tmp_path / "a.json") == rows


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xe9t\xe9"}\n')
    problem = list(read_rows(tmp_path / "a.jsonl"))[1]
    assert problem.path.endswith("a.jsonl:2") and "UTF-8" in problem.got


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize(("name", "text"), [
    ("a.jsonl", '{"text": "x"}'), ("a.json", '[{"text": "x"}]'), ("a.csv", "text\nx"), ("a.txt", "hello"),
])  # fmt: skip
def test_a_file_in_another_unicode_is_told_as_such_with_the_command_that_makes_it_utf8(tmp_path, encoding, name, text):
    (tmp_path / name).write_bytes(text.encode(encoding))
    (problem,) = read_rows(tmp_path / name)
    is_named = encoding[:6].upper()
    assert f"begins as {is_named} does" in problem.got and problem.fix.startswith(f"iconv -f {is_named} -t UTF-8 a.")
    assert [peeked.got for peeked in peek(DataConfig(train=str(tmp_path / name)))] == [problem.got]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".jsonl"])
def test_a_name_with_signs_of_a_glob_is_that_one_file(tmp_path, suffix):
    """`part[1]` as a pattern matches `part1`."""
    for name, text in (("part[1]", "mine"), ("part1", "other")):
        file, table = tmp_path / f"{name}{suffix}", pyarrow.table({"text": [text]})
        if suffix == ".parquet":
            pyarrow.parquet.write_table(table, file)
        elif suffix == ".arrow":
            with pyarrow.ipc.new_file(str(file), table.schema) as writer:
                writer.write_table(table)
        else:
            file.write_text(json.dumps({"text": text}))
    (mine,) = find_files(str(tmp_path / f"part[1]{suffix}"), "data.train")
    assert values(mine) == [{"text": "mine"}]


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
    ("folder/rows.parquet.gz", "a .gz file"),
])  # fmt: skip
def test_what_cannot_be_found_says_where_it_was_looked_for(tmp_path, monkeypatch, path, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "readme.md").write_text("hi")
    if path.endswith(".gz"):
        (tmp_path / path).write_text("hi")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="data.validation: got") as caught:
        find_files(path, "data.validation")
    assert said in str(caught.value)


def test_an_empty_file_does_not_hide_what_is_wrong_with_the_others(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    good = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    (tmp_path / "b.jsonl").write_text(f'{json.dumps(good)}\n{{"messages": 3}}\n')
    (tmp_path / "c.jsonl").write_text('{"other": 1}\n')
    problems = peek(DataConfig(train=str(tmp_path)))
    assert [problem.path.rpartition("/")[2] for problem in problems] == ["data.train", "c.jsonl:1", "b.jsonl:2"]
    assert "a.jsonl, a file without rows" in problems[0].got
    with pytest.raises(UserError) as caught:
        prepare(DataConfig(train=str(tmp_path)), None, seed=0, show_progress=False)
    assert len(caught.value.problems) == 2
