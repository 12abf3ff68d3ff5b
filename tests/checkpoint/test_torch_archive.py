"""Files of torch.save, described without running them: every place is where torch put the bytes, and nothing but data is taken."""

from __future__ import annotations

import collections
import pickle
from pathlib import Path

import pytest
import torch

from framework.checkpoint.torch_archive import read_archive
from framework.config.errors import UserError
from framework.models.safetensors_io import RangeReader

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def refusal(file: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_archive(file, {}, "DO THIS")
    return str(caught.value)


def test_places_are_those_of_the_bytes_for_every_type_and_view(tmp_path: Path):
    base = torch.arange(60.0)
    tensors = {str(dtype): base.to(dtype).view(5, 12) for dtype in DTYPES}
    tensors |= {
        "view": base[7:43].view(4, 9),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(base),
    }
    plain = {"size": torch.Size([2, 3]), "ordered": collections.OrderedDict(a=1), "bytes": b"\x00\xff", "dtype": torch.bfloat16, "set": {1}}
    torch.save({"tensors": tensors, "plain": plain, "counts": torch.arange(3)}, tmp_path / "file.pt")
    found, reader = read_archive(tmp_path / "file.pt", {}, ""), RangeReader()
    assert found["plain"] == plain and found["counts"].dtype is None and found["counts"].dtype_name == "int64"
    for name, tensor in tensors.items():
        entry = found["tensors"][name]
        assert entry.contiguous and entry.shape == tuple(tensor.shape)
        assert torch.equal(reader.read(entry, 0, tensor.numel()), tensor.detach().flatten()), name


def test_a_part_of_a_file_is_a_file(tmp_path: Path):
    torch.save(torch.arange(9.0), tmp_path / "inner.pt")
    inner = (tmp_path / "inner.pt").read_bytes()
    (tmp_path / "outer").write_bytes(b"x" * 777 + inner + b"y" * 555)
    entry = read_archive(tmp_path / "outer", {}, "", start=777, stop=777 + len(inner))
    assert torch.equal(RangeReader().read(entry, 2, 5), torch.tensor([2.0, 3.0, 4.0]))


def test_a_transposed_tensor_is_told_apart(tmp_path: Path):
    torch.save([torch.ones(3, 4).T, torch.ones(4, 1).T], tmp_path / "file.pt")
    assert [entry.contiguous for entry in read_archive(tmp_path / "file.pt", {}, "")] == [False, True]


def test_what_is_no_archive_is_refused(tmp_path: Path):
    torch.save(torch.ones(3), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text.pt").write_text("no archive")
    for name in ("old.pt", "text.pt"):
        said = refusal(tmp_path / name)
        assert str(tmp_path / name) in said and "no file of torch.save" in said and "DO THIS" in said


@pytest.mark.parametrize("planted", [eval, pickle.loads, torch.load, torch.nn.Linear, Path])
def test_any_other_name_is_refused_and_said(tmp_path: Path, planted):
    torch.save({"weights": torch.ones(3), "else": planted}, tmp_path / "file.pt")
    said = refusal(tmp_path / "file.pt")
    assert f".{planted.__qualname__}, which is not among" in said and "DO THIS" in said
