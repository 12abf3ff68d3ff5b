"""What a ZeRO stage means, as one table. Nothing else in the engine asks for the stage.

Each column says at which placement a kind of model state lives: `SHARDED` over the ranks or `FULL` on each. Stages are rows over
one mechanism (ZeRO: Rajbhandari et al. 2019, arXiv:1910.02054):

    optimizer       master weights and optimizer state
    params_at_rest  parameters between uses
    params_kept     parameters between their forward and their backward
    grads           gradients between the micro-batches of a step
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from framework.config.schema import OffloadConfig, PrecisionConfig, ZeroConfig


class Placement(Enum):
    SHARDED = "sharded"
    FULL = "full"


SHARDED, FULL = Placement.SHARDED, Placement.FULL


class Policy(NamedTuple):
    optimizer: Placement
    params_at_rest: Placement
    params_kept: Placement
    grads: Placement


_STAGES = {
    0: Policy(optimizer=FULL, params_at_rest=FULL, params_kept=FULL, grads=FULL),
    1: Policy(optimizer=SHARDED, params_at_rest=FULL, params_kept=FULL, grads=FULL),
    2: Policy(optimizer=SHARDED, params_at_rest=FULL, params_kept=FULL, grads=SHARDED),
    3: Policy(optimizer=SHARDED, params_at_rest=SHARDED, params_kept=SHARDED, grads=SHARDED),
}


def policy_of(zero: ZeroConfig) -> Policy:
    """The row of the table that `zero` asks for. Raises ValueError for an unknown stage."""
    if zero.stage not in _STAGES:
        raise ValueError(f"ZeroConfig.stage: got {zero.stage!r}, expected one of {list(_STAGES)}")
    policy = _STAGES[zero.stage]
    return policy if zero.reshard_after_forward else policy._replace(params_kept=FULL)


WORKERS = 2
"""Threads that update what is offloaded, and so the number of buffers in staging at a time."""


def offloaded(config: OffloadConfig, trained_numels: Sequence[int]) -> list[bool]:
    """Of the trained buffers, with so many elements and in the order of forward: whose masters and optimizer state lie in host memory.

    `config.fraction` of the elements, to whole buffers; the last ones, whose updates have longest to hide behind the next forward.
    """
    if config.optimizer == "none":
        return [False] * len(trained_numels)
    room = config.fraction * sum(trained_numels)
    chosen = []
    for numel in reversed(trained_numels):
        fits = room > 0 and numel <= room + numel / 2  # to the nearest whole buffer
        room -= numel if fits else 0
        chosen.append(fits)
    return chosen[::-1]


def check_precision(precision: PrecisionConfig, offload: OffloadConfig) -> None:
    """Raises ValueError for settings that mean nothing together."""
    if precision.autocast != "none" and precision.compute_dtype != "float32":
        raise ValueError(f"autocast={precision.autocast!r} is for parameters in float32, got compute_dtype={precision.compute_dtype!r}")
    if precision.fp32_modules and precision.compute_dtype not in ("bfloat16", "float16"):
        raise ValueError(f"fp32_modules={precision.fp32_modules} are for bfloat16 and float16, got {precision.compute_dtype}")
    if precision.master_weights == "full":
        return
    if precision.compute_dtype != "bfloat16":
        raise ValueError(f"master_weights={precision.master_weights!r} is for bfloat16, got compute_dtype={precision.compute_dtype!r}")
    if offload.params != "none" and (offload.optimizer == "none" or offload.fraction < 1):
        raise ValueError(
            f"master_weights={precision.master_weights!r} with parameters in host memory needs all optimizer state there, too: "
            f"OffloadConfig(optimizer='cpu'), got optimizer={offload.optimizer!r}, fraction={offload.fraction:g}"
        )
