"""Folders of arrays that are made once and used by every later run: named by what they are made of, whole or not there.

    CACHE/tokens/<key>/            entry.json (what it is, and the SHA-256 of every 4 MiB of each array), ids.bin, offsets.bin, ...
    CACHE/tokens/<key>.partial/    one that is being made, or whose maker was killed: the next one begins anew in its place
    CACHE/digests/                 SHA-256 of large source files, as long as nothing about a file has changed

`obtain` opens an entry or has it made. Files are written, synced, and then the folder gets its name, so a process that is killed at any
moment leaves no half of one. Who makes an entry holds a lock that goes with its process; another job that wants the same one waits, and
finds it. Where a file system knows no locks each makes its own, and the first to be done wins. Whoever has an entry open keeps it, even
when its folder is removed meanwhile.

Unusual: an entry is not believed. Sizes and digests are compared each time it is opened, of a large one those of some blocks spread over
it (`thoroughly`: of all), and what does not hold is said and made anew.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from framework.config.errors import Problem, UserError
from framework.data.flat import BLOCK_BYTES, Stored, digest_of_blocks
from framework.disk import sync, write_whole
from framework.progress import busy

ENTRY = "entry.json"
LOCK = "lock"
BLOCKS_CHECKED = 256
"""Of an entry, when it is opened: a gigabyte, in a second or two."""
WRITING_ERRORS = (
    errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO,
)  # fmt: skip
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def cache_folder(setting: str | None) -> Path:
    """The folder that `data.cache_dir` means."""
    if setting is not None:
        return Path(setting).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()).absolute() / "framework"


class ArrayWriter:
    """Appends to a file, piece by piece, and knows the digest of each of its blocks."""

    def __init__(self, file: Path, dtype: type) -> None:
        self.dtype, self.items = np.dtype(dtype), 0
        self._file, self._blocks, self._block, self._room = file.open("wb", buffering=1 << 20), [], hashlib.sha256(), BLOCK_BYTES

    def append(self, values: np.ndarray) -> None:
        """values [items], of the array's type"""
        assert values.dtype == self.dtype
        data = memoryview(np.ascontiguousarray(values).view(np.uint8))
        self.items += len(values)
        self._file.write(data)
        while len(data) >= self._room:
            self._block.update(data[: self._room])
            data = data[self._room :]
            self._blocks.append(self._block.hexdigest())
            self._block, self._room = hashlib.sha256(), BLOCK_BYTES
        self._block.update(data)
        self._room -= len(data)

    def close(self) -> dict[str, Any]:
        """Have it on the disk; what `entry.json` says of it."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        if self._room < BLOCK_BYTES:
            self._blocks.append(self._block.hexdigest())
        return {"dtype": self.dtype.str, "items": self.items, "sha256": self._blocks}

    def abandon(self) -> None:
        with suppress(OSError):  # what is buffered does not fit on a full disk, and is not wanted any more
            self._file.close()


class EntryWriter:
    """The arrays of an entry that is being made in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._arrays = folder, {}

    def array(self, name: str, dtype: type) -> ArrayWriter:
        self._arrays[name] = ArrayWriter(self.folder / f"{name}.bin", dtype)
        return self._arrays[name]

    @property
    def nbytes(self) -> int:
        return sum(array.items * array.dtype.itemsize for array in self._arrays.values())

    def finish(self, facts: dict[str, Any]) -> None:
        arrays = {name: array.close() for name, array in self._arrays.items()}
        body = {"arrays": arrays, "facts": facts}
        write_whole(self.folder / ENTRY, json.dumps({**body, "sha256": _digest_of(body)}))

    def abandon(self) -> None:
        for array in self._arrays.values():
            array.abandon()


