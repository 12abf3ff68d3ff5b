"""The scratch file: what is written comes back whole or as an error, room is taken at once, and nothing is left behind."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from framework.config.errors import UserError
from framework.zero import nvme
from framework.zero.nvme import CHUNK_BYTES, PAGE_BYTES, Store, stored_bytes

CPU = torch.device("cpu")
NUMEL = 2 * CHUNK_BYTES // 4 + 12_345  # three chunks, the last of no round size
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["direct", "cached"])
def store(request, tmp_path, monkeypatch) -> Store:
    """Past the system's cache, where this file system takes that, and through it."""
    if request.param == "cached":
        monkeypatch.setattr(nvme, "_past_the_cache", lambda descriptor: None)
    made = Store(tmp_path, CPU)
    if request.param == "direct" and not made.is_direct:
        pytest.skip("no direct I/O here")
    assert made.is_direct == (request.param == "direct")
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_what_was_written_is_read(store: Store, dtype: torch.dtype) -> None:
    small, large = store.reserve("small", 3, dtype), store.reserve("large", NUMEL, dtype)
    values = torch.randint(0, 250, (NUMEL,)).to(dtype)
    (large.write(values) + small.write(values[:3])).wait()
    whole, part, three = torch.empty(NUMEL, dtype=dtype), torch.empty(NUMEL - 1007, dtype=dtype), torch.empty(3, dtype=dtype)
    (large.read(whole) + large.read(part, 1000) + small.read(three)).wait()
    assert torch.equal(whole, values) and torch.equal(part, values[1000:-7]) and torch.equal(three, values[:3])
    assert store.bytes_written == PAGE_BYTES + stored_bytes(large.nbytes) == store.nbytes


def test_values_are_cast_when_they_are_written_and_zeros_before(store: Store) -> None:
    extent, values, out = store.reserve("x", 1000, torch.bfloat16), torch.randn(1000), torch.ones(1000, dtype=torch.bfloat16)
    extent.read(out).wait()
    assert not out.any() and store.bytes_read == 0
    extent.write(values).wait()
    extent.read(out).wait()
    assert torch.equal(out, values.bfloat16())


def test_bytes_that_changed_on_the_disk_are_refused_by_name(store: Store) -> None:
    before, extent = store.reserve("before", 1024, torch.float32), store.reserve("blocks.3's exp_avg", NUMEL, torch.float32)
    (before.write(torch.ones(1024)) + extent.write(torch.ones(NUMEL))).wait()
    os.pwrite(store._file.fileno(), b"\1", PAGE_BYTES + CHUNK_BYTES + 17)
    out = torch.empty(NUMEL)
    extent.read(out[: CHUNK_BYTES // 4]).wait()
    with pytest.raises(UserError, match=r"other bytes of blocks\.3's exp_avg than were written, at 8,392,704") as caught:
        extent.read(out).wait()
    assert str(store.folder) in caught.value.problems[0].got


def test_a_file_that_was_cut_off_is_refused(store: Store) -> None:
    extent = store.reserve("x", NUMEL, torch.float32)
    extent.write(torch.ones(NUMEL)).wait()
    os.ftruncate(store._file.fileno(), CHUNK_BYTES)
    with pytest.raises(UserError, match="the end of the file at byte 8,388,608 in reading x"):
        extent.read(torch.empty(NUMEL)).wait()


def test_a_disk_that_fails_is_named_and_the_others_jobs_are_done_by_then(store: Store, monkeypatch) -> None:
    extent, done = store.reserve("x", NUMEL, torch.float32), []

    def fail(descriptor: int, buffers: list, offset: int) -> int:
        done.append(offset)
        if offset == CHUNK_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return len(buffers[0])

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(UserError, match="Input/output error in writing x"):
        extent.write(torch.ones(NUMEL)).wait()
    assert sorted(done) == [0, CHUNK_BYTES, 2 * CHUNK_BYTES]


def test_a_full_disk_is_told_when_room_is_reserved(tmp_path) -> None:
    store = Store(tmp_path, CPU)
    store.reserve("first", 1000, torch.float32)
    with pytest.raises(UserError, match=r"in reserving .* bytes for second beside 4,096 .* bytes are free"):
        store.reserve("second", 2 * shutil.disk_usage(tmp_path).free, torch.uint8)
    assert os.fstat(store._file.fileno()).st_size == 4096, "nothing of it was taken"


def test_room_is_taken_at_once(tmp_path) -> None:
    store = Store(tmp_path, CPU)
    store.reserve("x", 1 << 20, torch.float32)
    assert os.fstat(store._file.fileno()).st_blocks * 512 >= 4 << 20


@pytest.mark.parametrize("make", [lambda path: path / "missing", lambda path: path / "file"], ids=["missing", "no folder"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path, make) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="which cannot be used") as caught:
        Store(make(tmp_path), CPU)
    assert caught.value.problems[0].path == "offload.nvme_path"


def test_what_is_held_is_not_overwritten_until_it_is_let_go(store: Store) -> None:
    extent, out, overwritten = store.reserve("x", 8, torch.float32), torch.empty(8), threading.Event()
    extent.write(torch.ones(8)).wait()
    extent.hold()

    def overwrite() -> None:
        extent.write(torch.zeros(8)).wait()
        overwritten.set()

    thread = threading.Thread(target=overwrite)
    thread.start()
    assert not overwritten.wait(0.1)
    extent.read(out).wait()
    assert out.all()
    extent.let_go()
    thread.join(20)
    extent.read(out).wait()
    assert not out.any()


KILLED = """
import sys, torch
from framework.zero.nvme import Store
store = Store(sys.argv[1], torch.device("cpu"))
extent = store.reserve("x", 1 << 23, torch.float32)
print("ready", flush=True)
while True:
    extent.write(torch.ones(1 << 23)).wait()
"""


def test_nothing_is_left_of_a_process_that_is_killed_while_it_writes(tmp_path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        assert list(tmp_path.iterdir()) == [], "it has no name while it is used"
        process.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_gone_with_its_store(tmp_path) -> None:
    store = Store(tmp_path, CPU)
    store.reserve("x", 1000, torch.float32).write(torch.ones(1000)).wait()
    descriptors = {store._file.fileno(), store._descriptor}
    del store
    gc.collect()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_nothing_takes_no_room(store: Store) -> None:
    extent = store.reserve("empty", 0, torch.float32)
    extent.write(torch.empty(0)).wait()
    extent.read(torch.empty(0)).wait()
    assert store.nbytes == 0
