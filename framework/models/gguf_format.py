"""The GGUF file format: metadata and the table of tensors (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Unusual: the `gguf` package has a reader, too, but it makes a numpy view of each of a vocabulary's 100,000 strings and takes 5 s for
SmolLM2, on every rank; this one takes 0.1 s. Dequantising, the difficult part, is left to the package.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from framework.config.errors import Problem, UserError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies and how it is encoded."""

    shape: tuple[int, ...]
    """Rows first, as in torch (GGUF counts the other way round)."""
    type_number: int
    """A `gguf.GGMLQuantizationType`."""
    offset: int
    """Of its first byte in the file."""


@dataclass(frozen=True)
class Contents:
    """Everything before the tensors' data."""

    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]


def read_contents(file: Path) -> Contents:
    """Metadata and tensor table of `file`. Raises UserError when it is no GGUF file, or truncated within them."""
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(data).contents()
    except (struct.error, ValueError, UnicodeDecodeError, KeyError, MemoryError) as error:
        problem = Problem(path=str(file), got=f"a file that does not parse ({error})", expected="a whole GGUF file, version 2 or 3")
        raise UserError(problem) from error


class _Parser:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def contents(self) -> Contents:
        magic, version = self._unpack("4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version}")
        tensor_count, pair_count = self._unpack("QQ")
        metadata = {}
        for _ in range(pair_count):
            key = self._string()
            metadata[key] = self._value(*self._unpack("I"))
        table = [self._tensor() for _ in range(tensor_count)]
        alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        start = -(-self._position // alignment) * alignment
        tensors = {name: TensorInfo(shape=shape, type_number=number, offset=start + offset) for name, shape, number, offset in table}
        return Contents(metadata, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dimensions,) = self._unpack("I")
        shape = self._unpack(f"{dimensions}Q")
        return name, shape[::-1], *self._unpack("IQ")

    def _value(self, type_number: int) -> object:
        if type_number == STRING:
            return self._string()
        if type_number != ARRAY:
            return self._unpack(SCALARS[type_number])[0]
        item_type, count = self._unpack("IQ")
        if item_type in SCALARS:
            return list(self._unpack(f"{count}{SCALARS[item_type]}"))
        return [self._value(item_type) for _ in range(count)]

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        begin, self._position = self._position, self._position + length
        if self._position > len(self._data):
            raise ValueError("the file ends within a string")
        return self._data[begin : self._position].decode("utf-8")

    def _unpack(self, layout: str) -> tuple:
        values = struct.unpack_from("<" + layout, self._data, self._position)
        self._position += struct.calcsize("<" + layout)
        return values
