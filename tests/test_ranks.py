"""Which rank this process is, from the variables of torchrun, srun and mpirun."""

from __future__ import annotations

import pytest

from framework.config.errors import UserError
from framework.config.schema import TrainerConfig
from framework.ranks import first_host, launched, local_ranks, tasks_per_node, visible_gpus

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "head",
}


def test_nothing_set_is_no_launcher():
    assert launched({}) is None


def test_torchrun():
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    place = launched(environment | {"MASTER_ADDR": "head", "MASTER_PORT": "29500"})
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size, place.node_rank) == (3, 4, 1, 2, 1)
    assert (place.master_addr, place.master_port) == ("head", 29500)


def test_variables_set_by_hand_are_completed_for_one_machine():
    place = launched({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    assert (place.local_rank, place.local_world_size, place.node_rank) == (1, 2, 0)


def test_half_of_the_variables_is_a_mistake_that_is_named():
    with pytest.raises(UserError, match="no MASTER_PORT"):
        launched({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})


def test_srun():
    place = launched(SRUN)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size, place.node_rank) == (5, 7, 1, 3, 1)
    assert place.master_addr == "gpu07"
    assert place.variables()["MASTER_PORT"] == launched(SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}).variables()["MASTER_PORT"]
    assert place.master_port != launched(SRUN | {"SLURM_STEP_ID": "1"}).master_port


@pytest.mark.parametrize("shell", [{"SLURM_STEP_ID": None, "SLURM_STEP_NUM_TASKS": None}, {"SLURM_STEP_NUM_TASKS": "1"}])
def test_a_batch_script_or_a_shell_on_a_node_was_not_started_as_one_of_several(shell):
    environment = {name: value for name, value in (SRUN | shell | {"SLURM_NTASKS": "7"}).items() if value is not None}
    assert launched(environment) is None


def test_mpirun():
    place = launched(MPIRUN)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size, place.node_rank) == (3, 4, 1, 2, 1)
    assert place.master_addr == "head"


def test_mpirun_over_machines_needs_to_be_told_where_rank_0_is():
    with pytest.raises(UserError, match="mpirun -x MASTER_ADDR=HOST"):
        launched({name: value for name, value in MPIRUN.items() if name != "MASTER_ADDR"})


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,2(x3)", [1, 2, 2, 2])])
def test_tasks_per_node(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("n1", "n1"), ("n[03-05,9]-ib,login", "n03-ib"), ("a,b[1-2]", "a"), ("c[2,4]", "c2"), ("rack-1-n[001-100]", "rack-1-n001")],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,1,3", 3), ("GPU-ab,GPU-cd", 2)])
def test_visible_gpus_are_those_that_the_user_left(monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == count
    assert local_ranks(TrainerConfig()) == max(1, count)
    assert local_ranks(TrainerConfig(accelerator="cpu")) == 1
    assert local_ranks(TrainerConfig(devices=3)) == 3
