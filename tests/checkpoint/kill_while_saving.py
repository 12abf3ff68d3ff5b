"""Two ranks that save in the background all the time, killed with SIGKILL at random moments: `python kill_while_saving.py FOLDER KILLS`.
With a third word, a folder, their state lies on the disk there.

Each time either both are killed or one of them, whereupon the other must end by itself. Then the newest checkpoint must be whole to the
last byte, and the next two ranks go on from it. Prints how far they came.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from framework import torch_private
from framework.checkpoint.folder import checkpoints, prune, resolve, step_folder
from framework.checkpoint.load import Checkpoint, load_optimizer
from framework.checkpoint.save import Save, Staging
from framework.zero import OffloadConfig, ZeroConfig, ZeroEngine
from tests.zero import zoo

RANKS, END_SECONDS = 2, 60


def rank_of(folder: Path, rank: int, attempt: int) -> None:
    store = dist.FileStore(str(folder / f"store_{attempt}"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    newest, run = resolve("auto", folder, "run"), folder / "run" / "now"
    checkpoint = None if newest is None else Checkpoint(newest)
    torch.manual_seed(0)
    module = zoo.Plain().float()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    nvme = {"optimizer": "nvme", "params": "nvme", "nvme_path": sys.argv[3]} if len(sys.argv) > 3 else {}
    read = checkpoint.read if checkpoint else None
    engine = ZeroEngine(module, ZeroConfig(stage=3), offload=OffloadConfig(**nvme), optimizer=optimizer, read=read)
    if checkpoint:
        load_optimizer(engine, checkpoint)
    (folder / f"ready_{attempt}_{rank}").touch()
    under_way, staging = None, Staging()
    engine.busy = lambda: under_way is not None and under_way.busy
    while True:
        engine.backward(engine.module(torch.arange(14).view(2, 7) + rank), tokens=12)
        busy = engine.step().busy
        if under_way is not None and busy == 0 and under_way.advance():
            under_way = None
        if under_way is None:
            under_way = Save(engine, step_folder(run, engine.steps_done), run={}, staging=staging, afterwards=lambda: prune(run, keep=2))


def after_a_save(run: Path, saves: int, seconds: float) -> float:
    """Wait until `saves` more have come to their end; how long one takes on this machine today, `seconds` where none was waited for."""
    names, began = set(checkpoints(run)), time.perf_counter()
    for _ in range(saves):
        while set(checkpoints(run)) <= names:
            time.sleep(0.002)
        names |= set(checkpoints(run))
    return time.perf_counter() - began if saves else seconds


def main() -> None:
    folder, moments = Path(sys.argv[1]), random.Random(0)
    run = folder / "run" / "now"
    run.mkdir(parents=True)
    reached, seconds = 0, 0.1
    for attempt in range(int(sys.argv[2])):
        children = []
        for rank in range(RANKS):
            if (child := os.fork()) == 0:
                sys.stderr = open(os.devnull, "w")  # what a rank says of the other one's death
                try:
                    rank_of(folder, rank, attempt)
                finally:
                    os._exit(1)
            children.append(child)
        while not all((folder / f"ready_{attempt}_{rank}").exists() for rank in range(RANKS)):
            assert all(os.waitpid(child, os.WNOHANG) == (0, 0) for child in children), "a rank ended by itself"
            time.sleep(0.002)
        seconds = after_a_save(run, moments.choice((0, 1, 1)), seconds)
        time.sleep(moments.uniform(0, 1.5 * seconds))
        for child in moments.sample(children, moments.choice((1, RANKS))):
            os.kill(child, signal.SIGKILL)
        signal.alarm(END_SECONDS)  # a rank that waits for a dead one for ever ends this process
        for child in children:
            os.waitpid(child, 0)
        signal.alarm(0)
        if newest := resolve("auto", folder, "run"):
            checkpoint = Checkpoint(newest)
            checkpoint.verify()
            assert checkpoint.step >= reached, f"step {checkpoint.step} after step {reached} was saved"
            reached = checkpoint.step
    prune(run, keep=2)
    assert len(list((run / "checkpoints").iterdir())) == 3, "two checkpoints and `latest`"
    print(reached)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch_private.self_test()  # imports what would else be imported after each fork
    main()
