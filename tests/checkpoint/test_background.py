"""A save while training goes on: the bytes are those of its step, and what goes wrong is the same error on every rank."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from framework.checkpoint import save as saving
from framework.checkpoint.folder import checkpoints, step_folder, unsealed
from framework.checkpoint.load import Checkpoint
from framework.checkpoint.save import Save, SaveError, Staging, save
from framework.config.errors import UserError
from framework.config.schema import CheckpointConfig
from framework.train.callbacks.checkpoint import SaveCheckpoints
from framework.zero import ZeroConfig, ZeroEngine
from tests.checkpoint.test_save_load import make, train

original = saving._write_rank


def end(under_way: Save) -> Save:
    while not under_way.advance():
        pass
    return under_way


def slowly(gate: threading.Event):
    """A writer that waits until `gate` is open: training is then some steps ahead."""

    def write(*args):
        gate.wait(30)
        return original(*args)

    return write


def save_while_training(folder: Path, model: str, stage: int, optimizer: str):
    """In the background with a writer that begins two steps later, beside saves that training waits for; twice, to use staging again."""
    engine, staging = make(model, stage, optimizer), Staging()
    train(engine, 0, 1)
    memory, busy = [], []
    for step in (1, 3):
        save(engine, step_folder(folder / "waiting", step), run={})
        gate = threading.Event()
        saving._write_rank = slowly(gate)
        try:
            under_way = Save(engine, step_folder(folder / "background", step), run={}, staging=staging)
            engine.busy = lambda: under_way.busy  # noqa: B023
            for ahead in (0, 1):
                engine.backward(engine.module(torch.arange(14).view(2, 7) + dist.get_rank() + ahead), tokens=12)
                busy.append(float(engine.step().busy))
        finally:
            gate.set()
            saving._write_rank = original
        end(under_way)
        memory.append((staging._memory.data_ptr(), staging.nbytes))
    assert memory[0] == memory[1] and memory[0][1] <= under_way.nbytes, "one copy, made once"
    return busy


@pytest.mark.parametrize(
    ("model", "stage", "optimizer"),
    [("plain", 0, "adamw"), ("plain", 1, "adamw"), ("tied", 2, "adamw"), ("plain", 3, "adamw"), ("frozen", 3, "sgd")],
)
def test_the_bytes_are_those_of_the_step_at_which_the_save_began(ranks, tmp_path, model, stage, optimizer):
    busy = ranks(2, save_while_training, tmp_path, model, stage, optimizer)
    assert busy == [[2.0] * 4] * 2, "every rank knows how many still write"
    for step in (1, 3):
        waiting, background = (step_folder(tmp_path / name, step) for name in ("waiting", "background"))
        assert sorted(path.name for path in background.iterdir()) == sorted(path.name for path in waiting.iterdir())
        Checkpoint(background).verify()
        for rank in range(2):
            assert (background / f"rank_{rank}.safetensors").read_bytes() == (waiting / f"rank_{rank}.safetensors").read_bytes()
            one, other = (json.loads((folder / f"rank_{rank}.json").read_text()) for folder in (waiting, background))
            assert {**one, "save": 0, "sha256": 0} == {**other, "save": 0, "sha256": 0}
        assert Checkpoint(background).step == step


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_next_update_waits_for_the_copy(tmp_path):
    """A large state: without the wait, the update would be done long before the copy."""
    module = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(4)))
    engine = ZeroEngine(module, ZeroConfig(stage=3), optimizer=torch.optim.AdamW(module.parameters(), fused=True), device="cuda")
    staging, ids = Staging(), torch.ones(1, 4096, device="cuda")
    for step in (1, 3, 5):
        engine.backward(engine.module(ids).square().sum(), tokens=1)
        engine.step()
        save(engine, step_folder(tmp_path / "waiting", step), run={})
        under_way = Save(engine, step_folder(tmp_path / "background", step), run={}, staging=staging)
        engine.backward(engine.module(ids).square().sum(), tokens=1)
        engine.step()
        end(under_way)
        one, other = (step_folder(tmp_path / name, step) for name in ("waiting", "background"))
        assert staging._pinned and (one / "rank_0.safetensors").read_bytes() == (other / "rank_0.safetensors").read_bytes()


def without_room(folder: Path) -> str:
    saves = SaveCheckpoints(folder, CheckpointConfig(), dict, copy_bytes=10**18)
    with pytest.raises(UserError) as caught:
        saves.on_train_start(SimpleNamespace(strategy=SimpleNamespace(engine=make("plain", 2))), None)
    return str(caught.value)


def test_a_copy_that_does_not_fit_into_memory_is_refused_before_the_first_step(ranks, tmp_path):
    for message in ranks(2, without_room, tmp_path):
        assert "checkpoint.asynchronous: got true, which takes" in message and "checkpoint.asynchronous=false" in message


def fail_in_the_thread(folder: Path, bad: int, where: str):
    engine, staging = make("plain", 2), Staging()
    train(engine, 0, 1)

    def full(*_: object):
        raise OSError(28, "No space left on device")

    before = saving.__dict__[where]
    if dist.get_rank() == bad:
        saving.__dict__[where] = full
    try:
        under_way = Save(engine, step_folder(folder, 1), run={}, staging=staging)
        losses = train(engine, 1, 3)
        with pytest.raises(SaveError) as caught:
            end(under_way)
    finally:
        saving.__dict__[where] = before
    end(Save(engine, step_folder(folder, 3), run={}, staging=staging))
    return str(caught.value), len(losses)


@pytest.mark.parametrize(("rank", "where"), [(0, "_write_rank"), (1, "_write_rank"), (1, "_write_json"), (0, "finish"), (1, "contents_of")])
def test_a_failure_in_the_background_is_the_same_error_on_every_rank(ranks, tmp_path, rank, where):
    results = ranks(2, fail_in_the_thread, tmp_path, rank, where)
    assert results == [(f"rank {rank}: [Errno 28] No space left on device", 2)] * 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_3"]


def end_without_the_others(folder: Path, dead: int | None):
    """Each rank for itself, as after an exception: rank `dead` never writes."""
    engine = make("plain", 2)
    train(engine, 0, 1)
    gate = threading.Event()
    if dist.get_rank() == dead:
        saving._write_rank = slowly(gate)
    under_way = Save(engine, step_folder(folder, 1), run={}, staging=Staging())
    began = time.perf_counter()
    if dist.get_rank() != dead:
        under_way.give_up(0.3 if dead is not None else 20)
    seconds = time.perf_counter() - began
    dist.barrier()
    gate.set()
    saving._write_rank = original
    return seconds


@pytest.mark.parametrize("dead", [None, 1])
def test_after_an_exception_what_all_ranks_have_written_gets_its_name_without_a_message(ranks, tmp_path, dead):
    seconds = ranks(2, end_without_the_others, tmp_path, dead)
    assert [path.name for path in checkpoints(tmp_path)] == (["step_1"] if dead is None else [])
    assert max(seconds) < 15, "nobody waits for a rank that is gone"


def test_a_folder_may_get_its_name_while_a_rank_is_still_writing_its_last_words(tmp_path, monkeypatch):
    """Rank 0 names it when it sees the description of the last rank: at the earliest when that has its name in the folder."""
    folder, named, replace = tmp_path / ".step_1.partial", tmp_path / "step_1", os.replace
    folder.mkdir()

    def and_named(source, target):
        replace(source, target)
        folder.rename(named)

    monkeypatch.setattr(os, "replace", and_named)
    saving._write_json(folder / "rank_1.json", {"save": "x"})
    assert unsealed((named / "rank_1.json").read_text())["save"] == "x"
