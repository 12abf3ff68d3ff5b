"""Folders of torch.distributed.checkpoint (DCP): reading parameters by element range, and writing a model tensor by tensor.

    FOLDER/.metadata            a pickle: of each tensor its shape, data type and chunks, of each chunk (FILE, first byte, bytes)
    FOLDER/__R_N.distcp         what rank R has written: for each chunk the bytes of one `torch.save`

A chunk is a box of a tensor, [offsets, offsets + sizes): rows of it under fully_shard, columns, too, under tensor parallelism. Source:
torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.13; the layout is that of torch 2.1 and newer.

Unusual: torch's reader unpickles .metadata as it is and loads whole chunks. Here no name in the pickle is looked up, what it describes is
built from inert records, and only the rows that are asked for are read.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor

from framework.checkpoint.source import METADATA
from framework.checkpoint.torch_archive import DTYPE_NAMES, Inert, StoredTensor, checked_bytes, read_archive, shape_of, unpickle
from framework.config.errors import Problem, UserError
from framework.models.safetensors_io import RangeReader, unreadable

LAYOUT = "a folder written by torch.distributed.checkpoint.save"


class _Record:
    """Stands for a dataclass in the pickle: keeps the state, whatever it is."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Tensor(_Record):
    """TensorStorageMetadata: `properties`, `size`, `chunks`."""


def _metadata_names() -> dict[str, Any]:
    """What .metadata may name, and what takes its place."""
    metadata = "torch.distributed.checkpoint.metadata"
    records = ("Metadata", "MetadataIndex", "ChunkStorageMetadata", "BytesStorageMetadata", "TensorProperties", "StorageMeta")
    return {
        **{f"{metadata}.{name}": _Record for name in records},
        f"{metadata}.TensorStorageMetadata": _Tensor,
        f"{metadata}._MEM_FORMAT_ENCODING": int,
        "torch.distributed.checkpoint.filesystem._StorageInfo": _Record,
        "torch.serialization._get_layout": lambda name: name,
        "torch.Size": torch.Size,
        **{f"torch.{name}": getattr(torch, name) for name in DTYPE_NAMES},
        **{f"pathlib.{name}": Inert for name in ("PosixPath", "WindowsPath", "PurePosixPath")},
        "collections.OrderedDict": dict,
    }


@dataclass(frozen=True)
class _Chunk:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    stop: int
    """Of its archive in the file."""


