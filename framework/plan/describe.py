"""The plan as a page of text: what `check` prints, and what a run prints first and keeps as plan.txt."""

from __future__ import annotations

from framework.config.schema import PrecisionConfig, ZeroConfig
from framework.kernels.library import used_on
from framework.models.architecture import head_dim
from framework.models.documents import attention_way
from framework.models.lora import scaling
from framework.models.selection import settings_of, trained_shapes
from framework.models.targets import quantized_names, target_names
from framework.plan.disk import describe_disk
from framework.plan.plan import DataFacts, Plan

CURVE_POINTS = 5
MASTERS = {
    "full": "fp32 master weights and gradients",
    "remainder": "fp32 master weights (as parameter and 16 bits more) and gradients",
    "none": "fp32 gradients, NO master weights: an update below 1/256 of a parameter may be rounded away",
}
ATTENTION = {"varlen": "variable-length FlashAttention", "apart": "one sample after the other", "mask": "all of a pack, masked"}


def describe(plan: Plan) -> str:
    """The plan, a fact a line."""
    recipe, arch, train = plan.recipe, plan.architecture, plan.train
    share = f"{100 * plan.trained_parameters / plan.parameters:.4g}%"
    source = recipe.model.path or "random weights"
    lines = [
        ("model", f"{source}: {arch.family}, {arch.num_hidden_layers} layers, width {arch.hidden_size}, vocabulary {arch.vocab_size:,}"),
        ("parameters", f"{plan.parameters:,}, trained {plan.trained_parameters:,} ({share})"),
        *([("frozen", _frozen(plan))] if plan.has_frozen else []),
        *([("adapter", _adapter(plan))] if recipe.peft.method == "lora" else []),
        ("data", f"{_counted(train)}; longest {train.longest:,}"),
        ("validation", "none" if plan.validation is None else _counted(plan.validation)),
        *([("packing", _packing(plan))] if recipe.data.packing else []),
        ("batch", plan.batch.counted("packs" if recipe.data.packing else "samples")),
        ("steps", _length(plan)),
        ("learning rate", f"{recipe.schedule.name}: {_curve(plan)}"),
        *[("", text) for text in _groups(plan)],
        *(("" if index else "sharding", text) for index, text in enumerate(_sharding(plan))),
        *([("compression", sent)] if (sent := _compression(recipe.zero)) else []),
        ("precision", _precision(recipe.precision)),
        *([("in fp32", _in_fp32(plan))] if recipe.precision.fp32_modules else []),
        *([("offload", describe_disk(plan))] if "nvme" in (recipe.offload.optimizer, recipe.offload.params) else []),
        ("kernels", used_on(plan.device_type, plan.compute_dtype)),
        *([("activations", _activations(plan))] if plan.activations is not None else []),
        ("checkpoints", _checkpoints(plan)),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join([*(f"{name:<{width}}  {text}" for name, text in lines), "", _bytes_table(plan)])


def _counted(data: DataFacts) -> str:
    samples = data.samples if data.packed is None else data.packed
    return f"{samples:,} samples, {data.tokens:,} tokens, {data.trained_tokens:,} trained"


def _precision(precision: PrecisionConfig) -> str:
    if precision.compute_dtype == "float64":
        return precision.compute_dtype
    scale = precision.loss_scale if precision.loss_scale != "dynamic" else f"dynamic, from {precision.initial_loss_scale:g}"
    return f"{precision.computes_in}, {MASTERS[precision.master_weights]}" + (f"; loss scale {scale}" if precision.scales_loss else "")


def _compression(zero: ZeroConfig) -> str:
    """How a rank sends what it does not send as it is."""
    ways = (("parameters", zero.gather_compression), ("gradients", zero.reduce_compression))
    text = ", ".join(f"{what} are sent in {how}" for what, how in ways if how != "none")
    return f"{text} with error feedback" if zero.error_feedback else text


def _in_fp32(plan: Plan) -> str:
    layouts = [layout for unit in plan.units for layout in unit.layouts if layout.fp32]
    tied = any(slot.aliases for layout in layouts for slot in layout.slots)
    text = f"{', '.join(plan.recipe.precision.fp32_modules)}: {sum(layout.numel for layout in layouts):,} parameters"
    return text + ("; the head is the embedding, and so both" if tied else "")


def _packing(plan: Plan) -> str:
    train, most, recipe = plan.train, plan.recipe.data.max_tokens, plan.recipe
    full = (
        f"{train.packed:,} samples in {train.samples:,} packs of at most {most:,} tokens, {train.tokens / (train.samples * most):.1%} full"
    )
    way = attention_way(plan.device_type, plan.compute_dtype, head_dim(plan.architecture), compiled=recipe.model.compile)
    return f"{full}; attention: {ATTENTION[way]}"


def _frozen(plan: Plan) -> str:
    """Which weights stay as they are, and what they take."""
    model, peft = plan.recipe.model, plan.recipe.peft
    text = f"{plan.parameters - plan.trained_parameters:,} parameters in {plan.frozen_bytes / 2**20:,.1f} MiB"
    if quantized := quantized_names(plan.architecture, peft):
        return f"{text}; {peft.base} in blocks of {peft.base_block} on {len(quantized)} layers"
    if model.train_last_n_blocks is not None:
        head = "the head, which is the embedding" if plan.architecture.tie_word_embeddings else "the head"
        text += f"; all but blocks {plan.architecture.num_hidden_layers - model.train_last_n_blocks} and up, the final norm and {head}"
    return text + (f"; {', '.join(model.freeze)}" if model.freeze else "")


def _groups(plan: Plan) -> list[str]:
    """Settings of single parameters, a line for each rule."""
    optimizer = plan.recipe.optimizer
    shapes = trained_shapes(plan.architecture, plan.recipe.model, plan.recipe.peft)
    settings = settings_of(shapes, plan.architecture, optimizer)
    lines = _matrices(plan)
    if optimizer.layer_lr_decay is not None:
        slowest = min(settings, key=lambda name: settings[name].lr_factor)
        lines.append(f"x {optimizer.layer_lr_decay:g} for each block away from the head, x {settings[slowest].lr_factor:.3g} at {slowest}")
    for group in optimizer.groups:
        decay = "" if group.weight_decay is None else f", weight decay {group.weight_decay:g}"
        lines.append(f"x {group.lr_factor:g}{decay} for {group.pattern}")
    return lines


def _matrices(plan: Plan) -> list[str]:
    """What Muon does itself, what it leaves to AdamW, and what ranks send for it; which moments take a byte."""
    optimizer, matrices = plan.recipe.optimizer, plan.orthogonal
    if optimizer.name != "muon":
        in_8_bits = ["moments of matrices of 4,096 elements and more in 8 bits, the others' in fp32"]
        return in_8_bits if optimizer.moments == "8bit" else []
    others = sum(len(layout.slots) for unit in plan.units for layout in unit.layouts if layout.requires_grad) - len(matrices)
    factor = "" if optimizer.adamw_lr is None else f", x {optimizer.adamw_lr / optimizer.lr:g}"
    sent = plan.step_bytes(plan.recipe.zero.stage)[1]
    steps = f"orthogonal steps for {len(matrices)} matrices in blocks ({optimizer.adjust_lr})"
    return [f"{steps}, a rank sends {sent / 2**20:,.1f} MiB for it", f"AdamW for {others} other parameters{factor}"]


def _adapter(plan: Plan) -> str:
    peft = plan.recipe.peft
    kind = "DoRA" if peft.dora else "LoRA"
    dropout = f", dropout {peft.dropout:g}" if peft.dropout else ""
    layers = len(target_names(plan.architecture, peft))
    return f"{kind}, rank {peft.rank}, scaled by {scaling(peft):.4g}{dropout}, on {layers} layers ({', '.join(peft.targets)})"


def _length(plan: Plan) -> str:
    """Where a recipe sets both ends of a run: which of them comes first, too."""
    trainer, steps = plan.recipe.trainer, plan.steps
    tokens = plan.tokens_per_step * steps.total_steps
    text = f"{steps.total_steps:,} = {steps.epochs:.4g} epochs of {steps.steps_per_epoch:,}; about {tokens:,.0f} tokens"
    if trainer.max_steps is None or trainer.epochs is None:
        return text
    if trainer.max_steps > steps.total_steps:
        return f"{text}; trainer.epochs={trainer.epochs:g} comes before trainer.max_steps={trainer.max_steps}"
    if trainer.epochs > steps.epochs:
        return f"{text}; trainer.max_steps={trainer.max_steps} comes before trainer.epochs={trainer.epochs:g}"
    return text


def _curve(plan: Plan) -> str:
    total = plan.steps.total_steps
    points = sorted({0, total - 1, *(round(i * (total - 1) / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS))})
    return ", ".join(f"step {step + 1} {plan.lr(step):.3g}" for step in points)


def _activations(plan: Plan) -> str:
    """What blocks save for backward, the head and the loss not counted."""
    activations, chosen, offloads = plan.activations, plan.recomputed, plan.recipe.model.activation_offload
    every = activations.peak((), offloads=False)
    text = "at most " if plan.micro_batches_vary else ""
    text += f"{activations.peak(chosen, offloads=offloads) / 2**20:,.1f} MiB in the blocks"
    if offloads:
        text += f" and {plan.activation_host_bytes / 2**20:,.1f} MiB on the host"
    return f"{text}; {len(chosen)} of {len(activations.blocks)} blocks are recomputed (none: {every / 2**20:,.1f} MiB)"


def _checkpoints(plan: Plan) -> str:
    config, mebibytes = plan.recipe.checkpoint, f"{plan.checkpoint_bytes / 2**20:,.1f} MiB per rank"
    moments = [
        *([f"every {config.every_n_steps:,} steps"] if config.every_n_steps else []),
        *(["at the best validations"] if config.keep_best else []),
        *(["when stopped"] if config.on_stop else []),
        *(["at the end"] if config.at_end else []),
    ]
    if not moments:
        return "none"
    way = "first copied in host memory, then written while training goes on" if config.asynchronous else "training waits"
    if config.asynchronous and (copied := plan.checkpoint_copy_bytes) < plan.checkpoint_bytes:
        way = f"{copied / 2**20:,.1f} of them first copied in host memory, written while training goes on"
    return f"{', '.join(moments)}; {mebibytes}, {way}"


def _sharding(plan: Plan) -> list[str]:
    """Shard groups, and what lies elsewhere than the stage says, a line each."""
    zero, ranks, lines = plan.recipe.zero, plan.batch.world_size, []
    if zero.shard_size is not None:
        over = f"all {ranks} ranks" if zero.shard_optimizer == "world" else "a group"
        groups = "one group" if ranks == zero.shard_size else f"{ranks // zero.shard_size} groups"
        lines.append(f"{groups} of {zero.shard_size} ranks, the same in each; optimizer state over {over}")
    if zero.secondary_shard_size is not None:
        size = zero.secondary_shard_size
        lines.append(f"over {ranks} ranks; between forward and backward in shards over groups of {size}")
    for rule in zero.modules:
        stage = zero.stage if rule.stage is None else rule.stage
        stays = ", whole until backward" if stage == 3 and rule.reshard_after_forward is False else ""
        lines.append(f"stage {stage}{stays} for {rule.pattern}")
    if zero.keep_gathered_bytes:
        blocks, root = [name for name in plan.whole_units if name], " and the rest of the model" if "" in plan.whole_units else ""
        lines.append(f"{len(blocks)} of {len(plan.units) - 1} blocks{root} always gathered, in {zero.keep_gathered_bytes:,} bytes")
    return lines


def _bytes_table(plan: Plan) -> str:
    """Model state per rank, and what it sends in a step, for every stage, the chosen one marked."""
    ranks, offload = plan.batch.world_size, plan.recipe.offload
    activations = plan.activation_host_bytes
    offloads = (offload.optimizer, offload.params) != ("none", "none") or activations > 0
    on_top = "activations come on top, but for those on the host" if activations else "activations come on top"
    rows = [f"model state per rank on {ranks} {'rank' if ranks == 1 else 'ranks'}, MiB ({on_top})"]
    feedback = plan.recipe.zero.error_feedback
    names = ("parameters", "gradients", "master", "optimizer", "temporary", *(("feedback",) if feedback else ()), "peak")
    on_host = "on host, at most" if activations and plan.micro_batches_vary else "on host"
    names += (*((on_host, "on disk") if offloads else ()), "sent a step")
    widths = [max(12, len(name) + 2) for name in names]
    rows.append(f"  {'':<8}" + "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)))
    for stage in (0, 1, 2, 3):
        state = plan.state_bytes(stage)
        cells = (state.params, state.grads, state.master, state.optimizer, state.temporary)
        cells += (*((state.residual,) if feedback else ()), state.total)
        cells += ((state.host + activations, state.disk) if offloads else ()) + (plan.bytes_sent(stage),)
        mark = ">" if stage == plan.recipe.zero.stage else " "
        rows.append(f"{mark} zero={stage}  " + "".join(f"{cell / 2**20:>{width},.1f}" for cell, width in zip(cells, widths, strict=True)))
    return "\n".join(rows)
