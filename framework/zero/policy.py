"""Where model state lives, as one table. Nothing else in the engine asks for the stage.

Each column says at which placement a kind of model state lives. Stages, hybrid sharding and secondary shards are rows over one mechanism
(ZeRO: Rajbhandari et al. 2019, arXiv:1910.02054; HSDP and MiCS, arXiv:2205.00119; hpZ: ZeRO++, arXiv:2306.10209):

    optimizer       master weights and optimizer state
    params_at_rest  parameters between uses
    params_kept     parameters between their forward and their backward
    grads           gradients between the micro-batches of a step

A buffer has one row, an engine may have several: `zero.modules` and `zero.keep_gathered_bytes` give some parameters another one. Where
there is one group of all ranks, `GROUP` and `WORLD` are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from framework.config.check_zero import zero_problems
from framework.config.names import is_meant
from framework.config.schema import OffloadConfig, PrecisionConfig, ZeroConfig


class Placement(Enum):
    WORLD = "sharded over all ranks"
    GROUP = "sharded over the ranks of a shard group, the same in every group"
    FULL = "whole on every rank"


WORLD, GROUP, FULL = Placement


class Policy(NamedTuple):
    optimizer: Placement
    params_at_rest: Placement
    params_kept: Placement
    grads: Placement

    def kept(self) -> Policy:
        """The same with parameters that are never released."""
        return self._replace(params_at_rest=FULL, params_kept=FULL)


_ROWS = {
    # stage 0 shards nothing
    ("group", 0): Policy(optimizer=FULL, params_at_rest=FULL, params_kept=FULL, grads=FULL),
    ("group", 1): Policy(optimizer=GROUP, params_at_rest=FULL, params_kept=FULL, grads=FULL),
    ("group", 2): Policy(optimizer=GROUP, params_at_rest=FULL, params_kept=FULL, grads=GROUP),
    ("group", 3): Policy(optimizer=GROUP, params_at_rest=GROUP, params_kept=GROUP, grads=GROUP),
    # shard_optimizer: world
    ("world", 0): Policy(optimizer=FULL, params_at_rest=FULL, params_kept=FULL, grads=FULL),
    ("world", 1): Policy(optimizer=WORLD, params_at_rest=FULL, params_kept=FULL, grads=FULL),
    ("world", 2): Policy(optimizer=WORLD, params_at_rest=FULL, params_kept=FULL, grads=GROUP),
    ("world", 3): Policy(optimizer=WORLD, params_at_rest=GROUP, params_kept=GROUP, grads=GROUP),
    # secondary_shard_size
    ("secondary", 0): Policy(optimizer=FULL, params_at_rest=FULL, params_kept=FULL, grads=FULL),
    ("secondary", 1): Policy(optimizer=WORLD, params_at_rest=FULL, params_kept=FULL, grads=FULL),
    ("secondary", 2): Policy(optimizer=WORLD, params_at_rest=FULL, params_kept=FULL, grads=WORLD),
    ("secondary", 3): Policy(optimizer=WORLD, params_at_rest=WORLD, params_kept=GROUP, grads=WORLD),
}


def policy_of(zero: ZeroConfig, stage: int | None = None, reshard_after_forward: bool | None = None) -> Policy:
    """The row of the table that `zero` asks for, or would with another stage or resharding. Raises ValueError for an unknown one."""
    stage = zero.stage if stage is None else stage
    reshard = zero.reshard_after_forward if reshard_after_forward is None else reshard_after_forward
    spread = "secondary" if zero.secondary_shard_size else zero.shard_optimizer if zero.shard_size else "group"
    if (spread, stage) not in _ROWS:
        raise ValueError(f"ZeroConfig.stage: got {stage!r}, expected one of {sorted({row for _, row in _ROWS})}")
    policy = _ROWS[spread, stage]
    return policy if reshard else policy._replace(params_kept=FULL)


def policy_of_parameter(zero: ZeroConfig, names: Iterable[str]) -> Policy | None:
    """What the first of `zero.modules` that means a parameter says of it, None where none does. `names`: all that a tied one has."""
    names = list(names)
    for rule in zero.modules:
        if any(is_meant(rule.pattern, name) for name in names):
            return policy_of(zero, rule.stage, rule.reshard_after_forward)
    return None


def group_size(zero: ZeroConfig, world_size: int) -> int:
    """Ranks of a shard group. Raises ValueError for what of `zero` means nothing on so many ranks."""
    if problems := zero_problems(zero, world_size):
        raise ValueError("\n".join(map(str, problems)))
    return zero.secondary_shard_size or zero.shard_size or world_size


def workers(config: OffloadConfig) -> int:
    """Threads that update what is offloaded, and so the number of buffers in staging at a time: one is copied or read while the kernel
    works on another; one that came from a disk is written back meanwhile."""
    return 3 if config.optimizer == "nvme" else 2


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


def check_settings(precision: PrecisionConfig, offload: OffloadConfig, grad_clip: float | None) -> None:
    """Raises ValueError for settings that mean nothing, alone or together."""
    if grad_clip is not None and not grad_clip > 0:
        raise ValueError(f"grad_clip={grad_clip!r}: it is the largest norm of the gradients, above 0, or None for no clipping")
    if not 0 <= offload.fraction <= 1:
        raise ValueError(f"OffloadConfig(fraction={offload.fraction!r}): it is a share, from 0 to 1")
    if precision.autocast != "none" and precision.compute_dtype != "float32":
        raise ValueError(f"autocast={precision.autocast!r} is for parameters in float32, got compute_dtype={precision.compute_dtype!r}")
    if precision.fp32_modules and precision.compute_dtype not in ("bfloat16", "float16"):
        raise ValueError(f"fp32_modules={precision.fp32_modules} are for bfloat16 and float16, got {precision.compute_dtype}")
    if precision.master_weights == "full":
        return
    if precision.compute_dtype != "bfloat16":
        raise ValueError(f"master_weights={precision.master_weights!r} is for bfloat16, got compute_dtype={precision.compute_dtype!r}")
    if "nvme" in (offload.optimizer, offload.params):
        raise ValueError(f"master_weights={precision.master_weights!r} is for state in memory: with nvme use 'full'")
    if offload.params != "none" and (offload.optimizer == "none" or offload.fraction < 1):
        raise ValueError(
            f"master_weights={precision.master_weights!r} with parameters in host memory needs all optimizer state there, too: "
            f"OffloadConfig(optimizer='cpu'), got optimizer={offload.optimizer!r}, fraction={offload.fraction:g}"
        )
