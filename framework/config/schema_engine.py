"""The groups of a recipe that the engine takes: where model state lies, and in which data types. `schema.py` has all others, and these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ZeroModuleConfig:
    """One of `zero.modules`."""

    pattern: str = ""
    """Last words of names of modules or parameters (`embed_tokens`, `layers.0`, `lora_A`), or a regular expression for whole names."""
    stage: Literal[0, 1, 2, 3] | None = None
    """None: `zero.stage`."""
    reshard_after_forward: bool | None = None
    """None: `zero.reshard_after_forward`."""


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Group `zero`: how model state is sharded over data-parallel ranks."""

    stage: Literal[0, 1, 2, 3] = 0
    """0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters."""
    shard_size: int | None = None
    """Ranks of a shard group, consecutive ones, usually those of a machine: model state is sharded inside a group and the same in each
    (HSDP, MiCS), so that gathering parameters stays inside. Divides the number of ranks. None: all ranks are one group."""
    shard_optimizer: Literal["group", "world"] = "group"
    """shard_size: master weights and optimizer state are sharded over the ranks of a group, or over all ranks; parameters and gradients
    over a group in either case. world: less memory, and a gather between groups once a step."""
    secondary_shard_size: int | None = None
    """Stage 3 over all ranks, but after its forward a block is kept in shards over groups of so many consecutive ranks, from which
    its backward gathers it (hpZ of ZeRO++, DeepSpeed's `zero_hpz_partition_size`). Takes the place of `shard_size`."""
    reshard_after_forward: bool = True
    """Stage 3: free a block's gathered parameters between its forward and its backward (False: more memory, one gather less)."""
    prefetch_bytes: int = 33554432
    """Stage 3: blocks gathered ahead may take so many bytes per rank, and one block always may; 0 turns prefetching off."""
    keep_gathered_bytes: int = 0
    """Stage 3: as many units (a block; the rest of the model) as fit into so many bytes per rank stay gathered all the time."""
    modules: list[ZeroModuleConfig] = field(default_factory=list)
    """Parameters with a policy of their own: {pattern, stage, reshard_after_forward}. The first pattern that means a parameter holds."""
    gather_compression: Literal["none", "int8"] = "none"
    """Stage 3: how parameters are sent. int8: in blocks of 64 values with a scale each, and so are those that forward and backward compute
    with; master weights stay exact. (Stages 1 and 2 gather once a step, too seldom to be worth coarser parameters.)"""
    reduce_compression: Literal["none", "bf16", "int8"] = "none"
    """Stages 1 to 3: how gradients are sent; they are added in fp32 in any case. bf16: half the bytes. int8: in blocks of 64 values with
    a scale each, a little over a fourth."""
    error_feedback: bool = False
    """reduce_compression int8: what rounding leaves over of a gradient is added to the next one. 4 bytes per trained parameter on every
    rank. Not saved: every checkpoint, and a step that is skipped, starts it from zero."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Group `offload`: model state that lies in host memory or on a local disk instead of the device's memory."""

    optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Master weights and optimizer state. cpu: in host memory, where the CPU updates them, while the device begins with the next step.
    nvme: on the disk of `nvme_path`, from where a few blocks at a time come to be updated in the same way (adamw, lion and sgd)."""
    params: Literal["none", "cpu", "nvme"] = "none"
    """Stage 3, each rank's shard of the parameters. cpu, nvme: in host memory or on the disk, from where gathering a block fetches it."""
    fraction: float = 1.0
    """optimizer: share of the trained parameters, to whole blocks, the last ones of the model; the others' stay on the device."""
    nvme_path: str | None = None
    """nvme: a folder on a fast local disk of each machine, with room for what the plan says of all ranks there. The room is taken when a
    run starts, in files without names, which are gone when it ends, however it does; checkpoints lie elsewhere."""


MasterWeights = Literal["full", "remainder", "none"]


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Group `precision`: data types of computation. Gradients are accumulated and optimizer state is kept in fp32 (fp64 for float64)."""

    compute_dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Data type of parameters in forward and backward. float16 scales the loss."""
    master_weights: MasterWeights = "full"
    """What the optimizer updates. full: fp32 (fp64 for float64). bfloat16 with adamw, lion or sgd also: remainder, the same fp32 numbers as
    the bf16 parameter and the 16 bits that it lacks, which trains the same bits with 2 bytes per parameter less; none, the bf16 parameter
    alone: 2 bytes less again, but an update below 1/256 of a parameter may be rounded away. Checkpoints hold fp32 in every case."""
    fp32_modules: list[str] = field(default_factory=list)
    """bfloat16, float16: modules that compute in fp32 nevertheless, with parameters in fp32: last words of their names (`norm`, `lm_head`)
    or regular expressions for whole names. What goes in is cast to fp32, what comes out to the data type that went in; the head's logits
    stay fp32. A tied head is the embedding under a second name, and both are fp32 then."""
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    """float32: run forward under `torch.autocast`, for models that were written for it: parameters stay fp32, and torch computes matrix
    products in this data type and sums, norms and losses in fp32. float16 scales the loss. (bfloat16 as `compute_dtype` takes half the
    memory for parameters, and sends half the bytes.)"""
    loss_scale: float | Literal["dynamic"] = "dynamic"
    """float16: factor on the loss, which is the sum over a micro-batch's trained tokens. dynamic: a step whose gradients overflow is
    skipped on all ranks and halves it; `loss_scale_window` good steps in a row double it. A number: fixed; an overflow ends the run."""
    initial_loss_scale: float = 64.0
    """dynamic: in the first step. (64 on the sum over 1,024 tokens is 65,536 on their mean.)"""
    loss_scale_window: int = 1000
    """dynamic: good steps in a row before it doubles."""
    loss_scale_hysteresis: int = 1
    """dynamic: overflows before it halves; they are forgotten when it changes."""
    min_loss_scale: float = 2**-14
    """dynamic: an overflow at this scale ends the run."""

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are computed in float16."""
        return "float16" in (self.compute_dtype, self.autocast)

    @property
    def computes_in(self) -> str:
        """In words."""
        return self.compute_dtype if self.autocast == "none" else f"{self.compute_dtype} under autocast to {self.autocast}"
