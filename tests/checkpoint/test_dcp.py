"""Folders of torch.distributed.checkpoint, read by range whatever their chunks, written for torch to read; others are refused by name."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from framework.checkpoint.dcp import DCPWeights
from framework.checkpoint.folder import step_folder
from framework.checkpoint.open import open_model
from framework.checkpoint.source import check_source
from framework.cli import checkpoint as command
from framework.cli import export
from framework.config.errors import UserError
from tests.checkpoint.saved_models import checkpoint_of, hugging_face, masters_of
from tests.checkpoint.test_deepspeed import described, masters
from tests.models.families import oracle

PLACEMENTS = {
    "rows": (Shard(0), Replicate()),
    "rows and columns": (Shard(0), Shard(1)),
    "columns and rows": (Shard(1), Shard(0)),
    "whole": (Replicate(), Replicate()),
}


def save_sharded(folder: Path, family: str, placements: str, prefix: str) -> None:
    """As a training over 4 ranks saves it, with a state of an optimizer and a step beside the model."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    state = {}
    for name, tensor in masters(family).items():
        of_vector = tuple(Shard(0) if place == Shard(0) else Replicate() for place in PLACEMENTS[placements])
        state[f"{prefix}{name}"] = distribute_tensor(tensor, mesh, PLACEMENTS[placements] if tensor.dim() > 1 else of_vector)
    moments = {f"state.{name}.exp_avg": tensor * 2 for name, tensor in state.items()}
    torch_dcp.save(
        {**state, "optim": moments, "step": 3, "lr": torch.tensor(0.5), "generator": torch.get_rng_state()}, checkpoint_id=folder
    )


@pytest.mark.parametrize("placements", PLACEMENTS)
def test_every_range_of_every_tensor_is_what_torch_has_saved(ranks, tmp_path, placements):
    ranks(4, save_sharded, tmp_path / "dcp", "smollm", placements, "model.", timeout=120)
    weights = DCPWeights(tmp_path / "dcp")
    for name, tensor in masters("smollm").items():
        last = tensor.numel()
        for start, stop in ((0, last), (0, 1), (5, 17), (last // 2 - 2, last // 2 + 3), (last - 3, last), (7, 7)):
            assert torch.equal(weights.read(f"model.{name}", start, stop), tensor.flatten()[start:stop]), (name, start, stop)
    assert weights.read("lr", 0, 1) == 0.5


@pytest.mark.parametrize("prefix", ["", "model.", "state_dict.model._orig_mod.", "module."])
def test_a_training_starts_from_it_whatever_its_names_begin_with(ranks, tmp_path, prefix):
    folder = tmp_path / "dcp"
    ranks(2, save_sharded, folder, "smollm", "rows", prefix)
    assert [problem.path for problem in check_source(str(folder))] == ["model.path", "model.path"]
    described(folder, "smollm")
    assert check_source(str(folder)) == []
    found = ranks(2, masters_of, folder, 3)[0]
    assert all(torch.equal(found[name], tensor) for name, tensor in masters("smollm").items())


@pytest.mark.parametrize("family", ["smollm", "llama2"])  # tied and not
def test_ours_to_dcp_to_ours_is_bitwise_and_torch_reads_it(ranks, tmp_path, family):
    hugging_face(family, tmp_path / "model")
    ranks(2, checkpoint_of, tmp_path / "model", step_folder(tmp_path, 0), 3)
    assert export.main([str(tmp_path), str(tmp_path / "dcp"), "--format", "dcp", "--dtype", "fp32"]) == 0
    back = open_model(str(tmp_path / "dcp"))
    assert back.config == open_model(str(tmp_path)).config
    assert all(torch.equal(back.read(name, 0, tensor.numel()), tensor.flatten()) for name, tensor in masters(family).items())
    state = {name: torch.zeros_like(tensor) for name, tensor in oracle(family).state_dict().items()}
    torch_dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(state[name], tensor) for name, tensor in oracle(family).state_dict().items())
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "one.pt")  # files of one tensor each, so that none waits for another
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == len(state)
    assert torch.load(tmp_path / "one.pt").keys() == state.keys()


