"""Which rank a process is, under each launcher."""

from __future__ import annotations

import os

import hydra
import pytest
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer

from framework.config.errors import UserError
from framework.train.cluster import RankEnvironment
from framework.train.strategy import ZeroStrategy

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_JOB_ID": "1234",
}


@pytest.fixture
def environment(monkeypatch):
    """Sets environment variables, with none of a launcher's left."""
    for name in [name for name in os.environ if name in LAUNCHER_VARIABLES or name.startswith(("SLURM_", "OMPI_"))]:
        monkeypatch.delenv(name)

    def put(**variables: str) -> RankEnvironment:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return RankEnvironment()

    return put


def test_torchruns_variables_are_followed_whatever_devices_says(environment):
    ranks = environment(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", MASTER_ADDR="10.0.0.1", MASTER_PORT="2000")
    ranks.set_global_rank(0), ranks.set_world_size(1)  # as Trainer(devices=1) would
    assert ranks.creates_processes_externally
    assert (ranks.global_rank(), ranks.world_size(), ranks.local_rank()) == (3, 4, 1)
    assert (ranks.main_address, ranks.main_port) == ("10.0.0.1", 2000)


def test_under_slurm_all_tasks_agree_where_to_meet(environment):
    ranks = environment(**SRUN, SLURM_STEP_ID="0", SLURM_STEP_NODELIST="gpu[03-04,09]")
    assert (ranks.main_address, ranks.main_port) == ("gpu03", environment(**SRUN, SLURM_STEP_ID="0").main_port)
    assert 20_000 <= ranks.main_port < 32_000


def test_without_a_launcher_a_process_is_alone(environment):
    ranks = environment()
    assert not ranks.creates_processes_externally
    assert (ranks.global_rank(), ranks.world_size()) == (0, 1)


def test_several_devices_inside_hydra_need_a_launcher(environment, tmp_path):
    """Lightning would start the whole Hydra application once more for each rank."""
    environment()
    (tmp_path / "config.yaml").write_text("{}")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        HydraConfig.instance().set_config(hydra.compose("config", return_hydra_config=True))
        try:
            with pytest.raises(UserError, match="torchrun --nproc-per-node 2"):
                Trainer(accelerator="cpu", devices=2, strategy=ZeroStrategy(3), logger=False)
        finally:
            HydraConfig.instance().cfg = None


def test_a_strategy_is_made_without_touching_the_environment(environment):
    environment()
    before = dict(os.environ)
    ZeroStrategy(3)
    assert dict(os.environ) == before
