"""What a recipe asks of the machine: how many ranks it will have, and whether their GPUs and a disk for offloading are there. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from framework.config.errors import Problem
from framework.config.schema import OffloadConfig, TrainerConfig
from framework.ranks import launched, local_ranks, visible_gpus

LEAST_CPU_RANKS, CPU_RANKS_PER_CORE = 16, 4
"""Ranks that any machine may be asked for, to try things; more (`trainer.devices=500`) would only bring it down."""


def world_size(trainer: TrainerConfig) -> int:
    """Ranks of the whole run: what torchrun, Slurm or MPI has started, else those that `trainer.devices` asks for."""
    place = launched(os.environ)
    return local_ranks(trainer) if place is None else place.world_size


def check_hardware(trainer: TrainerConfig) -> list[Problem]:
    """What the recipe asks for and the machine does not have."""
    gpus = 0 if trainer.accelerator == "cpu" else visible_gpus()
    if trainer.accelerator == "cuda" and gpus == 0:
        hidden = f" (CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']})" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        got = f"cuda, but no GPU is visible{hidden}"
        return [Problem(path="trainer.accelerator", got=got, expected="cpu or auto on this machine", fix="trainer.accelerator=auto")]
    if gpus and launched(os.environ) is None and local_ranks(trainer) > gpus:
        expected = f"at most one rank per visible GPU, {gpus}"
        fix = f"trainer.devices={gpus}  (or trainer.accelerator=cpu)"
        return [Problem(path="trainer.devices", got=str(trainer.devices), expected=expected, fix=fix)]
    cores = os.cpu_count() or 1
    most = max(LEAST_CPU_RANKS, CPU_RANKS_PER_CORE * cores)
    if not gpus and launched(os.environ) is None and local_ranks(trainer) > most:
        expected = f"at most {most} ranks on the {cores} CPU cores of this machine"
        return [Problem(path="trainer.devices", got=str(trainer.devices), expected=expected, fix=f"trainer.devices={cores}")]
    return []


def check_disk(offload: OffloadConfig) -> list[Problem]:
    """A folder for offloading that is not there is not made: behind a mistyped mount point lies the system's own disk."""
    if "nvme" not in (offload.optimizer, offload.params) or not (offload.nvme_path or "").strip():
        return []
    folder = Path(offload.nvme_path).expanduser()
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return []
    got = f"{offload.nvme_path}, which " + ("cannot be written to" if folder.is_dir() else "is no folder of this machine")
    expected = "a folder on a local disk that can be written to"
    return [Problem(path="offload.nvme_path", got=got, expected=expected, fix="offload.nvme_path=/mnt/nvme")]
