"""Files of torch.save, described without running them: every place is where torch put the bytes, and nothing but data is taken."""

from __future__ import annotations

import collections
import pickle
import random
import zipfile
from pathlib import Path

import pytest
import torch

from framework.checkpoint.torch_archive import checked_bytes, read_archive
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


def rewritten(file: Path, change, **options) -> None:
    """The archive anew, with each member's bytes through `change(name, data)`."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", **options) as archive:
        for name, data in members.items():
            archive.writestr(name, change(name, data))


def test_a_compressed_pickle_is_not_inflated(tmp_path: Path):
    torch.save({"x": 1}, tmp_path / "file.pt")
    bomb = lambda name, data: data + bytes(1 << 26) if name.endswith("data.pkl") else data  # noqa: E731
    rewritten(tmp_path / "file.pt", bomb, compression=zipfile.ZIP_DEFLATED)
    assert (tmp_path / "file.pt").stat().st_size < 1 << 20
    said = refusal(tmp_path / "file.pt")
    assert f"{tmp_path / 'file.pt'}: got no file of torch.save, or a damaged one" in said and "is compressed" in said


def test_an_encrypted_member_is_a_damaged_file(tmp_path: Path):
    torch.save({"x": 1}, tmp_path / "file.pt")
    data = bytearray((tmp_path / "file.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        places = [(info.header_offset + 6) for info in archive.infolist()]
        at = archive.start_dir
    for place in places:
        data[place] |= 1
        data[at + 8] |= 1
        at = data.find(b"PK\x01\x02", at + 1)
    (tmp_path / "file.pt").write_bytes(data)
    assert "a damaged one (RuntimeError: " in refusal(tmp_path / "file.pt")


@pytest.mark.parametrize(
    ("pickled", "error"),
    [
        (b"", "EOFError"),
        (b"\x80\x02", "EOFError"),
        (b"\x8e" + (1 << 60).to_bytes(8, "little") + b".", "MemoryError"),
        (b"\x8d" + (1 << 63).to_bytes(8, "little") + b".", "OverflowError"),
        (b"cbuiltins\nset\n)R}R.", "TypeError"),
    ],
)
def test_a_pickle_that_cannot_be_is_a_damaged_file(tmp_path: Path, pickled: bytes, error: str):
    torch.save({"x": 1}, tmp_path / "file.pt")
    rewritten(tmp_path / "file.pt", lambda name, data: pickled if name.endswith("data.pkl") else data)
    said = refusal(tmp_path / "file.pt")
    assert f"{tmp_path / 'file.pt'}: got a damaged pickle" in said and error in said


def test_random_damage_is_either_harmless_or_an_error_that_names_the_file(tmp_path: Path):
    file, dice = tmp_path / "file.pt", random.Random(0)
    torch.save({"x": torch.arange(9.0), "size": torch.Size([2])}, file)
    good, pickles = file.read_bytes(), {}
    for _ in range(400):
        position = dice.randrange(len(good))
        file.write_bytes(good[:position] + bytes([dice.randrange(256)]) + good[position + 1 :])
        try:
            read_archive(file, {}, "")
        except UserError as error:
            assert str(file) in str(error)
    file.write_bytes(good)
    with zipfile.ZipFile(file) as archive:
        pickles = {name: archive.read(name) for name in archive.namelist()}
    (name,) = [name for name in pickles if name.endswith("data.pkl")]
    for _ in range(400):  # with a checksum that is right again
        raw = bytearray(pickles[name])
        raw[dice.randrange(len(raw))] = dice.randrange(128)
        rewritten(file, lambda member, data, raw=raw: bytes(raw) if member == name else data)
        try:
            read_archive(file, {}, "")
        except UserError as error:
            assert str(file) in str(error)


def test_a_file_that_cannot_be_opened_is_not_called_damaged(tmp_path: Path):
    said = refusal(tmp_path / "nothing.pt")
    assert "nothing.pt: got a file that cannot be read (No such file or directory)" in said and "damaged" not in said


def test_every_changed_byte_of_a_member_is_found_by_its_checksum(tmp_path: Path):
    file = tmp_path / "file.pt"
    torch.save({"x": torch.arange(9.0), "counts": torch.arange(5)}, file)
    with zipfile.ZipFile(file) as archive:
        assert checked_bytes(file, "") == sum(info.file_size for info in archive.infolist())
    good, found = file.read_bytes(), read_archive(file, {}, "")
    for entry in found.values():
        file.write_bytes(good[: entry.offset + 8] + bytes([good[entry.offset + 8] ^ 1]) + good[entry.offset + 9 :])
        with pytest.raises(UserError, match="file.pt: got changed bytes in file/data/"):
            checked_bytes(file, "")


def test_an_archive_without_checksums_is_told_apart(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        archive.writestr("file/data/0", b"")
    assert checked_bytes(tmp_path / "file.pt", "") is None
