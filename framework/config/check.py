"""Finds everything that is wrong with a recipe before anything slow starts. Keys and types are settled by then (`typed.py`).

`check` looks at the arithmetic between settings and at the hardware; files and models are looked at by `cli/check.py`, which may import the
rooms that read them. Each rule is a small function of one group that yields problems. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from framework.config.batch import solve_batch
from framework.config.check_zero import compression_problems, zero_problems
from framework.config.errors import Problem, UserError
from framework.config.hardware import check_disk, check_hardware, world_size
from framework.config.schedule import decay_steps, warmup_steps, warmup_too_long, zero_steps
from framework.config.schema import (
    DataConfig,
    LlamaConfig,
    ModelConfig,
    OptimizerConfig,
    PeftConfig,
    PrecisionConfig,
    RecipeConfig,
    ScheduleConfig,
    SourceConfig,
    TrainerConfig,
)

ON_DISK = ("adamw", "lion", "sgd")
"""Optimizers that our kernels run, which take their state from a disk."""


def check(recipe: RecipeConfig) -> list[Problem]:
    """All problems of `recipe` with itself and with this machine."""
    return check_settings(recipe) + check_hardware(recipe.trainer) + check_disk(recipe.offload)


def check_settings(recipe: RecipeConfig) -> list[Problem]:
    """Problems that show without looking at any file."""
    return [
        *_names(recipe),
        *_model(recipe.model),
        *_peft(recipe.peft, recipe.model),
        *_frozen(recipe.model, recipe.peft),
        *_data(recipe.data, recipe.model),
        *_zero(recipe),
        *_offload(recipe),
        *_precision(recipe.precision),
        *_master_weights(recipe),
        *_fp32_modules(recipe.precision),
        *_checkpoint(recipe),
        *_optimizer(recipe.optimizer),
        *_optimizer_here(recipe),
        *_trainer(recipe.trainer),
        *_schedule(recipe.schedule, recipe.trainer),
        *_evaluation(recipe),
    ]


def _names(recipe: RecipeConfig) -> Iterator[Problem]:
    if not recipe.name or Path(recipe.name).is_absolute() or ".." in Path(recipe.name).parts:
        yield Problem(path="name", got=repr(recipe.name), expected="the name of a folder below runs_dir", fix="name=my_run")


def _model(model: ModelConfig) -> Iterator[Problem]:
    if model.path is None and model.arch is None:
        yield Problem(
            path="model.path",
            got="nothing",
            expected="a Hugging Face folder, a .gguf file or a hub name (or model.arch for random weights)",
            fix="model.path=/path/to/model  (or model=smollm2, a small model to try things with)",
        )
    if model.path is None and model.arch is not None and model.tokenizer is None:
        expected = "a tokenizer for random weights: a folder, a .gguf file or a hub name"
        yield Problem(path="model.tokenizer", got="nothing", expected=expected, fix="model.tokenizer=/path/to/tokenizer")
    yield from _activations(model)
    if model.arch is not None:
        yield from _architecture(model.arch)


def _activations(model: ModelConfig) -> Iterator[Problem]:
    every, budget = model.activation_checkpointing, model.activation_budget_bytes
    if not isinstance(every, bool) and every < 1:
        expected = "true, false, or n for every n-th block"
        yield Problem(path="model.activation_checkpointing", got=str(every), expected=expected, fix="model.activation_checkpointing=false")
    if budget is not None:
        yield from _at_least("model.activation_budget_bytes", budget, 1)
        if every:
            got = f"{budget} with model.activation_checkpointing={str(every).lower()}"
            expected = "one of the two: a budget chooses the blocks by itself"
            yield Problem(path="model.activation_budget_bytes", got=got, expected=expected, fix="model.activation_checkpointing=false")
    if model.activation_offload and not every and budget is None:
        expected = "recomputed blocks, whose inputs are kept in host memory"
        fix = "model.activation_checkpointing=true"
        yield Problem(path="model.activation_offload", got="true, and every block stores its activations", expected=expected, fix=fix)


def _architecture(arch: LlamaConfig) -> Iterator[Problem]:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    for name in sizes:
        yield from _at_least(f"model.arch.{name}", getattr(arch, name), 1)
    if arch.sliding_window is not None:
        yield from _at_least("model.arch.sliding_window", arch.sliding_window, 1)
    heads, kv_heads = arch.num_attention_heads, arch.num_key_value_heads
    if heads < 1:
        return
    per_head = arch.hidden_size // heads if arch.head_dim is None else arch.head_dim
    if arch.head_dim is None and arch.hidden_size % heads:
        got = f"{arch.hidden_size} / {heads} heads = {arch.hidden_size / heads:.4g}, which is not whole"
        fix = f"model.arch.hidden_size={-(-arch.hidden_size // heads) * heads}"
        yield Problem(path="model.arch.hidden_size", got=got, expected=f"a multiple of {heads}, or model.arch.head_dim", fix=fix)
    elif per_head % 2 or (arch.head_dim is not None and per_head < 2):
        got = f"{per_head} values per head"
        yield Problem(path="model.arch.head_dim", got=got, expected="an even number, for rotary positions", fix="model.arch.head_dim=64")
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        legal = [value for value in range(1, heads + 1) if heads % value == 0]
        expected = f"a divisor of the {heads} query heads: {', '.join(map(str, legal))}"
        fix = f"model.arch.num_key_value_heads={min(legal, key=lambda value: abs(value - kv_heads))}"
        yield Problem(path="model.arch.num_key_value_heads", got=str(kv_heads), expected=expected, fix=fix)


def _peft(peft: PeftConfig, model: ModelConfig) -> Iterator[Problem]:
    if peft.method == "none":
        if peft.path is not None:
            yield Problem(path="peft.path", got=f"{peft.path} with peft.method=none", expected="null, or peft.method=lora", fix="peft=lora")
        if peft.base != "float":
            got = f"{peft.base} with peft.method=none, which trains the model's own weights"
            yield Problem(path="peft.base", got=got, expected="float, or adapters over a frozen base", fix="peft=qlora")
        return
    if model.path is None:
        got, expected = f"{peft.method} on random weights", "a pretrained model that the adapter belongs to"
        yield Problem(path="peft.method", got=got, expected=expected, fix="model.path=/path/to/model")
    yield from _at_least("peft.rank", peft.rank, 1)
    if peft.alpha <= 0:
        yield Problem(path="peft.alpha", got=f"{peft.alpha:g}", expected="above 0", fix="peft.alpha=32")
    yield from _share("peft.dropout", peft.dropout)
    if not peft.targets:
        yield Problem(path="peft.targets", got="no layer", expected="at least one", fix="peft.targets=[all-linear]")
    for index, target in enumerate(peft.targets):
        yield from _pattern(f"peft.targets[{index}]", target, "a name, a regular expression or all-linear", "peft.targets=[all-linear]")
    if peft.base == "float":
        unused = PeftConfig()
        for key in ("base_block", "quantized_layers"):
            if getattr(peft, key) != getattr(unused, key):
                got = f"{getattr(peft, key)} with peft.base=float, which quantises nothing"
                yield Problem(path=f"peft.{key}", got=got, expected="a quantised base", fix="peft.base=nf4")


def _frozen(model: ModelConfig, peft: PeftConfig) -> Iterator[Problem]:
    blocks = model.train_last_n_blocks
    if blocks is not None:
        yield from _at_least("model.train_last_n_blocks", blocks, 0)
    for index, pattern in enumerate(model.freeze):
        yield from _pattern(f"model.freeze[{index}]", pattern, "a name or a regular expression", "model.freeze=[embed_tokens]")
    chosen = {"freeze": model.freeze or None, "train_last_n_blocks": blocks}
    for key, value in chosen.items():
        if value is not None and peft.method != "none":
            got, expected = f"{value} with peft.method={peft.method}", "none of it: everything but the adapters is frozen already"
            yield Problem(path=f"model.{key}", got=got, expected=expected, fix="peft=none")
        elif value is not None and model.path is None:
            got = f"{value} on random weights, which would stay random"
            yield Problem(path=f"model.{key}", got=got, expected="a pretrained model", fix="model.path=/path/to/model")


def _pattern(path: str, pattern: str, expected: str, fix: str) -> Iterator[Problem]:
    try:
        re.compile(pattern)
        why_not = "" if pattern else "means nothing"
    except re.error as error:
        why_not = str(error)
    if why_not:
        yield Problem(path=path, got=f"{pattern!r} ({why_not})", expected=expected, fix=fix)


def _data(data: DataConfig, model: ModelConfig) -> Iterator[Problem]:
    yield from _at_least("data.max_tokens", data.max_tokens, 2)
    yield from _at_least("data.num_workers", data.num_workers, 1)
    if data.cache_dir is not None and not data.cache_dir.strip():
        expected = "a folder for tokenised data"
        yield Problem(path="data.cache_dir", got="an empty path", expected=expected, fix="data.cache_dir=null   (below ~/.cache)")
    if data.max_rows is not None:
        yield from _at_least("data.max_rows", data.max_rows, 1)
    if isinstance(data.train, list):
        yield from _sources("data.train", data.train)
    if isinstance(data.validation, list):
        yield from _sources("data.validation", data.validation)
    yield from _share("data.validation_fraction", data.validation_fraction)
    if data.validation is not None and data.validation_fraction > 0:
        got = f"{data.validation_fraction} beside data.validation"
        yield Problem(path="data.validation_fraction", got=got, expected="one of them", fix="data.validation_fraction=0")
    if model.arch is not None and data.max_tokens > model.arch.max_position_embeddings:
        longest = model.arch.max_position_embeddings
        expected = f"at most model.arch.max_position_embeddings = {longest}"
        yield Problem(path="data.max_tokens", got=str(data.max_tokens), expected=expected, fix=f"data.max_tokens={longest}")


def _sources(setting: str, sources: list[str | SourceConfig]) -> Iterator[Problem]:
    if not sources:
        yield Problem(path=setting, got="an empty list", expected="at least one source", fix=f"{setting}=/path/to/file.jsonl")
    weights = {}
    for number, source in enumerate(sources):
        where = f"{setting}[{number}]"
        settings = SourceConfig(path=source) if isinstance(source, str) else source
        weights[where] = settings.weight
        if not settings.path:
            yield Problem(path=f"{where}.path", got="nothing", expected="a file, folder or glob", fix="path: /path/to/file.jsonl")
        if settings.max_rows is not None:
            yield from _at_least(f"{where}.max_rows", settings.max_rows, 1)
        if settings.weight is not None and setting == "data.validation":
            got, expected = f"{settings.weight:g}", "no weight: validation data are all used, once"
            yield Problem(path=f"{where}.weight", got=got, expected=expected)
        elif settings.weight is not None and settings.weight <= 0:
            got, expected = f"{settings.weight:g}", "above 0; a source that is not wanted is left out"
            yield Problem(path=f"{where}.weight", got=got, expected=expected, fix="weight: 1")
    without = [where for where, weight in weights.items() if weight is None]
    if 0 < len(without) < len(weights) and setting == "data.train":
        got = f"no weight for {', '.join(without)} and one for the others"
        yield Problem(path="data.train", got=got, expected="weights for all sources, or for none")


def _zero(recipe: RecipeConfig) -> Iterator[Problem]:
    yield from _at_least("zero.prefetch_bytes", recipe.zero.prefetch_bytes, 0)
    devices = recipe.trainer.devices
    yield from zero_problems(recipe.zero, world_size(recipe.trainer) if devices == "auto" or devices >= 1 else None)
    yield from compression_problems(recipe.zero, recipe.precision)


def _checkpoint(recipe: RecipeConfig) -> Iterator[Problem]:
    config = recipe.checkpoint
    every, stays = config.every_n_steps, config.keep_every_n_steps
    yield from _at_least("checkpoint.max_shard_bytes", config.max_shard_bytes, 1)
    yield from _at_least("checkpoint.keep", config.keep, 1)
    yield from _at_least("checkpoint.keep_best", config.keep_best, 0)
    if every is not None:
        yield from _at_least("checkpoint.every_n_steps", every, 1)
    if stays is not None and (every is None or stays < 1 or stays % max(every, 1)):
        expected, step = f"a multiple of checkpoint.every_n_steps={every}", every or 500
        fix = f"checkpoint.keep_every_n_steps={max(1, round(stays / step)) * step}" if every else "checkpoint.every_n_steps=500"
        yield Problem(path="checkpoint.keep_every_n_steps", got=str(stays), expected=expected, fix=fix)
    if config.keep_best > 0 and recipe.eval.every_n_steps is None:
        got, expected = f"{config.keep_best}, but nothing is validated on the way", "validations that tell which checkpoint is the best"
        yield Problem(path="checkpoint.keep_best", got=got, expected=expected, fix=f"eval.every_n_steps={every or 500}")


def _offload(recipe: RecipeConfig) -> Iterator[Problem]:
    offload, zero, optimizer = recipe.offload, recipe.zero, recipe.optimizer.name
    if offload.params != "none" and zero.stage != 3:
        got = f"{offload.params} with zero={zero.stage}, where every rank has all parameters"
        yield Problem(path="offload.params", got=got, expected="zero=3, or offload=optimizer", fix="zero=3")
    if not 0 <= offload.fraction <= 1:
        yield Problem(path="offload.fraction", got=f"{offload.fraction:g}", expected="a share from 0 to 1", fix="offload.fraction=1")
    if "nvme" in (offload.optimizer, offload.params) and not (offload.nvme_path or "").strip():
        yield Problem(path="offload.nvme_path", got="nothing", expected="a folder on a local disk", fix="offload.nvme_path=/mnt/nvme")
    if offload.optimizer == "nvme" and optimizer in ON_DISK and recipe.optimizer.moments != "fp32":
        got = f"nvme with optimizer.moments={recipe.optimizer.moments}, which lie in memory"
        yield Problem(path="offload.optimizer", got=got, expected="cpu, or moments in fp32", fix="offload=optimizer")
    if offload.params == "nvme" and zero.shard_size and zero.shard_optimizer == "world":
        got = "nvme with zero.shard_optimizer=world, which keeps chunks of parameters in memory"
        yield Problem(path="offload.params", got=got, expected="cpu, or shards of one kind", fix="zero.shard_optimizer=group")
    if offload.optimizer == "nvme" and optimizer not in (*ON_DISK, "muon", "adafactor"):
        got, expected = f"nvme with {optimizer}, which torch runs on state in memory", f"one of {', '.join(ON_DISK)}, or cpu"
        yield Problem(path="offload.optimizer", got=got, expected=expected, fix="offload=optimizer")
    if offload.optimizer == "nvme" and recipe.precision.compute_dtype == "float64":
        yield Problem(path="offload.optimizer", got="nvme with float64", expected="cpu, or fp32 masters", fix="offload=optimizer")


def _precision(precision: PrecisionConfig) -> Iterator[Problem]:
    scale = precision.loss_scale
    if precision.autocast != "none" and precision.compute_dtype != "float32":
        got = f"{precision.autocast} with precision.compute_dtype={precision.compute_dtype}"
        yield Problem(path="precision.autocast", got=got, expected="none, or parameters in float32", fix="precision.autocast=none")
        return
    if not precision.scales_loss:
        if scale != "dynamic":
            got = f"{scale:g} with {precision.computes_in}, whose gradients need no scale"
            yield Problem(path="precision.loss_scale", got=got, expected="dynamic, or precision=fp16", fix="precision.loss_scale=dynamic")
        return
    for name in ("min_loss_scale", "initial_loss_scale", *(("loss_scale",) if scale != "dynamic" else ())):
        value = getattr(precision, name)
        if not 0 < value < math.inf:
            yield Problem(path=f"precision.{name}", got=f"{value:g}", expected="above 0", fix=f"precision.{name}=1")
    if precision.initial_loss_scale < precision.min_loss_scale:
        got = f"{precision.initial_loss_scale:g}, below precision.min_loss_scale={precision.min_loss_scale:g}"
        fix = f"precision.initial_loss_scale={precision.min_loss_scale:g}"
        yield Problem(path="precision.initial_loss_scale", got=got, expected="the least scale or more", fix=fix)
    yield from _at_least("precision.loss_scale_window", precision.loss_scale_window, 1)
    yield from _at_least("precision.loss_scale_hysteresis", precision.loss_scale_hysteresis, 1)


def _master_weights(recipe: RecipeConfig) -> Iterator[Problem]:
    kept, dtype, offload = recipe.precision.master_weights, recipe.precision.compute_dtype, recipe.offload
    if kept == "full":
        return
    path, fix = "precision.master_weights", "precision.master_weights=full"
    if dtype != "bfloat16":
        got = f"{kept} with precision.compute_dtype={dtype}"
        yield Problem(path=path, got=got, expected="full, or bfloat16, the upper half of an fp32 number", fix=fix)
    if recipe.optimizer.name not in ("adamw", "lion", "sgd"):
        got = f"{kept} with {recipe.optimizer.name}, which is torch's own and updates fp32 tensors"
        yield Problem(path=path, got=got, expected="full, or adamw, lion or sgd", fix=fix)
    elif recipe.optimizer.moments != "fp32":
        got, expected = f"{kept} with optimizer.moments={recipe.optimizer.moments}", "full, or moments in fp32"
        yield Problem(path=path, got=got, expected=expected, fix="optimizer.moments=fp32")
    if "nvme" in (offload.optimizer, offload.params):
        got = f"{kept} with state on a disk, where masters are fp32"
        yield Problem(path=path, got=got, expected="full, or state in memory", fix=fix)
    elif offload.params != "none" and (offload.optimizer == "none" or offload.fraction < 1):
        got = f"{kept} with parameters in host memory and optimizer state on the device"
        yield Problem(path=path, got=got, expected="full, or both in one place", fix="offload=all")


def _fp32_modules(precision: PrecisionConfig) -> Iterator[Problem]:
    for index, pattern in enumerate(precision.fp32_modules):
        expected, fix = "the name of a module or a regular expression", "precision.fp32_modules=[norm]"
        yield from _pattern(f"precision.fp32_modules[{index}]", pattern, expected, fix)
    if precision.fp32_modules and precision.compute_dtype not in ("bfloat16", "float16"):
        got = f"{precision.fp32_modules} with precision.compute_dtype={precision.compute_dtype}, in which everything computes"
        yield Problem(path="precision.fp32_modules", got=got, expected="none of them, or precision=bf16", fix="precision.fp32_modules=[]")


def _optimizer(optimizer: OptimizerConfig) -> Iterator[Problem]:
    if optimizer.lr <= 0:
        yield Problem(path="optimizer.lr", got=f"{optimizer.lr:g}", expected="above 0", fix="optimizer.lr=2e-5")
    if optimizer.eps <= 0:
        yield Problem(path="optimizer.eps", got=f"{optimizer.eps:g}", expected="above 0", fix="optimizer.eps=1e-8")
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        expected = "two numbers from 0 to below 1"
        yield Problem(path="optimizer.betas", got=str(list(optimizer.betas)), expected=expected, fix="optimizer.betas=[0.9,0.95]")
    yield from _at_least("optimizer.weight_decay", optimizer.weight_decay, 0)
    yield from _share("optimizer.momentum", optimizer.momentum)
    if optimizer.momentum and optimizer.name not in ("sgd", "rmsprop", "muon"):
        got = f"{optimizer.momentum:g} with {optimizer.name}, which has no such setting"
        yield Problem(path="optimizer.momentum", got=got, expected="0, or optimizer=sgd", fix="optimizer.momentum=0")
    if optimizer.nesterov and not (optimizer.name in ("sgd", "muon") and optimizer.momentum):
        got = f"true with {optimizer.name} and a momentum of {optimizer.momentum:g}"
        yield Problem(path="optimizer.nesterov", got=got, expected="false, or sgd or muon with momentum", fix="optimizer.nesterov=false")
    for key, owners, fix in (
        ("moments", ("adamw", "lion"), "optimizer=adamw_8bit"),
        ("adjust_lr", ("muon",), "optimizer=muon"),
        ("adamw_lr", ("muon",), "optimizer=muon"),
    ):
        value, unset = getattr(optimizer, key), getattr(OptimizerConfig(), key)
        if value != unset and optimizer.name not in owners:
            got = f"{value} with {optimizer.name}, which has no such setting"
            expected = f"{'null' if unset is None else unset}, or optimizer.name={' or '.join(owners)}"
            yield Problem(path=f"optimizer.{key}", got=got, expected=expected, fix=fix)
    if optimizer.adamw_lr is not None and optimizer.adamw_lr <= 0:
        got, expected = f"{optimizer.adamw_lr:g}", "above 0, or null for optimizer.lr"
        yield Problem(path="optimizer.adamw_lr", got=got, expected=expected, fix="optimizer.adamw_lr=null")
    if optimizer.weight_decay and optimizer.name == "rprop":
        got = f"{optimizer.weight_decay:g} with rprop, which has none"
        yield Problem(path="optimizer.weight_decay", got=got, expected="0", fix="optimizer.weight_decay=0")
    decay = optimizer.layer_lr_decay
    if decay is not None and not 0 < decay <= 1:
        expected = "above 0, up to 1, or null for one learning rate"
        yield Problem(path="optimizer.layer_lr_decay", got=f"{decay:g}", expected=expected, fix="optimizer.layer_lr_decay=0.9")
    for index, group in enumerate(optimizer.groups):
        where = f"optimizer.groups[{index}]"
        fix = "optimizer.groups=[{pattern: embed_tokens, lr_factor: 0.1}]"
        yield from _pattern(f"{where}.pattern", group.pattern, "a name or a regular expression", fix)
        if group.lr_factor <= 0:
            expected = "above 0; what is not to be trained is frozen"
            yield Problem(path=f"{where}.lr_factor", got=f"{group.lr_factor:g}", expected=expected, fix=f"model.freeze=[{group.pattern}]")
        if group.weight_decay is not None:
            yield from _at_least(f"{where}.weight_decay", group.weight_decay, 0)
    if optimizer.grad_clip is not None and optimizer.grad_clip <= 0:
        expected = "above 0, or null for no clipping"
        yield Problem(path="optimizer.grad_clip", got=f"{optimizer.grad_clip:g}", expected=expected, fix="optimizer.grad_clip=null")


def _optimizer_here(recipe: RecipeConfig) -> Iterator[Problem]:
    """What other settings ask of the optimizer."""
    name = recipe.optimizer.name
    apart = "zero.secondary_shard_size" if recipe.zero.secondary_shard_size else "zero.shard_optimizer=world"
    if name in ("muon", "adafactor") and (recipe.zero.secondary_shard_size or recipe.zero.shard_optimizer == "world"):
        fix = f"{apart}=null" if recipe.zero.secondary_shard_size else "zero.shard_optimizer=group"
        got, expected = f"{name} with {apart}, where shards do not lie in the order of ranks", "an optimizer that works element by element"
        yield Problem(path="optimizer.name", got=got, expected=expected, fix=fix)
    if recipe.offload.optimizer != "none" and name in ("muon", "adafactor"):
        got = f"{recipe.offload.optimizer} with {name}, whose steps take whole matrices and the other ranks"
        yield Problem(path="offload.optimizer", got=got, expected="none, or another optimizer", fix="offload=none")
    if recipe.optimizer.moments != "fp32" and recipe.precision.compute_dtype == "float64":
        got, expected = f"{recipe.optimizer.moments} with float64", "fp32, which are fp64 then, or another precision"
        yield Problem(path="optimizer.moments", got=got, expected=expected, fix="optimizer.moments=fp32")


def _trainer(trainer: TrainerConfig) -> Iterator[Problem]:
    ends = [value for value in (trainer.max_steps, trainer.epochs) if value is not None]
    if min(ends, default=0) <= 0:
        yield zero_steps(trainer)
    yield from _at_least("trainer.log_every_n_steps", trainer.log_every_n_steps, 1)
    yield from _at_least("trainer.collective_timeout_seconds", trainer.collective_timeout_seconds, 1)
    if trainer.devices != "auto" and trainer.devices < 1:
        yield Problem(path="trainer.devices", got=str(trainer.devices), expected="1 or more, or auto", fix="trainer.devices=auto")
        return
    try:
        solve_batch(trainer, world_size(trainer))
    except UserError as error:
        yield from error.problems


def _schedule(schedule: ScheduleConfig, trainer: TrainerConfig) -> Iterator[Problem]:
    yield from _share("schedule.min_lr_ratio", schedule.min_lr_ratio, highest=1.0)
    if schedule.name == "constant" and schedule.min_lr_ratio:
        got = f"{schedule.min_lr_ratio:g} with the constant schedule, which never falls"
        yield Problem(path="schedule.min_lr_ratio", got=got, expected="0, or a schedule with a floor", fix="schedule=linear")
    if schedule.warmup_steps is not None and schedule.warmup_ratio is not None:
        got = f"{schedule.warmup_steps}, beside schedule.warmup_ratio={schedule.warmup_ratio:g}"
        yield Problem(path="schedule.warmup_steps", got=got, expected="one of them, the other null", fix="schedule.warmup_ratio=null")
        return
    if schedule.warmup_steps is not None:
        yield from _at_least("schedule.warmup_steps", schedule.warmup_steps, 0)
    if schedule.warmup_ratio is not None:
        yield from _share("schedule.warmup_ratio", schedule.warmup_ratio)
    if schedule.name == "wsd" and not 0 < schedule.decay_ratio <= 1:
        expected = "above 0, up to 1"
        yield Problem(path="schedule.decay_ratio", got=f"{schedule.decay_ratio:g}", expected=expected, fix="schedule.decay_ratio=0.1")
    elif trainer.max_steps:  # with epochs the number of steps is known when the data are
        yield from check_schedule(schedule, trainer.max_steps)


def check_schedule(schedule: ScheduleConfig, total_steps: int) -> list[Problem]:
    """Problems of a schedule in a run of `total_steps`, which needs the data where the recipe says epochs."""
    warmup = warmup_steps(schedule, total_steps)
    if warmup > 0 and warmup >= total_steps:
        return [warmup_too_long(schedule, warmup, total_steps)]
    wanted = round(schedule.decay_ratio * total_steps)
    if schedule.name == "wsd" and warmup + wanted > total_steps:
        got = f"{wanted} steps of decay and {warmup} of warm-up in a run of {total_steps}"
        fix = f"schedule.decay_ratio={decay_steps(schedule, total_steps) / total_steps:.2g}"
        return [Problem(path="schedule.decay_ratio", got=got, expected="both to fit into the run", fix=fix)]
    return []


def _evaluation(recipe: RecipeConfig) -> Iterator[Problem]:
    config = recipe.eval
    for name in ("every_n_steps", "max_batches", "patience", "generate_every_n_steps", "max_new_tokens"):
        if (value := getattr(config, name)) is not None:
            yield from _at_least(f"eval.{name}", value, 1)
    needing = [name for name in ("every_n_steps", "patience") if getattr(config, name) is not None]
    if needing and recipe.data.validation is None and recipe.data.validation_fraction == 0:
        got = f"{getattr(config, needing[0])}, but there are no validation data"
        expected = "data.validation or data.validation_fraction"
        yield Problem(path=f"eval.{needing[0]}", got=got, expected=expected, fix="data.validation_fraction=0.05")
    elif needing == ["patience"]:
        got, expected = f"{config.patience}, but validation at the end of the run only", "a cadence of validations"
        yield Problem(path="eval.patience", got=got, expected=expected, fix="eval.every_n_steps=100")
    yield from _at_least("eval.min_delta", config.min_delta, 0)
    if config.min_delta > 0 and config.patience is None:
        got, expected = f"{config.min_delta:g} without eval.patience", "both, or neither"
        yield Problem(path="eval.min_delta", got=got, expected=expected, fix="eval.patience=3")
    yield from _at_least("eval.temperature", config.temperature, 0)
    prompts = [config.prompts] if isinstance(config.prompts, str) else config.prompts
    if prompts is not None and not (prompts and all(prompt.strip() for prompt in prompts)):
        got = "an empty text" if prompts else "an empty list"
        yield Problem(path="eval.prompts", got=got, expected="texts, or a file with texts", fix="eval.prompts=null")
    if config.generate_every_n_steps is not None and config.prompts is None:
        got = f"{config.generate_every_n_steps}, but there are no eval.prompts"
        yield Problem(path="eval.generate_every_n_steps", got=got, expected="prompts to answer", fix="\"eval.prompts=['Who are you?']\"")


def _at_least(path: str, value: float, lowest: int) -> Iterator[Problem]:
    if value < lowest:
        yield Problem(path=path, got=f"{value:g}", expected=f"{lowest} or more", fix=f"{path}={lowest}")


def _share(path: str, value: float, highest: float | None = None) -> Iterator[Problem]:
    """A share from 0 to below 1, or up to and including `highest`."""
    if value < 0 or (value >= 1 if highest is None else value > highest):
        expected = "a share from 0 to below 1" if highest is None else f"a share from 0 to {highest:g}"
        yield Problem(path=path, got=f"{value:g}", expected=expected, fix=f"{path}={value / 100:g}" if 1 < value < 100 else f"{path}=0")
