"""Checkpoints of an engine whose state lies on a disk: no copy in memory, the bytes of their step, whole whatever happens to the run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from framework.checkpoint import save as saving
from framework.checkpoint.folder import step_folder
from framework.checkpoint.load import Checkpoint, load_optimizer
from framework.checkpoint.save import Save, Staging, save
from framework.config.schema import OffloadConfig
from framework.zero import ZeroConfig, ZeroEngine
from tests.checkpoint.test_save_load import make, train
from tests.zero import zoo

ROOT = Path(__file__).parents[2]
KILLS = 6
original = saving._write_rank


def on_disk(folder: Path, stage: int, params: str, read=None) -> ZeroEngine:
    torch.manual_seed(0)
    module, offload = zoo.Plain().float(), OffloadConfig(optimizer="nvme", params=params, nvme_path=str(folder))
    return ZeroEngine(
        module, ZeroConfig(stage=stage), offload=offload, optimizer=torch.optim.AdamW(module.parameters(), lr=0.01), read=read
    )


def save_while_training(folder: Path) -> list[int]:
    """A save whose writer begins when the step after it has handed over its updates, beside one that training waits for."""
    engine, staging, stepped = on_disk(folder, 3, "nvme"), Staging(), threading.Event()
    train(engine, 0, 1)
    save(engine, step_folder(folder / "waiting", 1), run={})

    def write(*args):
        assert stepped.wait(30)
        return original(*args)

    saving._write_rank = write
    try:
        under_way = Save(engine, step_folder(folder / "background", 1), run={}, staging=staging)
        engine.backward(engine.module(torch.arange(14).view(2, 7) + dist.get_rank()), tokens=12)
        engine.step()
        time.sleep(0.3)  # much longer than the updates of these buffers take
        waited = [buffer.updating is not None and not buffer.updating.done() for buffer in engine.trained]
        stepped.set()
        while not under_way.advance():
            pass
    finally:
        saving._write_rank = original
    engine.flush()
    save(engine, step_folder(folder / "after", 2), run={})
    assert staging.nbytes == 0, "nothing is copied in memory"
    return waited


def test_a_save_in_the_background_reads_the_disk_and_updates_wait_for_it(ranks, tmp_path) -> None:
    for waited in ranks(2, save_while_training, tmp_path):
        assert all(waited), "nothing may be written before it is saved"
    for rank in (0, 1):
        file = f"step_1/rank_{rank}.safetensors"
        one, other = ((tmp_path / kind / "checkpoints" / file).read_bytes() for kind in ("waiting", "background"))
        assert one == other
    before, after = (Checkpoint(step_folder(tmp_path / kind, step)) for kind, step in (("background", 1), ("after", 2)))
    assert before.verify() and after.verify()
    assert not any(torch.equal(before.whole(name), after.whole(name)) for name in before.places), "the step was made all the same"


def go_on(source: Path, folder: Path, stage: int, params: str) -> tuple[list[float], dict]:
    checkpoint = Checkpoint(source)
    engine = make("plain", stage, read=checkpoint.read) if params == "memory" else on_disk(folder, stage, params, checkpoint.read)
    load_optimizer(engine, checkpoint)
    losses = train(engine, 1, 3)
    return losses, engine.state_dict()


def test_p17_a_checkpoint_goes_on_from_disk_and_memory_alike_under_any_stage_and_number_of_ranks(ranks, tmp_path) -> None:
    ranks(2, save_while_training, tmp_path)
    source = step_folder(tmp_path / "background", 1)
    losses, state = ranks(2, go_on, source, tmp_path, 3, "memory")[0]
    for stage, params in ((0, "none"), (3, "nvme")):
        again, same_state = ranks(2, go_on, source, tmp_path, stage, params)[0]
        assert again == losses
        assert all(torch.equal(tensor, state["model"][name]) for name, tensor in same_state["model"].items())
    alone, _ = ranks(1, go_on, source, tmp_path, 1, "none")[0]
    torch.testing.assert_close(torch.tensor(alone), torch.tensor(losses), rtol=1e-6, atol=0)


def test_p16_kills_while_the_disk_is_written_leave_the_newest_checkpoint_whole_and_no_file(tmp_path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("kill_while_saving.py")), str(tmp_path), str(KILLS), str(scratch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= KILLS / 3, "saves were finished between"
    assert list(scratch.iterdir()) == []
