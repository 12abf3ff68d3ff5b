"""Reading ranges of many files: few of them stay open, and what the system refuses is an error that names file and reason."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from framework.config.errors import UserError
from framework.models.safetensors_io import MOST_OPEN_FILES, Entry, RangeReader, StreamWriter, read_header


def written(file: Path, values: torch.Tensor) -> Entry:
    writer = StreamWriter(file, {"x": (tuple(values.shape), values.dtype)})
    writer.write("x", values)
    writer.close()
    return read_header(file, sha256=writer.header_sha256)["x"]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def few_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda more: resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + more, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_files_than_a_process_may_open_can_be_read(tmp_path, few_files):
    entries = [written(tmp_path / str(number), torch.full((3,), float(number))) for number in range(2 * MOST_OPEN_FILES)]
    few_files(MOST_OPEN_FILES + 8)
    reader, before = RangeReader(), open_files()
    for turn in range(2):
        for number, entry in enumerate(entries):
            assert reader.read(entry, turn, turn + 1).item() == number
    assert open_files() - before == MOST_OPEN_FILES
    del reader
    assert open_files() == before


def test_the_file_that_was_not_used_longest_is_closed(tmp_path):
    entries = [written(tmp_path / str(number), torch.ones(1)) for number in range(MOST_OPEN_FILES + 1)]
    reader = RangeReader()
    for number in (*range(MOST_OPEN_FILES), 0, MOST_OPEN_FILES):
        reader.read(entries[number], 0, 1)
    for file in tmp_path.iterdir():
        file.unlink()
    reader.read(entries[0], 0, 1)  # still open
    with pytest.raises(UserError, match="/1: got a file that cannot be read"):
        reader.read(entries[1], 0, 1)


def test_too_many_open_files_is_what_is_said(tmp_path, few_files):
    entry = written(tmp_path / "file", torch.ones(3))
    few_files(2)
    taken = []
    try:
        with pytest.raises(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for read in (lambda: RangeReader().read(entry, 0, 1), lambda: read_header(entry.file)):
            with pytest.raises(UserError, match=r"file: got a file that cannot be read \(Too many open files\)"):
                read()
    finally:
        for descriptor in taken:
            os.close(descriptor)


def test_a_folder_that_is_gone_is_an_error_with_file_and_reason(tmp_path):
    entry = written(tmp_path / "file", torch.ones(3))
    entry.file.unlink()
    for read in (lambda: RangeReader().read(entry, 0, 1), lambda: read_header(entry.file)):
        with pytest.raises(UserError, match=r"file: got a file that cannot be read \(No such file or directory\)"):
            read()


def test_an_error_while_reading_is_an_error_with_file_and_reason(tmp_path):
    entry = written(tmp_path / "file", torch.ones(3))
    entry.file.unlink()
    entry.file.mkdir()  # it opens, and then reading fails
    with pytest.raises(UserError, match=r"file: got a file that cannot be read \(Is a directory\)"):
        RangeReader().read(entry, 0, 1)


def test_a_changed_header_is_refused(tmp_path):
    file = written(tmp_path / "file", torch.ones(3)).file
    with pytest.raises(UserError, match="a header that has changed since it was written"):
        read_header(file, sha256="0" * 64)
