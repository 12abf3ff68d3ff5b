"""What lies in a file of `torch.save`, without running what lies in it: tensors become places in the file, other objects plain values.

A pickle may name any function of any installed package and have it called. Here it may name what a table allows, all of it harmless, and
any other name is refused with that name. `read_archive` reads the small pickled part alone; a tensor's bytes are read later, by element
range, through the same `RangeReader` as safetensors.

Format (torch 1.6 and newer): a zip archive, nothing compressed. ROOT/data.pkl holds the objects, and for each storage a persistent id
("storage", type, key, device, elements) whose bytes are ROOT/data/KEY. https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import contextlib
import io
import operator
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from framework.config.errors import Problem, UserError
from framework.models.safetensors_io import DTYPES, Entry, unreadable

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
DTYPE_NAMES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a zip member: 26 bytes that the directory repeats, length of the name, length of what follows it."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor(Entry):
    """One tensor of an archive. `offset` and `shape` describe it only where it is contiguous."""

    contiguous: bool


class Inert:
    """Stands for an object of a class that nothing is wanted of: takes whatever its pickle gives it and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def read_archive(file: Path, allowed: Mapping[str, Any], fix: str, *, start: int = 0, stop: int | None = None) -> Any:
    """The object that `torch.save` wrote to `file` (or to its bytes start:stop), with a StoredTensor for each tensor.

    `allowed`: what takes the place of further names, as {"module.name": object}. `fix`: what else can be done with a file that is refused.
    Raises UserError, naming the file, where it is damaged or asks for anything else.
    """
    with _archive(file, fix, start, stop) as (archive, stream):
        (pickled,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        root = pickled.removesuffix("data.pkl")
        if f"{root}byteorder" in archive.namelist() and _stored(archive, f"{root}byteorder") != b"little":
            raise UserError(Problem(path=str(file), got="a file of a big-endian machine", expected="little-endian tensors", fix=fix))
        tensors = _Tensors(file, stream, start, {info.filename.removeprefix(f"{root}data/"): info for info in archive.infolist()})
        return unpickle(io.BytesIO(_stored(archive, pickled)), {**tensors.allowed(), **allowed}, file, fix, tensors)


def checked_bytes(file: Path, fix: str, *, start: int = 0, stop: int | None = None) -> int | None:
    """The bytes in a file of `torch.save` whose CRC-32 has been compared: all of them. None where it was written without.

    Raises UserError, naming the file, where one differs.
    """
    with _archive(file, fix, start, stop) as (archive, _):
        if not any(info.CRC for info in archive.infolist()):  # torch.serialization.set_crc32_options(False)
            return None
        if (changed := archive.testzip()) is not None:
            raise UserError(Problem(path=str(file), got=f"changed bytes in {changed}", expected="a whole file", fix="copy the file again"))
        return sum(info.file_size for info in archive.infolist())


@contextlib.contextmanager
def _archive(file: Path, fix: str, start: int, stop: int | None) -> Iterator[tuple[zipfile.ZipFile, BinaryIO]]:
    """Whatever goes wrong in here, as damaged bytes may make anything go wrong, is a UserError that names the file."""
    try:
        with file.open("rb") as stream, zipfile.ZipFile(_Window(stream, start, stop)) as archive:
            yield archive, stream
    except UserError:
        raise
    except OSError as error:
        raise unreadable(file, error) from error
    except Exception as error:
        got = f"no file of torch.save, or a damaged one ({type(error).__name__}: {error})"
        raise UserError(Problem(path=str(file), got=got, expected="a whole file of torch 1.6 or newer", fix=fix)) from error


def _stored(archive: zipfile.ZipFile, name: str) -> bytes:
    """A member as it lies in the file: few compressed bytes may stand for more than fit into memory."""
    if (kind := archive.getinfo(name).compress_type) != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed (method {kind})")
    return archive.read(name)


def unpickle(stream: BinaryIO, allowed: Mapping[str, Any], file: Path, fix: str, tensors: _Tensors | None = None) -> Any:
    """The object in `stream`, which may name nothing but what `allowed` has; the same errors as `read_archive`."""
    try:
        return _Unpickler(stream, allowed, file, fix, tensors).load()
    except UserError:
        raise
    except Exception as error:  # damaged bytes may ask for anything: memory, numbers, attributes
        got = f"a damaged pickle, which does not load ({type(error).__name__}: {error})"
        raise UserError(Problem(path=str(file), got=got, expected="a whole file", fix=fix)) from error


def shape_of(size: Any) -> tuple[int, ...]:
    """Lengths that a pickle names. Raises TypeError or ValueError where they are none."""
    shape = tuple(operator.index(length) for length in size)
    if min(shape, default=0) < 0:
        raise ValueError(f"a shape {list(shape)}")
    return shape


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, allowed: Mapping[str, Any], file: Path, fix: str, tensors: _Tensors | None) -> None:
        super().__init__(stream)
        self._allowed, self._file, self._fix, self._tensors = allowed, file, fix, tensors

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self._allowed:
            got = f"a pickle that asks for {module}.{name}, which is not among the {len(self._allowed)} harmless names"
            expected = "tensors and plain data; what else a pickle names is never called here"
            raise UserError(Problem(path=str(self._file), got=got, expected=expected, fix=self._fix))
        return self._allowed[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> Any:
        if self._tensors is None:
            raise pickle.UnpicklingError("a storage outside an archive")
        return self._tensors.storage(*pid)


class _Tensors:
    """Makes a StoredTensor of what a pickle says about a tensor."""

    def __init__(self, file: Path, stream: BinaryIO, start: int, members: dict[str, zipfile.ZipInfo]) -> None:
        self._file, self._stream, self._start, self._members = file, stream, start, members

    def allowed(self) -> dict[str, Any]:
        """What every archive may name. The callables are made anew each time: a pickle that spoils one spoils nobody else's."""
        return {
            **{f"torch.{name}": dtype for name, dtype in STORAGES.items()},
            **{f"torch.{name}": getattr(torch, name) for name in DTYPE_NAMES},
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
            "torch._tensor._rebuild_from_type_v2": lambda rebuild, _, arguments, __: rebuild(*arguments),
            "torch.Tensor": Inert,
            "torch.nn.parameter.Parameter": Inert,
            "torch.Size": torch.Size,
            "torch.device": lambda *_: None,
            "collections.OrderedDict": OrderedDict,
            "builtins.set": set,
            "__builtin__.set": set,  # as protocol 2 calls it
            "_codecs.encode": lambda text, _: text.encode("latin1"),  # how protocol 2 writes bytes
        }

    def storage(self, kind: str, dtype: torch.dtype, key: str, device: str, elements: int) -> tuple[torch.dtype, int, int]:
        """(data type, place of the first byte in the file, elements)."""
        if kind != "storage":
            raise ValueError(f"a persistent id of kind {kind!r}")
        if elements == 0:
            return dtype, 0, 0
        info = self._members[key]
        if info.compress_type != zipfile.ZIP_STORED or info.file_size < elements * dtype.itemsize:
            raise ValueError(f"{info.file_size} bytes for {elements} elements of {dtype}")
        header = self._start + info.header_offset
        self._stream.seek(header)
        name_bytes, extra_bytes = LOCAL_HEADER.unpack(self._stream.read(LOCAL_HEADER.size))
        return dtype, header + LOCAL_HEADER.size + name_bytes + extra_bytes, elements

    def _tensor(self, storage: tuple[torch.dtype, int, int], first: int, size: tuple, stride: tuple, *_: Any) -> StoredTensor:
        dtype, offset, elements = storage
        shape = shape_of(size)
        steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        contiguous = all(length == 1 or step == wanted for length, step, wanted in zip(shape, stride, steps, strict=True))
        last = first + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        if prod(shape) and not 0 <= first <= last < elements:
            raise ValueError(f"a tensor {list(shape)} beyond the {elements} elements of its storage")
        return StoredTensor(
            file=self._file,
            dtype=dtype if dtype in DTYPES.values() else None,
            dtype_name=str(dtype).removeprefix("torch."),
            shape=shape,
            offset=offset + first * dtype.itemsize,
            contiguous=contiguous or not prod(shape),
        )


class _Window(io.RawIOBase):
    """The bytes start:stop of a file as a file of their own."""

    def __init__(self, stream: BinaryIO, start: int, stop: int | None) -> None:
        self._stream, self._start, self._at = stream, start, 0
        self._bytes = (stream.seek(0, io.SEEK_END) if stop is None else stop) - start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._bytes}[whence]
        if at < 0:
            raise ValueError(f"a place {-at} bytes before the file")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        self._stream.seek(self._start + self._at)
        data = self._stream.read(max(0, min(len(target), self._bytes - self._at)))
        target[: len(data)] = data
        self._at += len(data)
        return len(data)
