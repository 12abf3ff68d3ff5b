"""Writes what DeepSpeed 0.19 writes for ZeRO 1, 2 and 3, so that reading it is tested where DeepSpeed is not installed.

Names, keys, order and padding are those of its files; `test_deepspeed.py` compares both where DeepSpeed is there. Classes of DeepSpeed are
pickled under their names from a module that exists only while the files are written.
"""

from __future__ import annotations

import enum
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

TAG = "global_step2"
ALIGN_PER_RANK = 2
"""Stages 1 and 2 pad a group's vector to a multiple of 2 x ranks."""


def write_deepspeed(
    folder: Path,
    groups: list[dict[str, Tensor]],
    *,
    stage: int,
    world_size: int,
    frozen: dict[str, Tensor] | None = None,
    shared: dict[str, str] | None = None,
    half: torch.dtype = torch.bfloat16,
) -> Path:
    """FOLDER/latest and FOLDER/global_step2 with the masters `groups`; `frozen` parameters in `half`."""
    frozen = {name: tensor.to(half) for name, tensor in (frozen or {}).items()}
    (folder / TAG).mkdir(parents=True)
    (folder / "latest").write_text(TAG)

    def module_part(tensor: Tensor) -> Tensor:
        return torch.empty(0, dtype=half) if stage == 3 else tensor.to(half)

    vectors = _stage_3(groups, world_size) if stage == 3 else _stages_1_and_2(groups, world_size)
    with deepspeed_classes() as (stage_enum, loss_scaler):
        for rank in range(world_size):
            fragments = {name: _share(tensor, rank, world_size) if stage == 3 else tensor for name, tensor in frozen.items()}
            model = {
                "module": OrderedDict(
                    (name, torch.empty(0, dtype=half) if stage == 3 else tensor.to(half))
                    for group in groups
                    for name, tensor in group.items()
                ),
                "param_shapes": [OrderedDict((name, tensor.shape) for name, tensor in group.items()) for group in groups],
                "frozen_param_shapes": OrderedDict((name, tensor.shape) for name, tensor in frozen.items()),
                "frozen_param_fragments": OrderedDict(fragments),
                "shared_params": shared or {},
                "global_steps": 2,
                "dp_world_size": world_size,
                "mp_world_size": 1,
                "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
                "ds_version": "0.19.8",
            }
            if stage == 3 or rank == 0:
                prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
                torch.save(model, folder / TAG / f"{prefix}mp_rank_00_model_states.pt")
            state = {"loss_scaler": loss_scaler(), "zero_stage": stage_enum(stage)}
            if stage == 3:
                state |= {"partition_count": world_size, "fp32_flat_groups": vectors[rank]}
            else:
                state |= {
                    "partition_count": [world_size] * len(groups),
                    "single_partition_of_fp32_groups": vectors[rank],
                    "param_alignment_paddings": [[0] * len(group) for group in groups],
                }
            file = folder / TAG / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, file)
    return folder


def _stages_1_and_2(groups: list[dict[str, Tensor]], world_size: int) -> list[list[Tensor]]:
    """[rank][group]: one part of the group's vector for each rank."""
    vectors = [torch.cat([tensor.flatten() for tensor in group.values()]) for group in groups]
    align = ALIGN_PER_RANK * world_size
    padded = [torch.nn.functional.pad(vector, (0, -len(vector) % align)) for vector in vectors]
    return [[vector.chunk(world_size)[rank].clone() for vector in padded] for rank in range(world_size)]


def _stage_3(groups: list[dict[str, Tensor]], world_size: int) -> list[list[Tensor]]:
    """[rank][sub-group]: a share of each parameter; the second sub-group begins inside a parameter."""
    ranks = []
    for rank in range(world_size):
        vector = torch.cat([_share(tensor, rank, world_size) for group in groups for tensor in group.values()])
        ranks.append([vector[:101].clone(), vector[101:].clone()])
    return ranks


def _share(tensor: Tensor, rank: int, world_size: int) -> Tensor:
    share = -(-tensor.numel() // world_size)
    return torch.nn.functional.pad(tensor.flatten(), (0, share * world_size - tensor.numel()))[rank * share : (rank + 1) * share].clone()


@contextmanager
def deepspeed_classes() -> Iterator[tuple[type, type]]:
    """ZeroStageEnum and LossScaler, which pickle as those of DeepSpeed do."""
    config, scaler = types.ModuleType("deepspeed.runtime.zero.config"), types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
    config.ZeroStageEnum = enum.IntEnum("ZeroStageEnum", {"optimizer_states": 1, "gradients": 2, "weights": 3}, module=config.__name__)
    scaler.LossScaler = type("LossScaler", (), {"__module__": scaler.__name__, "__init__": lambda self: setattr(self, "cur_scale", 1.0)})
    parents = ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", "deepspeed.runtime.fp16")
    made = {name: types.ModuleType(name) for name in parents} | {module.__name__: module for module in (config, scaler)}
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield config.ZeroStageEnum, scaler.LossScaler
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
