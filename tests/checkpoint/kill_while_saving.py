"""Two ranks that save after every step, killed with SIGKILL at random moments: `python kill_while_saving.py FOLDER`.

Each time the newest checkpoint must be whole to the last byte, and the next two ranks go on from it. Prints how far they came each time.
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
from framework.checkpoint.folder import prune, resolve, step_folder
from framework.checkpoint.load import Checkpoint, load_optimizer
from framework.checkpoint.save import save
from framework.zero import ZeroConfig, ZeroEngine
from tests.zero import zoo

KILLS, RANKS = 30, 2


def rank_of(folder: Path, rank: int, attempt: int) -> None:
    store = dist.FileStore(str(folder / f"store_{attempt}"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    newest = resolve("auto", folder, "run")
    checkpoint = None if newest is None else Checkpoint(newest)
    torch.manual_seed(0)
    module = zoo.Plain()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    engine = ZeroEngine(module, ZeroConfig(stage=3), optimizer=optimizer, read=checkpoint.read if checkpoint else None)
    if checkpoint:
        load_optimizer(engine, checkpoint)
    (folder / f"ready_{attempt}_{rank}").touch()
    while True:
        engine.backward(engine.module(torch.arange(14).view(2, 7) + rank), tokens=12)
        engine.step()
        save(engine, step_folder(folder / "run" / "now", engine.steps_done), run={})
        if rank == 0:
            prune(folder / "run" / "now", keep=2)


def main() -> None:
    folder, moments = Path(sys.argv[1]), random.Random(0)
    (folder / "run" / "now").mkdir(parents=True)
    reached = 0
    for attempt in range(KILLS):
        children = []
        for rank in range(RANKS):
            if (child := os.fork()) == 0:
                try:
                    rank_of(folder, rank, attempt)
                finally:
                    os._exit(1)
            children.append(child)
        while not all((folder / f"ready_{attempt}_{rank}").exists() for rank in range(RANKS)):
            assert all(os.waitpid(child, os.WNOHANG) == (0, 0) for child in children), "a rank ended by itself"
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.5))
        for child in moments.sample(children, RANKS):
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        if newest := resolve("auto", folder, "run"):
            checkpoint = Checkpoint(newest)
            checkpoint.verify()
            assert checkpoint.step >= reached, f"step {checkpoint.step} after step {reached} was saved"
            reached = checkpoint.step
    prune(folder / "run" / "now", keep=2)
    assert len(list((folder / "run" / "now" / "checkpoints").iterdir())) == 3, "two checkpoints and `latest`"
    print(reached)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch_private.self_test()  # imports what would else be imported after each fork
    main()
