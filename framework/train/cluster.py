"""Lightning's questions about ranks, answered by `framework/ranks.py`: by the variables of our supervisor, torchrun, srun or mpirun.

Lightning's own detection is not used: it takes a bare `SLURM_NTASKS` of an interactive shell for a job, installs signal handlers under
Slurm, and counts ranks by `Trainer(devices=...)`, where under a launcher the launcher's count holds. A process group that exists already
has the last word. Without any of these the process is alone, or rank 0 of the `Trainer(devices=N)` that Lightning starts itself.
"""

from __future__ import annotations

import os
import socket

import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment

from framework.ranks import Place, launched


class RankEnvironment(ClusterEnvironment):
    """What Lightning asks about ranks, answered from the environment each time it asks."""

    def __init__(self) -> None:
        super().__init__()
        self._rank, self._world_size = 0, 1  # as the strategy sets them where Lightning starts the processes
        self._free_port: int | None = None

    @staticmethod
    def detect() -> bool:
        return launched(os.environ) is not None

    @property
    def creates_processes_externally(self) -> bool:
        return dist.is_initialized() or self.detect() or "LOCAL_RANK" in os.environ

    @property
    def main_address(self) -> str:
        place = self._place()
        return place.master_addr if place else os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        if place := self._place():
            return place.master_port
        if "MASTER_PORT" in os.environ:
            return int(os.environ["MASTER_PORT"])
        if self._free_port is None:
            with socket.socket() as listener:
                listener.bind(("", 0))
                self._free_port = listener.getsockname()[1]
        return self._free_port

    def global_rank(self) -> int:
        if dist.is_initialized():
            return dist.get_rank()
        place = self._place()
        return place.rank if place else self._rank

    def world_size(self) -> int:
        if dist.is_initialized():
            return dist.get_world_size()
        place = self._place()
        return place.world_size if place else self._world_size

    def local_rank(self) -> int:
        place = self._place()
        return place.local_rank if place else int(os.environ.get("LOCAL_RANK", 0))

    def node_rank(self) -> int:
        place = self._place()
        return place.node_rank if place else int(os.environ.get("NODE_RANK", 0))

    @staticmethod
    def _place() -> Place | None:
        """What a launcher says; with a process group there need not be all of it."""
        return None if dist.is_initialized() else launched(os.environ)

    def set_global_rank(self, rank: int) -> None:
        self._rank = rank

    def set_world_size(self, size: int) -> None:
        self._world_size = size