class Entry:
    """A whole one. Raises ValueError, with what does not hold, for one that is not, and FileNotFoundError where there is none."""

    def __init__(self, folder: Path, *, thoroughly: bool = False) -> None:
        self.folder = folder
        text = (folder / ENTRY).read_text()
        try:
            written = json.loads(text)
            body = {"arrays": written["arrays"], "facts": written["facts"]}
            whole = written["sha256"] == _digest_of(body)
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise ValueError(f"{ENTRY} is damaged")
        self.facts: dict[str, Any] = body["facts"]
        self._written: dict[str, dict] = body["arrays"]
        self._arrays = {name: self._mapped(name) for name in self._written}
        self._check_blocks(thoroughly)

    def array(self, name: str) -> np.ndarray:
        """Mapped from disk."""
        return self._arrays[name]

    def stored(self, name: str, largest: int | None = None) -> Stored:
        return Stored(self._arrays[name], digest=digest_of_blocks(self._written[name]["sha256"]), largest=largest)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    def _mapped(self, name: str) -> np.ndarray:
        file, written = self.folder / f"{name}.bin", self._written[name]
        dtype, items = np.dtype(written["dtype"]), written["items"]
        try:
            nbytes = file.stat().st_size
        except FileNotFoundError:
            raise ValueError(f"{file.name} is missing") from None
        if nbytes != items * dtype.itemsize:
            raise ValueError(f"{file.name} has {nbytes:,} bytes, not {items * dtype.itemsize:,}")
        return np.memmap(file, dtype=dtype, mode="r", shape=(items,)) if items else np.empty(0, dtype)

    def _check_blocks(self, thoroughly: bool) -> None:
        blocks = [(name, number) for name, written in self._written.items() for number in range(len(written["sha256"]))]
        if len(blocks) > BLOCKS_CHECKED and not thoroughly:
            blocks = [blocks[at] for at in np.linspace(0, len(blocks) - 1, BLOCKS_CHECKED).astype(int)]
        with busy(f"checking {self.folder}"):
            for name, number in blocks:
                data = self._arrays[name].view(np.uint8)[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
                if hashlib.sha256(data).hexdigest() != self._written[name]["sha256"][number]:
                    raise ValueError(f"{name}.bin is damaged near byte {number * BLOCK_BYTES:,}")


def obtain(
    root: Path, key: str, make: Callable[[EntryWriter], dict[str, Any]], *, say: Callable[[str], None], thoroughly: bool = False
) -> tuple[Entry, bool]:
    """The entry `key` below `root`, and whether it was there before. `make` writes the arrays of one that was not, and returns its facts.

    `say` is told what takes long or is not as it should be. Raises UserError where the folder cannot be written.
    """
    folder = root / "tokens" / key
    with readable_errors(root):
        found = _opened(folder, thoroughly, say)
        while found is None:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _sweep(folder.parent)
            with _partial(folder, say) as partial:
                found = _opened(folder, thoroughly, lambda _: None)  # by another job, since the first look
                if partial is not None and found is None:
                    return _made(partial, folder, make, root), False
                if partial is not None:
                    shutil.rmtree(partial, ignore_errors=True)
        return found, True


def _made(partial: Path, folder: Path, make: Callable[[EntryWriter], dict[str, Any]], root: Path) -> Entry:
    writer = EntryWriter(partial)
    try:
        with readable_errors(root, writer):
            writer.finish(make(writer))
    except BaseException:
        writer.abandon()
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return _installed(partial, folder)


def _opened(folder: Path, thoroughly: bool, say: Callable[[str], None]) -> Entry | None:
    try:
        return Entry(folder, thoroughly=thoroughly)
    except FileNotFoundError:
        return None
    except ValueError as error:
        say(f"{folder} cannot be used ({error}); it is made anew")
        return None


@contextmanager
def _partial(folder: Path, say: Callable[[str], None]) -> Iterator[Path | None]:
    """An empty folder to make an entry in, locked; None: while this process waited for it, another job was done with it."""
    partial = folder.with_name(f"{folder.name}.partial")
    while True:
        partial.mkdir(exist_ok=True)
        try:
            lock = (partial / LOCK).open("w")
        except FileNotFoundError:  # it got its name, or was given up, in this very moment
            continue
        with lock:
            if not _locked(lock, partial, say):
                partial = folder.with_name(f"{folder.name}.{uuid4().hex}.partial")
                partial.mkdir()
                yield partial
                return
            try:
                is_mine = os.path.samestat(os.fstat(lock.fileno()), (partial / LOCK).stat())
            except FileNotFoundError:
                is_mine = False
            if is_mine:
                for left in partial.iterdir():  # by one that was killed
                    if left.name != LOCK:
                        left.unlink()
                yield partial
                return
        yield None
        return


def _sweep(folder: Path) -> None:
    """Remove what jobs that were killed have left: nobody holds its lock."""
    for partial in folder.glob("*.partial"):
        with suppress(OSError), (partial / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(partial, ignore_errors=True)


def _locked(lock: Any, partial: Path, say: Callable[[str], None]) -> bool:
    """Wait for the lock; False where the file system has none."""
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another job that prepares the same data in {partial}")
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return False
        raise
    return True


def _installed(partial: Path, folder: Path) -> Entry:
    """Give the finished `partial` its name. An entry that is there by then is another job's, or one that cannot be used."""
    (partial / LOCK).unlink(missing_ok=True)
    sync(partial)
    while True:
        try:
            os.rename(partial, folder)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        try:
            won = Entry(folder)
        except (ValueError, FileNotFoundError):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            shutil.rmtree(partial, ignore_errors=True)
            return won
    sync(folder.parent)
    return Entry(folder)


@contextmanager
def readable_errors(root: Path, writer: EntryWriter | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in WRITING_ERRORS or not _is_about(error, root):
            raise
        after = f", after {writer.nbytes / 1e9:.3f} GB of tokens" if writer is not None and writer.nbytes else ""
        expected = "a folder for tokenised data, with room for about 5 bytes per token"
        got = f"{root} ({error.strerror}{after})"
        raise UserError(Problem(path="data.cache_dir", got=got, expected=expected, fix="data.cache_dir=/path/on/a/larger/disk")) from error


def _is_about(error: OSError, root: Path) -> bool:
    """Whether it is about something below `root`, or a folder that `root` is to lie in; not about a source file that was deleted, say."""
    if not isinstance(error.filename, str | os.PathLike):
        return True  # a write to an open file
    file = Path(error.filename)
    return file.is_relative_to(root) or root.is_relative_to(file)


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
