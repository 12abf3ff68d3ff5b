"""Which rank this process is, by the variables of whatever started it, and how many ranks a machine takes. No torch.

    torchrun     RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT
    srun         SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_TASKS_PER_NODE, SLURM_STEP_NODELIST
    mpirun       OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE (Open MPI)

Unusual: a Slurm batch script or interactive shell has most of srun's variables too; only a step of several tasks counts as started by it.
"""

from __future__ import annotations

import os
import re
import subprocess
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from framework.config.errors import Problem, UserError
from framework.config.schema import TrainerConfig

PORT_BASE, PORT_SPAN = 20_000, 12_000  # below what systems hand out by themselves
NVIDIA_SMI_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a launcher has put this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int

    def variables(self) -> dict[str, str]:
        """The place in torchrun's words, which is what ranks read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def launched(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun, srun or mpirun gave this process; None when it is on its own. Raises UserError when it is told half."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _torchrun(environment)
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return _srun(environment)
    if "OMPI_COMM_WORLD_RANK" in environment and int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return _mpirun(environment)
    return None


def _torchrun(environment: Mapping[str, str]) -> Place:
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if world_size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environment:
                raise _half_told(name, "it beside RANK and WORLD_SIZE, as torchrun sets it", f"unset RANK WORLD_SIZE, or export {name}=...")
    local_world_size = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=int(environment.get("LOCAL_RANK", rank % local_world_size)),
        local_world_size=local_world_size,
        node_rank=int(environment.get("GROUP_RANK", environment.get("NODE_RANK", rank // local_world_size))),
        master_addr=environment.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(environment.get("MASTER_PORT", PORT_BASE)),
    )


def _srun(environment: Mapping[str, str]) -> Place:
    node_rank = int(environment["SLURM_NODEID"])
    job = f"{environment.get('SLURM_JOB_ID')}.{environment['SLURM_STEP_ID']}"
    return Place(
        rank=int(environment["SLURM_PROCID"]),
        world_size=int(environment["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(environment["SLURM_LOCALID"]),
        local_world_size=tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[node_rank],
        node_rank=node_rank,
        master_addr=environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
        master_port=int(environment.get("MASTER_PORT") or _port_of(job)),
    )


def _mpirun(environment: Mapping[str, str]) -> Place:
    rank, world_size = int(environment["OMPI_COMM_WORLD_RANK"]), int(environment["OMPI_COMM_WORLD_SIZE"])
    local_world_size = int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
    if local_world_size < world_size and "MASTER_ADDR" not in environment:
        fix = "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..."
        raise _half_told("MASTER_ADDR", "the name of rank 0's machine, when mpirun uses several", fix)
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or "0"
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=int(environment["OMPI_COMM_WORLD_LOCAL_RANK"]),
        local_world_size=local_world_size,
        node_rank=rank // local_world_size,
        master_addr=environment.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(environment.get("MASTER_PORT") or _port_of(job)),
    )


def _half_told(name: str, expected: str, fix: str) -> UserError:
    return UserError(Problem(path="environment", got=f"no {name}", expected=expected, fix=fix))


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `4(x2),3` is [4, 4, 3]."""
    counts: list[int] = []
    for tasks, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(repeats or 1)
    return counts


def first_host(nodelist: str) -> str:
    """The first of Slurm's `node[03-05,9]-ib,login`, which is `node03-ib`."""
    prefix, number, suffix = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodelist).groups()
    return prefix + (number or "") + (suffix or "")


def _port_of(job: str) -> int:
    """The same on every node, and usually another one for another job."""
    return PORT_BASE + zlib.crc32(job.encode()) % PORT_SPAN


def local_ranks(trainer: TrainerConfig) -> int:
    """How many ranks a run has on this machine when no launcher says so."""
    if trainer.devices != "auto":
        return trainer.devices
    return 1 if trainer.accelerator == "cpu" else max(1, visible_gpus())


def visible_gpus() -> int:
    """GPUs that a process started here would see."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([device for device in chosen.split(",") if device.strip() not in ("", "-1")])
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS)
        return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    except (OSError, subprocess.TimeoutExpired):
        return len([device for device in Path("/dev").glob("nvidia*") if device.name.removeprefix("nvidia").isdigit()])
