"""The command `train` with tiny ranks instead of a training: `python tiny_train.py BEHAVIOUR ARGUMENTS...` (see tiny_rank.py).

Under torchrun each process is a rank, and what it does instead of training is one all-reduce.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

from framework.cli import train
from framework.config.compose import Composed, hydra_main
from framework.ranks import launched

BEHAVIOUR = sys.argv.pop(1)


def start(job: Composed) -> int:
    place = launched(os.environ)
    if place is None:
        return train.supervise(job, [sys.executable, str(Path(__file__).with_name("tiny_rank.py")), BEHAVIOUR])
    sys.modules["framework.cli.fit"] = SimpleNamespace(run=one_all_reduce)
    return train.work(job, place)


def one_all_reduce(recipe, run_dir: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()} of run {run_dir} with seed {recipe.seed}", flush=True)
    total = torch.ones(())
    dist.all_reduce(total)
    if BEHAVIOUR == f"raise on {dist.get_rank()}":
        raise ValueError("boom")
    dist.barrier()
    (run_dir / f"sum_{dist.get_rank()}").write_text(str(total.item()))


if __name__ == "__main__":
    sys.exit(hydra_main(start))