class DCPWeights:
    """Every tensor of a folder, by its name there: `shapes`, `dtypes`, `read`, and where its bytes are."""

    only_parameters = False
    """The state of an optimizer lies among them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, RangeReader()
        self._fix = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE  (if you trust it)"
        try:
            stream = io.BytesIO((folder / METADATA).read_bytes())
        except OSError as error:
            raise unreadable(folder / METADATA, error) from error
        metadata = unpickle(stream, _metadata_names(), folder / METADATA, self._fix)
        try:
            described = {name: item for name, item in metadata.state_dict_metadata.items() if isinstance(item, _Tensor)}
            stored = {(index.fqn, tuple(getattr(index, "offset", ()))): info for index, info in metadata.storage_data.items()}
            self.shapes = {name: shape_of(item.size) for name, item in described.items()}
            if not all(isinstance(name, str) for name in self.shapes):
                raise TypeError("a tensor whose name is no word")
            self.dtypes = {name: str(item.properties.state[0]).removeprefix("torch.") for name, item in described.items()}
            self._chunks = {
                name: [self._chunk(self.shapes[name], chunk, stored[name, tuple(chunk.offsets)]) for chunk in item.chunks]
                for name, item in described.items()
            }
        except UserError:
            raise
        except Exception as error:  # a damaged pickle may hold anything in the place of anything
            got = f"a damaged description, or not that of DCP ({type(error).__name__}: {error})"
            raise UserError(Problem(path=str(folder / METADATA), got=got, expected=LAYOUT, fix=self._fix)) from error
        self._check_files()
        self._entries: dict[_Chunk, StoredTensor] = {}

    def _chunk(self, shape: tuple[int, ...], chunk: Any, info: Any) -> _Chunk:
        offsets, sizes = shape_of(chunk.offsets), shape_of(chunk.sizes)
        if any(offset + size > length for offset, size, length in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a chunk {list(sizes)} at {list(offsets)} of a tensor {list(shape)}")
        if getattr(info, "transform_descriptors", None):
            got = f"tensors stored through {', '.join(info.transform_descriptors)}"
            raise UserError(Problem(path=str(self.folder), got=got, expected="tensors as they are", fix=self._fix))
        if Path(info.relative_path).name != info.relative_path:
            raise UserError(Problem(path=str(self.folder / METADATA), got=f"a file {info.relative_path}", expected="files beside it"))
        start, nbytes = shape_of((info.offset, info.length))
        return _Chunk(offsets, sizes, self.folder / info.relative_path, start, start + nbytes)

    def _check_files(self) -> None:
        ends: dict[Path, int] = {}
        for chunks in self._chunks.values():
            for chunk in chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.stop)
        for file, end in ends.items():
            nbytes = file.stat().st_size if file.is_file() else None
            if nbytes is None or nbytes < end:
                got = "nothing" if nbytes is None else f"{nbytes:,} bytes"
                raise UserError(Problem(path=str(file), got=got, expected=f"a file of {end:,} bytes", fix="copy the folder again"))

    def check(self) -> tuple[int, list[str]]:
        """Compare the checksums that there are: (bytes that were compared, what has none). Raises UserError where one differs."""
        chunks = {chunk for chunks in self._chunks.values() for chunk in chunks}
        sizes = {chunk: checked_bytes(chunk.file, self._fix, start=chunk.start, stop=chunk.stop) for chunk in chunks}
        without = {chunk.file.name for chunk, nbytes in sizes.items() if nbytes is None}
        return sum(nbytes or 0 for nbytes in sizes.values()), [METADATA, *sorted(without)]

    # ---- what it holds
    def describe(self) -> str:
        files = {chunk.file for chunks in self._chunks.values() for chunk in chunks}
        return f"torch.distributed.checkpoint, {len(self.shapes)} tensors in {len(files)} files"

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened tensor `name` of floating-point numbers, 1-D on the CPU. The rows that they lie in are
        read whole, others not."""
        shape = self.shapes[name] or (1,)
        if start == stop:
            return torch.empty(0)
        per_row = prod(shape[1:])
        first, last = start // per_row, -(-stop // per_row)
        rows, filled = None, 0  # rows: [last - first, *shape[1:]]
        for chunk in self._chunks[name]:
            offsets, sizes = chunk.offsets or (0,), chunk.sizes or (1,)
            low, high = max(first, offsets[0]), min(last, offsets[0] + sizes[0])
            if low >= high or not prod(sizes):
                continue
            entry, width = self._open(chunk), prod(sizes[1:])
            values = self._reader.read(entry, (low - offsets[0]) * width, (high - offsets[0]) * width)
            if rows is None:
                rows = torch.empty(last - first, *shape[1:], dtype=values.dtype)
            box = (slice(low - first, high - first), *(slice(at, at + size) for at, size in zip(offsets[1:], sizes[1:], strict=True)))
            rows[box] = values.view(high - low, *sizes[1:])
            filled += values.numel()
        if filled != (last - first) * per_row:
            got = f"chunks that do not make a whole of {name}"
            raise UserError(Problem(path=str(self.folder / METADATA), got=got, expected="every element once"))
        return rows.flatten()[start - first * per_row : stop - first * per_row]

    def places(self, name: str) -> list[str]:
        """FILE:BYTE of each chunk's values."""
        return [f"{chunk.file.name}:{self._open(chunk).offset}" for chunk in self._chunks[name] if prod(chunk.sizes)]

    def _open(self, chunk: _Chunk) -> StoredTensor:
        if chunk not in self._entries:
            entry = read_archive(chunk.file, {}, self._fix, start=chunk.start, stop=chunk.stop)
            if not isinstance(entry, StoredTensor) or not entry.contiguous or entry.shape != chunk.sizes:
                got = f"a chunk at byte {chunk.start:,} that is no contiguous tensor {list(chunk.sizes)}"
                raise UserError(Problem(path=str(chunk.file), got=got, expected=LAYOUT, fix=self._fix))
            self._entries[chunk] = entry
        return self._entries[chunk]


def write_dcp(folder: Path, read: Callable[[str], Tensor], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Write the files of a DCP folder into `folder`. `read(name)` is asked once for each tensor of `shapes`; one is held at a time.

    Raises what `read` raises, OSError where the files cannot be written.
    """
    state = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    writer = torch_dcp.FileSystemWriter(folder, single_file_per_rank=False)  # it keeps all tensors of a file until that is closed
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # so it says, though that was asked for
        try:
            torch_dcp.save(state, storage_writer=writer, planner=_ReadWhenWritten(read, dtype), no_dist=True)
        except torch_dcp.CheckpointException as error:
            ((cause, _),) = error.failures.values()
            raise cause if isinstance(cause, UserError) else OSError(str(cause)) from error


class _ReadWhenWritten(torch_dcp.DefaultSavePlanner):
    """Plans with tensors on the meta device; their values come when they are to be written."""

    def __init__(self, read: Callable[[str], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self._read, self._dtype = read, dtype

    def resolve_data(self, write_item: Any) -> Tensor:
        return self._read(write_item.index.fqn).detach().to("cpu", self._dtype).contiguous()
