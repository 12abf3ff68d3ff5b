"""Checkpoints of the engine: written under one stage and number of ranks, read under any other to the bit; every damage is named."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from framework.checkpoint import save as saving
from framework.checkpoint.folder import (
    checkpoints,
    digest_of,
    finish,
    partial_folder,
    prune,
    read_index,
    resolve,
    sealed,
    step_folder,
    what_is_missing,
)
from framework.checkpoint.load import Checkpoint, load_optimizer, restore_random_state
from framework.checkpoint.save import SaveError, save
from framework.config.errors import UserError
from framework.models.safetensors_io import read_header
from framework.zero import ZeroConfig, ZeroEngine
from tests.zero import zoo

MODELS = {"plain": zoo.Plain, "tied": zoo.Tied, "frozen": zoo.Frozen}


def make(model: str, stage: int, optimizer: str = "adamw", read=None) -> ZeroEngine:
    torch.manual_seed(0)
    module = MODELS[model]()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    made = torch.optim.AdamW(trained, lr=0.01) if optimizer == "adamw" else torch.optim.SGD(trained, lr=0.01, momentum=0.9)
    return ZeroEngine(module, ZeroConfig(stage=stage), optimizer=made, read=read)


def train(engine: ZeroEngine, first: int, last: int) -> list[float]:
    """Steps `first` to `last` of the same 12 sentences each, over whatever ranks there are."""
    losses = []
    for step in range(first, last):
        ids = torch.randint(0, zoo.VOCABULARY, (12, 7), generator=torch.Generator().manual_seed(step))
        engine.backward(engine.module(ids[engine.world.rank :: engine.world.size]), tokens=12 * 6 // engine.world.size)
        losses.append(float(engine.step().loss))
    return losses


def from_module(model: str):
    torch.manual_seed(0)
    whole = dict(MODELS[model]().named_parameters())
    return lambda name, start, stop: whole[name].detach().flatten()[start:stop]


def resumed(folder: Path, model: str, stage: int, optimizer: str = "adamw") -> ZeroEngine:
    checkpoint = Checkpoint(folder)
    engine = make(model, stage, optimizer, read=checkpoint.reader(from_module(model)))
    load_optimizer(engine, checkpoint)
    restore_random_state(checkpoint, engine)
    return engine


def save_and_go_on(folder: Path, model: str, stage: int, optimizer: str):
    engine = make(model, stage, optimizer)
    train(engine, 0, 3)
    save(engine, folder, run={"note": "x"})
    state = engine.state_dict()
    return state, train(engine, 3, 6), engine.state_dict()


def load_and_go_on(folder: Path, model: str, stage: int, optimizer: str):
    engine = resumed(folder, model, stage, optimizer)
    state = engine.state_dict()
    return state, train(engine, 3, 6), engine.state_dict()


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize(
    ("model", "optimizer", "stage", "world"),
    [
        *(("plain", "adamw", stage, world) for stage, world in ((0, 1), (0, 2), (1, 4), (2, 2), (3, 3))),
        ("tied", "adamw", 3, 2),
        ("frozen", "adamw", 2, 3),
        ("plain", "sgd", 3, 2),
    ],
)
def test_p16_p17_what_was_saved_is_read_under_every_stage_and_number_of_ranks(ranks, tmp_path, model, optimizer, stage, world):
    folder = step_folder(tmp_path, 3)
    saved, losses, after = ranks(world, save_and_go_on, folder, model, stage, optimizer)[0]
    assert [path.name for path in checkpoints(tmp_path)] == ["step_3"] and (tmp_path / "checkpoints" / "latest").read_text() == "step_3\n"
    for other_stage, other_world in ((stage, world), (0, 2), (3, 1), (2, 3), (3, 4)):
        loaded, went_on, then = ranks(other_world, load_and_go_on, folder, model, other_stage, optimizer)[0]
        assert same(loaded, saved), (other_stage, other_world)
        if (other_stage, other_world) == (stage, world):
            assert went_on == losses and same(then, after)
        assert went_on == pytest.approx(losses, rel=1e-5)


def test_every_element_is_written_once_and_the_index_says_where(ranks, tmp_path):
    for stage, world in ((0, 3), (2, 3), (3, 2)):
        folder = step_folder(tmp_path / f"{stage}", 3)
        state, _, _ = ranks(world, save_and_go_on, folder, "plain", stage, "adamw")[0]
        checkpoint = Checkpoint(folder)
        assert (checkpoint.step, checkpoint.world_size, checkpoint.run) == (3, world, {"note": "x"})
        elements = sum(buffer["total"] for buffer in checkpoint.index["buffers"])
        written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert 3 * 4 * elements <= written < 3 * 4 * elements + world * 4096, "master and two moments, nothing twice"
        assert checkpoint.verify() == 3 * 4 * elements
        for name, tensor in state["model"].items():
            assert torch.equal(checkpoint.read(name, 0, tensor.numel()), tensor.flatten())
            assert torch.equal(checkpoint.read(name, 1, 5, "exp_avg"), state["optimizer"][name]["exp_avg"].flatten()[1:5])


def draw_and_save(folder: Path):
    engine = make("plain", 2)
    torch.manual_seed(7 + dist.get_rank())
    train(engine, 0, 1)
    torch.rand(3)
    save(engine, folder, run={})
    return torch.rand(4)


def draw_again(folder: Path):
    resumed(folder, "plain", 2)
    return torch.rand(4)


def test_generators_go_on_where_they_were(ranks, tmp_path):
    folder = step_folder(tmp_path, 1)
    drawn = ranks(2, draw_and_save, folder)
    assert same(ranks(2, draw_again, folder), drawn) and not torch.equal(drawn[0], drawn[1])


def resume_with_other_options(folder: Path):
    checkpoint = Checkpoint(folder)
    module = zoo.Plain()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5, weight_decay=0.25, betas=(0.5, 0.75))
    engine = ZeroEngine(module, ZeroConfig(stage=2), optimizer=optimizer, read=checkpoint.read)
    load_optimizer(engine, checkpoint)
    (group,) = engine.optimizer.param_groups
    return group["lr"], group["weight_decay"], group["betas"], engine.steps_done


def test_options_of_the_optimizer_are_those_that_it_was_made_with(ranks, tmp_path):
    folder = step_folder(tmp_path, 3)
    ranks(2, save_and_go_on, folder, "plain", 2, "adamw")
    assert ranks(2, resume_with_other_options, folder) == [(0.5, 0.25, (0.5, 0.75), 3)] * 2


# ---- what goes wrong
@pytest.fixture
def whole(ranks, tmp_path) -> Path:
    folder = step_folder(tmp_path, 3)
    ranks(2, save_and_go_on, folder, "plain", 3, "adamw")
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        Checkpoint(folder).verify()
    return str(caught.value)


@pytest.mark.parametrize("name", ["index.json", "rank_0.json", "rank_1.json", "rank_0.safetensors", "rank_1.safetensors"])
def test_a_missing_file_is_named(whole, name):
    (whole / name).unlink()
    assert name in refusal(whole)
    assert name in what_is_missing(whole)


@pytest.mark.parametrize("name", ["index.json", "rank_1.json"])
def test_a_broken_description_is_named(whole, name):
    (whole / name).write_text((whole / name).read_text()[:40])
    assert "whole checkpoint" in refusal(whole) or "index of a checkpoint" in refusal(whole)


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_a_cut_off_file_is_named(whole, cut):
    file = whole / "rank_1.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - cut)
    assert "rank_1.safetensors of" in refusal(whole)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.999])
def test_a_flipped_bit_is_found_and_only_what_it_touches_is_lost(whole, share):
    file = whole / "rank_0.safetensors"
    data = bytearray(file.read_bytes())
    data[round(share * len(data)) - 1] ^= 4
    file.write_bytes(data)
    assert "rank_0.safetensors: got changed bytes between" in refusal(whole)


@pytest.mark.parametrize("header_has_a_checksum", [True, False], ids=["", "as_saved_before"])
def test_a_flipped_bit_of_a_header_is_an_error_that_names_the_file(whole, header_has_a_checksum):
    file = whole / "rank_1.safetensors"
    if not header_has_a_checksum:
        described = [json.loads((whole / f"rank_{rank}.json").read_text()) for rank in range(2)]
        texts = [sealed({key: value for key, value in rank.items() if key not in ("header_sha256", "sha256")}) for rank in described]
        for rank, text in enumerate(texts):
            (whole / f"rank_{rank}.json").write_text(text)
        index = read_index(whole)
        del index["sha256"]
        (whole / "index.json").write_text(sealed(index | {"ranks": [digest_of(text) for text in texts]}))
    good = Checkpoint(whole)
    values = {name: good.whole(name) for name in good.places}
    data = file.read_bytes()
    for position in range(0, 8 + int.from_bytes(data[:8], "little"), 5):
        with file.open("r+b") as stream:
            stream.seek(position)
            stream.write(bytes([data[position] ^ 1 << position % 7]))
        try:
            found = Checkpoint(whole)
            read = {name: found.whole(name) for name in found.places}
        except UserError as error:
            assert str(file) in str(error)
        else:  # the bit was in the padding or in a word that says nothing
            assert not header_has_a_checksum and all(torch.equal(read[name], values[name]) for name in values)
        with file.open("r+b") as stream:
            stream.seek(position)
            stream.write(data[position : position + 1])
    assert Checkpoint(whole).verify() > 0


def test_parts_of_two_saves_are_not_mixed(ranks, whole, tmp_path):
    other = step_folder(tmp_path / "other", 3)
    ranks(2, save_and_go_on, other, "plain", 3, "adamw")
    for name in ("rank_1.json", "rank_1.safetensors"):
        shutil.copy(other / name, whole / name)
    assert "rank_1.json of another save" in refusal(whole)


@pytest.mark.parametrize("name", ["index.json", "rank_1.json"])
def test_any_changed_bit_of_a_description_is_found(whole, name):
    file = whole / name
    good = file.read_bytes()
    for position in range(0, len(good), 41):
        file.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        assert what_is_missing(whole) is not None, good[position - 20 : position + 20]
    file.write_bytes(good)
    assert what_is_missing(whole) is None


def test_descriptions_of_another_save_with_sound_checksums_are_refused(ranks, whole, tmp_path):
    index = read_index(whole)
    index["ranks"] = index["ranks"][::-1]
    del index["sha256"]
    (whole / "index.json").write_text(sealed(index))
    assert "rank_0.json changed since it was written" in refusal(whole)


def test_version_1_of_the_format_is_still_read(whole):
    """It had crc32 for the tensors and no checksums of the descriptions."""
    before = Checkpoint(whole)
    expected = {name: before.read(name, 0, torch.Size(place.shape).numel()) for name, place in before.places.items()}
    for rank in range(2):
        file = whole / f"rank_{rank}.json"
        described = json.loads(file.read_text())
        del described["sha256"]
        data = (whole / f"rank_{rank}.safetensors").read_bytes()
        for name, entry in read_header(whole / f"rank_{rank}.safetensors").items():
            tensor = described["tensors"][name]
            raw = data[entry.offset : entry.offset + 4 * (tensor["stop"] - tensor["start"])]
            tensor["crc32"] = [zlib.crc32(raw[start : start + saving.CHUNK_BYTES]) for start in range(0, len(raw), saving.CHUNK_BYTES)]
            del tensor["xxh3"]
        file.write_text(json.dumps(described))
    index = {key: value for key, value in json.loads((whole / "index.json").read_text()).items() if key not in ("ranks", "sha256")}
    (whole / "index.json").write_text(json.dumps(index | {"version": 1}))
    old = Checkpoint(whole)
    assert old.verify() > 0
    assert all(torch.equal(old.read(name, 0, tensor.numel()), tensor) for name, tensor in expected.items())


def test_another_format_or_model_is_refused(ranks, whole):
    index = json.loads((whole / "index.json").read_text())
    (whole / "index.json").write_text(json.dumps(index | {"version": 99}))
    assert "version 99" in refusal(whole)
    (whole / "index.json").write_text(json.dumps(index))
    (message,) = ranks(1, resume_another, whole)
    assert "no blocks.0.down.bias" in message or "expected" in message


def resume_another(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        resumed(folder, "frozen", 0)
    return str(caught.value)


def fail_on_one_rank(folder: Path, bad: int, where: str):
    engine = make("plain", 2)
    train(engine, 0, 1)
    save(engine, step_folder(folder, 1), run={})

    def full(*_: object, **__: object):
        raise OSError(28, "No space left on device")

    if dist.get_rank() == bad:
        original, saving.__dict__[where] = saving.__dict__[where], full
    try:
        with pytest.raises(SaveError) as caught:
            save(engine, step_folder(folder, 2), run={})
    finally:
        if dist.get_rank() == bad:
            saving.__dict__[where] = original
    train(engine, 1, 2)
    save(engine, step_folder(folder, 2), run={})
    return str(caught.value)


@pytest.mark.parametrize(("rank", "where"), [(0, "begin"), (0, "_write_rank"), (1, "_write_rank"), (0, "finish"), (1, "_write_json")])
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_training_can_go_on(ranks, tmp_path, rank, where):
    messages = ranks(2, fail_on_one_rank, tmp_path, rank, where)
    assert messages == [f"rank {rank}: [Errno 28] No space left on device"] * 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_1", "step_2"]
    assert [Checkpoint(folder).step for folder in checkpoints(tmp_path)] == [1, 2]


# ---- folders
def with_loss(folder: Path, source: Path, loss: float | None) -> None:
    shutil.copytree(source, folder)
    index = read_index(folder) | {"run": {"validation_loss": loss}}
    del index["sha256"]
    (folder / "index.json").write_text(sealed(index))


def test_the_newest_the_best_and_every_nth_stay(whole, tmp_path):
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, None), (50, 2.0), (60, 9.0)):
        with_loss(step_folder(tmp_path / "run", step), whole, loss)
    best = tmp_path / "run" / "checkpoints" / "best"
    assert prune(tmp_path / "run", keep=9) == [] and not best.exists()
    assert [path.name for path in prune(tmp_path / "run", keep=1, keep_every_n_steps=40, keep_best=2)] == ["step_10", "step_30"]
    assert best.read_text() == "step_20\n", "of equal ones the newer stays"
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step_20", "step_40", "step_50", "step_60"]
    assert resolve(str(best), tmp_path, "x").name == "step_20"
    with_loss(step_folder(tmp_path / "run", 70), whole, 0.5)
    prune(tmp_path / "run", keep=1, keep_best=1)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step_70"] and best.read_text() == "step_70\n"


def test_only_whole_checkpoints_count_when_old_ones_go(whole, tmp_path):
    for step in (1, 2, 4, 10):
        shutil.copytree(whole, step_folder(tmp_path, step))
    (step_folder(tmp_path, 10) / "rank_0.safetensors").unlink()
    partial_folder(step_folder(tmp_path, 11)).mkdir()
    (tmp_path / "checkpoints" / ".latest.partial").write_text("step_4\n")  # killed before it got its name
    assert [path.name for path in prune(tmp_path, keep=2)] == ["step_1", "step_2"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_10", "step_3", "step_4"]
    assert [path.name for path in prune(tmp_path, keep=0)] == ["step_3"], "the last one stays"
    assert resolve(str(tmp_path), tmp_path, "x").name == "step_4"


def test_what_resume_means(whole, tmp_path):
    assert resolve("none", tmp_path, "x") is None
    assert resolve(str(whole), tmp_path, "x") == whole == resolve(str(tmp_path), tmp_path, "x")
    assert resolve("auto", tmp_path.parent, tmp_path.name) is None, "runs are one level deeper"
    run = tmp_path / "runs" / "x" / "now"
    shutil.copytree(tmp_path / "checkpoints", run / "checkpoints")
    assert resolve("auto", tmp_path / "runs", "x") == run / "checkpoints" / "step_3"
    assert resolve("auto", tmp_path / "runs", "y") is None
    (tmp_path / "runs" / "x" / "now later, without a checkpoint").mkdir()
    assert resolve("auto", tmp_path / "runs", "x") == run / "checkpoints" / "step_3"
    done = tmp_path / "runs" / "x" / "now later, resumed"
    done.mkdir()
    (done / "summary.json").write_text('{"ended": "stopped"}')
    assert resolve("auto", tmp_path / "runs", "x") == run / "checkpoints" / "step_3"
    (done / "summary.json").write_text('{"ended": "done"}')
    assert resolve("auto", tmp_path / "runs", "x") is None, "it went on from there and came to its end"
    (whole / "rank_1.json").unlink()
    with pytest.raises(UserError, match=r"no whole checkpoint \(step_3: no rank_1.json\)"):
        resolve(str(tmp_path), tmp_path, "x")
    with pytest.raises(UserError, match="holds no checkpoint"):
        resolve(str(tmp_path / "nowhere"), tmp_path, "x")


def test_an_index_of_a_million_brackets_is_a_broken_description(tmp_path):
    folder = step_folder(tmp_path, 5)
    folder.mkdir(parents=True)
    (folder / "index.json").write_text("[" * 1_000_000)
    with pytest.raises(UserError, match=r"index.json: got RecursionError"):
        read_index(folder)
    assert "RecursionError" in what_is_missing(folder)


def test_a_whole_checkpoint_of_a_step_that_is_saved_again_keeps_its_name(whole):
    """No moment at which a crash leaves the step without a name."""
    before = {file.name: file.stat().st_ino for file in whole.iterdir()}
    shutil.copytree(whole, partial_folder(whole))
    (whole.parent / "latest").unlink()
    finish(whole)
    assert {file.name: file.stat().st_ino for file in whole.iterdir()} == before
    assert sorted(path.name for path in whole.parent.iterdir()) == ["latest", "step_3"]
    shutil.copytree(whole, partial_folder(whole))
    (whole / "rank_1.json").unlink()
    finish(whole)
    assert what_is_missing(whole) is None, "one that is damaged is replaced"


def test_a_checkpoint_has_its_name_only_when_all_is_there(tmp_path):
    folder = step_folder(tmp_path, 5)
    partial_folder(folder).mkdir(parents=True)
    (partial_folder(folder) / "index.json").write_text("{}")
    assert checkpoints(tmp_path) == []
    finish(folder)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_5"]
    partial_folder(folder).mkdir()
    (partial_folder(folder) / "index.json").write_text('"again"')
    finish(folder)
    assert (folder / "index.json").read_text() == '"again"'
    assert sorted(path.name for path in folder.parent.iterdir()) == ["latest", "step_5"]


def test_a_folder_that_cannot_get_its_name_leaves_the_earlier_one(tmp_path, monkeypatch):
    folder, rename = step_folder(tmp_path, 5), Path.rename
    folder.mkdir(parents=True)
    (folder / "index.json").write_text("{}")
    partial_folder(folder).mkdir()

    def fails(path, target):
        if path == partial_folder(folder):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="Input/output error"):
        finish(folder)
    assert (folder / "index.json").read_text() == "{}"