def test_the_command_shows_what_it_is_and_where_each_tensor_lies(ranks, tmp_path, capsys):
    folder = tmp_path / "dcp"
    ranks(2, save_sharded, folder, "smollm", "rows", "model.")
    assert command.main(["show", str(folder), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "torch.distributed.checkpoint, " in shown and f"model.path={folder}" in shown and "copy the model's config.json" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("model.model.norm.weight  float32 [48]  ")]
    file, first_byte = line.split("  ")[-1].split()[0].split(":")
    with (folder / file).open("rb") as stream:
        stream.seek(int(first_byte))
        value = torch.frombuffer(bytearray(stream.read(4)), dtype=torch.float32)
    assert value == masters("smollm")["model.norm.weight"][0]
    assert command.main(["verify", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "every element of which can be read" in said and "CRC-32 as it was written over" in said
    assert "NOT checked, having no checksums: .metadata\n" in said
    assert "generator  uint8 [5056]  " in shown  # of no use to a model, and no obstacle


# ---- what goes wrong
@pytest.fixture
def whole(tmp_path: Path) -> Path:
    torch_dcp.save(masters("smollm"), checkpoint_id=tmp_path / "dcp", no_dist=True)
    return described(tmp_path / "dcp", "smollm")


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        model = open_model(str(folder))
        for name, shape in model.names().items():
            model.read(name, 0, shape.numel())
    return str(caught.value)


class Nasty:
    def __reduce__(self):
        return os.mkdir, ("made_by_a_pickle",)


def test_a_function_in_a_pickle_is_refused_by_name_and_never_called(whole, monkeypatch):
    monkeypatch.chdir(whole)
    metadata, data = (whole / ".metadata").read_bytes(), (whole / "__0_0.distcp").read_bytes()
    (whole / ".metadata").write_bytes(pickle.dumps(Nasty()))
    assert f"{os.mkdir.__module__}.mkdir" in refusal(whole)
    (whole / ".metadata").write_bytes(metadata)
    planted = io.BytesIO()
    torch.save(Nasty(), planted)
    first = min(info.length for info in pickle.loads(metadata).storage_data.values() if info.offset == 0)
    (whole / "__0_0.distcp").write_bytes(planted.getvalue()[:first].ljust(first, b"\0") + data[first:])
    refusal(whole)  # as damaged or by name, as the bytes fall
    assert not Path("made_by_a_pickle").exists()


def test_damage_is_named(whole):
    file = whole / "__0_0.distcp"
    data, metadata = file.read_bytes(), (whole / ".metadata").read_bytes()
    file.write_bytes(data[:-10])
    assert f"{file}: got {len(data) - 10:,} bytes" in refusal(whole)
    file.write_bytes(bytes(len(data)))
    assert "no file of torch.save, or a damaged one" in refusal(whole)
    file.unlink()
    assert f"{file}: got nothing" in refusal(whole)
    (whole / ".metadata").write_bytes(metadata[: len(metadata) // 2])
    assert "a damaged pickle, which does not load" in refusal(whole)
    (whole / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    assert "or not that of DCP" in refusal(whole)


@pytest.mark.parametrize(
    ("what", "field", "value"),
    [
        ("storage_data", "offset", "x"),
        ("storage_data", "offset", -7),
        ("storage_data", "length", None),
        ("storage_data", "relative_path", 3),
        ("state_dict_metadata", "size", ("a", "b")),
        ("state_dict_metadata", "size", (1,)),
        ("state_dict_metadata", "size", None),
        ("state_dict_metadata", "chunks", 5),
        ("state_dict_metadata", "properties", None),
    ],
)
def test_a_malformed_description_is_an_error_and_no_traceback(whole, what, field, value):
    metadata = pickle.loads((whole / ".metadata").read_bytes())
    for record in getattr(metadata, what).values():
        object.__setattr__(record, field, value)
    (whole / ".metadata").write_bytes(pickle.dumps(metadata))
    assert str(whole) in refusal(whole)


def test_verify_finds_a_changed_byte(whole, capsys):
    file = whole / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    info = max(pickle.loads((whole / ".metadata").read_bytes()).storage_data.values(), key=lambda info: info.length)
    data[info.offset + info.length // 2] ^= 1
    file.write_bytes(data)
    assert command.main(["verify", str(whole)]) == 2
    assert f"{file}: got changed bytes in " in capsys.readouterr().err


def test_files_outside_the_folder_are_not_opened(whole):
    metadata = pickle.loads((whole / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (whole / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "../secret" in refusal(whole) and "files beside it" in refusal(whole)


def test_two_models_in_one_folder_are_not_guessed_between(tmp_path):
    both = {f"{prefix}{name}": tensor for prefix in ("", "model.") for name, tensor in masters("smollm").items()}
    torch_dcp.save(both, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert "2 tensors that could be model.embed_tokens.weight" in refusal(described(tmp_path / "dcp", "smollm"))
