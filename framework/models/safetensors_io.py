"""The safetensors file format, read by byte range and written as a stream.

Layout (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length, a JSON header
`{name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {...}}`, then the tensors' bytes; offsets count from the data's start.

Unusual: the `safetensors` package reads and writes whole tensors. A rank of the engine needs a range of elements of a tensor, and an
export must not hold more than one tensor, so both are done here: with `preadv`, and with a header written before the data.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from framework.config.errors import Problem, UserError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ALL_DTYPES = DTYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""With those that hold no model weights: counters, masks, codes of quantised weights."""
DTYPE_NAMES = {dtype: name for name, dtype in ALL_DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MOST_OPEN_FILES = 64
"""Of one `RangeReader`: a process may often have no more than 1,024, and a checkpoint has a file of each rank."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a file."""

    file: Path
    dtype: torch.dtype | None
    """None: a type that the reader of the header did not ask for."""
    dtype_name: str
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""


def read_header(file: Path, dtypes: Mapping[str, torch.dtype] = DTYPES, sha256: str | None = None) -> dict[str, Entry]:
    """The tensors of `file` by name; those of a type that is not among `dtypes` have none.

    `sha256`: what `StreamWriter.header_sha256` was, where that is known.
    Raises UserError, naming the file, when it cannot be read, is truncated, has changed or is no safetensors file.
    """
    try:
        with file.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, file_bytes - 8):
                raise _broken(file, f"{file_bytes:,} bytes with a header of {header_bytes:,} bytes", "a whole safetensors file")
            raw = stream.read(header_bytes)
    except OSError as error:
        raise unreadable(file, error) from error
    if sha256 not in (None, hashlib.sha256(start + raw).hexdigest()):
        raise _broken(file, "a header that has changed since it was written (its checksum differs)", "a whole safetensors file")
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {name: _entry(file, 8 + header_bytes, dtypes, **fields) for name, fields in header.items()}
        ends = [8 + header_bytes + fields["data_offsets"][1] for fields in header.values()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _broken(file, f"a header that does not parse ({type(error).__name__}: {error})", "a safetensors file") from error
    if file_bytes < max(ends, default=0):
        raise _broken(file, f"{file_bytes:,} bytes", f"{max(ends):,} bytes: the file is truncated")
    return entries


def _entry(
    file: Path, data_start: int, dtypes: Mapping[str, torch.dtype], *, dtype: str, shape: list[int], data_offsets: list[int]
) -> Entry:
    begin, end = data_offsets
    known = dtypes.get(dtype)
    if known is not None and end - begin != prod(shape) * known.itemsize:
        raise ValueError(f"{end - begin} bytes for {dtype} {shape}")
    return Entry(file=file, dtype=known, dtype_name=dtype, shape=tuple(shape), offset=data_start + begin)


def _broken(file: Path, got: str, expected: str) -> UserError:
    return UserError(Problem(path=str(file), got=got, expected=expected, fix="download or copy the file again"))


def unreadable(file: Path, error: OSError) -> UserError:
    """For a file that is gone, may not be read, or lies on a disk that fails."""
    got = f"a file that cannot be read ({error.strerror or error})"
    return UserError(Problem(path=str(file), got=got, expected="a readable file"))


class RangeReader:
    """Reads element ranges of tensors; keeps the files that were read last open.

    Raises UserError, naming the file, where it ends too early or the system cannot read it.
    """

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        """The one used last is the last."""

    def read(self, entry: Entry, start: int, stop: int) -> Tensor:
        """Elements start:stop of the flattened tensor, 1-D in the file's dtype. Only their bytes are read."""
        assert entry.dtype is not None
        out = torch.empty(stop - start, dtype=entry.dtype)
        self.read_into(out, entry, start)
        return out

    def read_into(self, out: Tensor, entry: Entry, start: int) -> memoryview:
        """Fill the 1-D `out`, of the file's dtype, with the elements from `start` on; its bytes come back."""
        assert out.dtype is entry.dtype and 0 <= start <= start + len(out) <= prod(entry.shape)
        raw = memoryview(out.view(torch.uint8).numpy())
        try:
            _read_fully(self._descriptor(entry.file), raw, entry.offset + start * entry.dtype.itemsize, entry.file)
        except OSError as error:
            raise unreadable(entry.file, error) from error
        return raw

    def _descriptor(self, file: Path) -> int:
        descriptor = self._descriptors.pop(file, None)
        if descriptor is None:
            if len(self._descriptors) == MOST_OPEN_FILES:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            descriptor = os.open(file, os.O_RDONLY)
        self._descriptors[file] = descriptor
        return descriptor

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


def _read_fully(descriptor: int, target: memoryview, offset: int, file: Path) -> None:
    """One call reads at most 2 GiB on Linux."""
    while target:
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise _broken(file, f"the end of the file at byte {offset:,}", "a whole safetensors file")
        target, offset = target[count:], offset + count


class StreamWriter:
    """Writes one file whose tensors' names, shapes and dtypes are known beforehand; the tensors may come in any order."""

    def __init__(self, file: Path, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """`tensors`: shape and dtype by name."""
        self._places: dict[str, tuple[int, torch.dtype]] = {}
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name, (shape, dtype) in tensors.items():
            begin, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
            self._places[name] = (begin, dtype)
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)  # the data start aligned
        self._data_start = 8 + len(raw)
        before_data = struct.pack("<Q", len(raw)) + raw
        self.header_sha256 = hashlib.sha256(before_data).hexdigest()
        """Of all that stands before the tensors."""
        self._stream = file.open("wb")
        self._stream.write(before_data)
        self._stream.truncate(self._data_start + end)
        self.file_bytes = self._data_start + end

    def write(self, name: str, tensor: Tensor) -> memoryview:
        """Store `tensor`, converted to its dtype in the file, as `name`; its bytes come back."""
        begin, dtype = self._places[name]
        flat = tensor.detach().to(device="cpu", dtype=dtype).contiguous().view(-1)
        data = memoryview(flat.view(torch.uint8).numpy())
        self._stream.seek(self._data_start + begin)
        self._stream.write(data)
        return data

    def write_in_chunks(self, name: str, tensor: Tensor, chunk_bytes: int) -> Iterator[memoryview]:
        """As `write`, for a contiguous tensor in host memory; yields chunk after chunk before it is written, while a cache may hold it."""
        begin, dtype = self._places[name]
        assert tensor.dtype is dtype and tensor.is_contiguous() and tensor.device.type == "cpu"
        data = memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
        self._stream.seek(self._data_start + begin)
        for start in range(0, len(data), chunk_bytes):
            chunk = data[start : start + chunk_bytes]
            yield chunk
            self._stream.write(chunk)
            self._begin_to_write_out(len(chunk))

    def _begin_to_write_out(self, nbytes: int) -> None:
        """Have the disk begin with the last `nbytes` now. Linux would wait until a tenth of the memory is to be written, or for the sync,
        and the disk would be idle until then. (The advice drops nothing that is not on the disk yet.)"""
        if hasattr(os, "posix_fadvise"):
            self._stream.flush()
            with suppress(OSError):  # a file system that takes no advice
                os.posix_fadvise(self._stream.fileno(), self._stream.tell() - nbytes, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self, *, durably: bool = False) -> None:
        """`durably`: what was written is on the disk when this returns."""
        if durably:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self._stream.close()
