"""The contestants: one small Llama in the hands of our engine, DDP, FSDP2 and DeepSpeed, behind one method, `step`.

All do the same training step: forward, mean loss over the tokens of all ranks, backward, clipping of the global gradient norm, fused
AdamW. Weights, batches and options are equal, so losses must be, too.

Unusual: stage 3 contestants may gather one block ahead and DeepSpeed's buckets are as large as DDP's (25 MB), not the library's
default of 2 GB. With the defaults, buffers would dwarf a model of this size and the numbers would say nothing about a larger one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from framework.config.schema import LlamaConfig, OffloadConfig, PrecisionConfig, ZeroConfig
from framework.models.llama import Llama
from framework.zero import ZeroEngine

MODELS = {
    "small": LlamaConfig(vocab_size=8192, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8),
    "tiny": LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4),
    "narrow": LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=48, num_attention_heads=2),
}
"""`narrow` computes next to nothing in many blocks: what is left of a step is what engines do for each."""
REFERENCE = "alone"
"""Plain torch on each rank, without any exchange: what a step costs with no engine at all."""
GRAD_CLIP = 1.0
BUCKET_BYTES = 25 * 2**20  # DDP's default


@dataclass(frozen=True)
class Task:
    """What every contestant trains."""

    size: str
    precision: str
    micro_batch: int
    tokens_per_sample: int
    batches: int = 4
    """Different batches per rank, used in turn, so that the loss falls and a wrong update shows."""

    @property
    def tokens(self) -> int:
        """Per rank and step."""
        return self.micro_batch * self.tokens_per_sample

    def model(self) -> Llama:
        torch.manual_seed(0)
        return Llama(MODELS[self.size])

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(input_ids, labels), each int64 [micro_batch, tokens_per_sample], of this rank."""
        seed = torch.Generator().manual_seed(1000 * dist.get_rank() + step % self.batches)
        ids = torch.randint(MODELS[self.size].vocab_size, (self.micro_batch, self.tokens_per_sample + 1), generator=seed)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Contestant:
    """A model with a way to train it. `step` gives the mean loss over this rank's tokens."""

    engine: ZeroEngine | None = None
    """Ours only: it has meters of its own."""
    offload: OffloadConfig | None = None
    """Ours only."""
    holder: object = None
    """What has the state that a checkpoint saves: ours, torch's (model, optimizer), or DeepSpeed's engine."""

    def __init__(self, forward: Callable[[Tensor, Tensor], Tensor], backward: Callable[[Tensor], None], update: Callable[[], None]) -> None:
        self._forward, self._backward, self._update = forward, backward, update

    def step(self, input_ids: Tensor, labels: Tensor) -> float:
        loss = self._forward(input_ids, labels)
        self._backward(loss)
        self._update()
        return float(loss.detach())


def deepspeed_is_installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def load_everything(name: str, task: Task) -> None:
    """Have in memory what stays there once it was used, and belongs to no model: modules and kernels with their caches."""
    if name.startswith("deepspeed"):
        import deepspeed  # noqa: F401
    build(REFERENCE, task).step(*task.batch(0))


def build(name: str, task: Task) -> Contestant:
    """The contestant of this name: `alone`, `ddp`, `fsdp2-keep`, `fsdp2-reshard`, `ours-STAGE` or `deepspeed-STAGE`. With `-offload` at its
    end, masters and optimizer state lie in host memory; with `-offload-all` parameters, too (FSDP2 has this one only)."""
    kind, _, variant = name.partition("-")
    variant, offloads, rest = variant.partition("-offload")
    offload = "all" if rest else "optimizer" if offloads else "none"
    return {"alone": _alone, "ours": _ours, "ddp": _ddp, "fsdp2": _fsdp2, "deepspeed": _deepspeed}[kind](task, variant, offload)


def _ours(task: Task, stage: str, offload: str) -> Contestant:
    model = task.model()
    zero = ZeroConfig(stage=int(stage), prefetch_bytes=_block_numel(model) * _dtype(task).itemsize)
    host = OffloadConfig(optimizer="none" if offload == "none" else "cpu", params="cpu" if offload == "all" else "none")
    precision = PrecisionConfig(compute_dtype=task.precision)
    engine = ZeroEngine(model, zero, precision, host, optimizer=_adamw(model), grad_clip=GRAD_CLIP)
    contestant = Contestant(
        lambda input_ids, labels: engine.module(input_ids, labels, trained_tokens=task.tokens) / task.tokens,
        lambda loss: engine.backward(loss * task.tokens, task.tokens),
        engine.step,
    )
    contestant.engine = contestant.holder = engine
    contestant.offload = host
    return contestant


def _alone(task: Task, *_: str) -> Contestant:
    model = task.model()
    return _torch_contestant(task, model, model)


def _ddp(task: Task, *_: str) -> Contestant:
    model = task.model()
    return _torch_contestant(task, model, DistributedDataParallel(model, gradient_as_bucket_view=True))


def _fsdp2(task: Task, variant: str, offload: str) -> Contestant:
    model = task.model()
    options = {"reshard_after_forward": variant == "reshard"}
    if offload == "all":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if task.precision != "float32":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=_dtype(task), reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _torch_contestant(task, model, model, casts=True)


def _torch_contestant(task: Task, model: nn.Module, entry: nn.Module, *, casts: bool = False) -> Contestant:
    """The usual loop of a plain torch script. `casts`: `entry` takes care of the compute dtype; the others run under autocast."""
    optimizer = _adamw(model)
    autocast = torch.autocast("cpu", _dtype(task), enabled=task.precision != "float32" and not casts)

    def forward(input_ids: Tensor, labels: Tensor) -> Tensor:
        with autocast:
            return entry(input_ids, labels, trained_tokens=task.tokens) / task.tokens

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad()

    contestant = Contestant(forward, torch.Tensor.backward, update)
    contestant.holder = (model, optimizer)
    return contestant


def _deepspeed(task: Task, stage: str, offload: str) -> Contestant:
    import deepspeed  # seconds to import, and not always there

    model = task.model()
    block_numel = _block_numel(model)
    bucket_numel = BUCKET_BYTES // 4
    host = {"device": "cpu", "pin_memory": False}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=_adamw(model),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": task.micro_batch,
            "gradient_clipping": GRAD_CLIP,
            "bf16": {"enabled": task.precision == "bfloat16"},
            "zero_force_ds_cpu_optimizer": False,  # everybody has torch's AdamW
            "zero_optimization": {
                "stage": int(stage),
                "reduce_bucket_size": bucket_numel,
                "allgather_bucket_size": bucket_numel,
                "stage3_prefetch_bucket_size": block_numel,
                "stage3_max_live_parameters": 2 * block_numel,
                "stage3_max_reuse_distance": 0,  # release after forward whatever comes next
                **({} if offload == "none" else {"offload_optimizer": host}),
                **({"offload_param": host} if offload == "all" else {}),
            },
        },
    )
    contestant = Contestant(
        lambda input_ids, labels: engine(input_ids, labels, trained_tokens=task.tokens) / task.tokens, engine.backward, engine.step
    )
    contestant.holder = engine
    return contestant


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def _block_numel(model: Llama) -> int:
    return sum(parameter.numel() for parameter in model.model.layers[0].parameters())


def _dtype(task: Task) -> torch.dtype:
    return getattr(torch, task.precision)
