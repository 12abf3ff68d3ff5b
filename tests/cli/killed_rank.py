"""One rank of a run; rank 0 is killed with SIGKILL in its third micro-batch of four: `python killed_rank.py STEP CONFIG RUN_DIR`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from framework.cli.fit import run
from framework.train.module import CausalLMModule
from framework.train.run_dir import read_config
from framework.worker import working

original = CausalLMModule.loss_sum


def loss_sum(module: CausalLMModule, micro: dict) -> object:
    module.micro_batches = getattr(module, "micro_batches", 0) + module.training
    if os.environ["RANK"] == "0" and module.micro_batches == 4 * (int(sys.argv[1]) - 1) + 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(module, micro)


if __name__ == "__main__":
    CausalLMModule.loss_sum = loss_sum
    with working(Path(sys.argv[3])):
        run(read_config(Path(sys.argv[2])), Path(sys.argv[3]))
