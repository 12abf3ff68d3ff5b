"""The plan of a run: everything that follows from recipe, model and data, computed once and the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from framework.config.batch import BatchPlan, solve_batch
from framework.config.errors import Problem, UserError
from framework.config.schedule import StepPlan, lr_factor, plan_steps
from framework.config.schema import LlamaConfig, ModelConfig, RecipeConfig, ZeroConfig
from framework.models.activations import ActivationBytes, activation_bytes, every_nth
from framework.models.architecture import head_dim, parameter_count
from framework.models.documents import attention_way, require_isolation
from framework.models.llama import Llama
from framework.models.selection import EMBEDDING, choose_trained, settings_of, trained_shapes
from framework.zero import adafactor_step, muon_step
from framework.zero.flat_optimizer import runs_on_buffers
from framework.zero.fp32_modules import find_fp32_modules, parameters_of
from framework.zero.grid import Grid, keep_gathered, place_of
from framework.zero.layout import Layout, UnitLayout, plan_units, with_gap
from framework.zero.memory import StateBytes, disk_traffic, state_bytes
from framework.zero.optimizer_by_name import class_of, state_values
from framework.zero.optimizer_bytes import StateBytesOf, state_bytes_of
from framework.zero.policy import FULL, group_size, offloaded, policy_of
from framework.zero.traffic import bytes_sent


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What a plan needs to know of a token data set."""

    samples: int
    """What a batch counts: conversations or chunks, or packs of them."""
    tokens: int
    trained_tokens: int
    longest: int
    """Tokens of the longest sample, in packs too."""
    packed: int | None = None
    """How many samples the packs hold; None: not packed, `samples` are they."""
    largest_id: int
    digest: str
    """A hash of the content."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Numbers of a run. Ranks compare `fingerprint` before the first step."""

    recipe: RecipeConfig
    architecture: LlamaConfig
    batch: BatchPlan
    steps: StepPlan
    train: DataFacts
    validation: DataFacts | None
    units_of_stage: dict[int, list[UnitLayout]]
    """For each stage that the recipe could have: the model's units, with the policies of `zero`."""
    activations: ActivationBytes | None
    """Of a micro-batch of the longest samples; None where no block is recomputed."""
    recomputed: tuple[int, ...]
    """Blocks that are recomputed in backward."""

    @property
    def units(self) -> list[UnitLayout]:
        return self.units_of_stage[self.recipe.zero.stage]

    @property
    def parameters(self) -> int:
        """Of the model and its adapters, however they are held."""
        return parameter_count(self.architecture) + (self.trained_parameters if self.recipe.peft.method != "none" else 0)

    @property
    def trained_parameters(self) -> int:
        return sum(layout.numel for layout in self._trained)

    @property
    def has_frozen(self) -> bool:
        """Whether there are parameters that no checkpoint holds."""
        return self.trained_parameters < self.parameters

    @property
    def frozen_bytes(self) -> int:
        """What the frozen parameters take, each held once."""
        frozen = [layout for unit in self.units for layout in unit.layouts if not layout.requires_grad]
        return sum(layout.numel * layout.itemsize(self.compute_dtype.itemsize) for layout in frozen)

    @property
    def device_type(self) -> str:
        """Where this machine's ranks compute: cpu or cuda."""
        return "cuda" if self.recipe.trainer.accelerator != "cpu" and torch.cuda.is_available() else "cpu"

    @property
    def compute_dtype(self) -> torch.dtype:
        return getattr(torch, self.recipe.precision.compute_dtype)

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a full global batch, on average."""
        return self.train.tokens / self.train.samples * min(self.batch.global_batch_size, self.train.samples)

    def lr(self, step: int) -> float:
        """Learning rate of optimizer step `step`, from 0."""
        return self.recipe.optimizer.lr * lr_factor(self.recipe.schedule, step, self.steps.total_steps)

    def state_bytes(self, stage: int, rank: int = 0) -> StateBytes:
        """Model-state bytes of a rank at `stage`, by the formula."""
        return state_bytes(
            self.units_of_stage[stage],
            policy_of(self.recipe.zero, stage),
            self.batch.world_size,
            group_size=self._group_size,
            rank=rank,
            master_weights=self.recipe.precision.master_weights,
            optimizer_of=self.optimizer_bytes_of,
            step_bytes=self.step_bytes(stage, rank)[0],
            micro_batches=self.batch.accumulate,
            messages=self.device_type == "cpu",
            compression=self.compression_at(stage),
            **self._itemsizes,
        )

    def bytes_sent(self, stage: int, rank: int = 0) -> int:
        """What a rank sends in a step at `stage`; only with Muon not all send the same."""
        return self.step_bytes(stage, rank)[1] + bytes_sent(
            self.units_of_stage[stage],
            policy_of(self.recipe.zero, stage),
            self.batch.world_size,
            group_size=self._group_size,
            compute_itemsize=self.compute_dtype.itemsize,
            master_itemsize=self._master_itemsize,
            micro_batches=self.batch.accumulate,
            inputs_need_grad=any(slot.name == EMBEDDING for layout in self._trained for slot in layout.slots),
            compression=self.compression_at(stage),
        )

    def compression_at(self, stage: int) -> ZeroConfig:
        """What of `zero`'s compression there would be at `stage`."""
        zero = self.recipe.zero
        gathers = zero.gather_compression if stage == 3 else "none"
        if stage:
            return replace(zero, stage=stage, gather_compression=gathers)
        return replace(zero, stage=stage, gather_compression=gathers, reduce_compression="none", error_feedback=False)

    @property
    def micro_batch_shape(self) -> tuple[int, int]:
        """(rows, tokens) of the largest that there can be."""
        tokens = self.recipe.data.max_tokens if self.recipe.data.packing else self.train.longest
        return min(self.batch.micro_batch_size, self.train.samples), tokens

    @property
    def micro_batches_vary(self) -> bool:
        """Whether there may be none of that shape on some rank."""
        tokens = self.micro_batch_shape[1]
        return self.train.tokens < self.train.samples * tokens or self.train.samples < self.batch.global_batch_size

    @property
    def activation_host_bytes(self) -> int:
        """What the recomputed blocks of a micro-batch of that shape keep in host memory."""
        offloads = self.activations is not None and self.recipe.model.activation_offload
        return self.activations.on_host(self.recomputed) if offloads else 0

    @property
    def whole_units(self) -> list[str]:
        """Names of the units whose parameters are never released; the root's is empty."""
        usual = policy_of(self.recipe.zero)
        return [unit.name for unit in self.units if all((each.policy or usual).params_at_rest is FULL for each in unit.layouts)]

    @property
    def _group_size(self) -> int:
        return group_size(self.recipe.zero, self.batch.world_size)

    @property
    def _master_itemsize(self) -> int:
        return max(self.compute_dtype.itemsize, 4)

    @property
    def disk_traffic(self) -> tuple[int, int]:
        """Bytes that a rank reads from and writes to `offload.nvme_path` in a step."""
        return disk_traffic(
            self.units,
            policy_of(self.recipe.zero),
            self.batch.world_size,
            group_size=self._group_size,
            micro_batches=self.batch.accumulate,
            **self._itemsizes,
        )

    @property
    def _itemsizes(self) -> dict[str, Any]:
        values = state_values(self.recipe.optimizer) if self.recipe.offload.optimizer == "nvme" else 0  # else `optimizer_of` tells
        return {
            "compute_itemsize": self.compute_dtype.itemsize,
            "master_itemsize": self._master_itemsize,
            "optimizer_itemsize": values * self._master_itemsize,
            "prefetch_bytes": self.recipe.zero.prefetch_bytes,
            "offload": self.recipe.offload,
        }

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Most that a rank writes of masters and optimizer state."""
        return self._checkpoint_bytes(self._trained)

    @property
    def checkpoint_copy_bytes(self) -> int:
        """Host memory that the copy before takes; what lies on a disk is not copied."""
        if self.recipe.offload.optimizer != "nvme":
            return self.checkpoint_bytes
        on_disk = offloaded(self.recipe.offload, [layout.numel for layout in self._trained])
        return self._checkpoint_bytes([layout for layout, lies in zip(self._trained, on_disk, strict=True) if not lies])

    @cached_property
    def optimizer_bytes_of(self) -> StateBytesOf:
        """Bytes of optimizer state, by what a rank has of a layout."""
        options = {"on_buffers": self._updates_buffers}
        return state_bytes_of(self.recipe.optimizer, self._master_itemsize, self.orthogonal.__contains__, **options)

    @property
    def _updates_buffers(self) -> bool:
        """Whether our kernels update whole buffers on this machine."""
        precision, master_dtype = self.recipe.precision, torch.float64 if self.compute_dtype is torch.float64 else torch.float32
        on_host = offloaded(self.recipe.offload, [layout.numel for layout in self._trained])
        held = {
            ("cpu" if lies else self.device_type, master_dtype, torch.float32 if layout.fp32 else self.compute_dtype)
            for layout, lies in zip(self._trained, on_host, strict=True)
        }
        on_disk = self.recipe.offload.optimizer == "nvme" and any(on_host)
        without_master = precision.master_weights != "full" and any(not layout.fp32 for layout in self._trained)
        return runs_on_buffers(class_of(self.recipe.optimizer), held, on_disk=on_disk, without_master=without_master)

    @cached_property
    def orthogonal(self) -> set[str]:
        """Matrices whose steps Muon makes orthogonal."""
        recipe = self.recipe
        if recipe.optimizer.name != "muon":
            return set()
        settings = settings_of(trained_shapes(self.architecture, recipe.model, recipe.peft), self.architecture, recipe.optimizer)
        return {name for name, each in settings.items() if each.orthogonal}

    def step_bytes(self, stage: int, rank: int = 0) -> tuple[int, int]:
        """(memory, sent) of an optimizer's step at `stage` that ranks make together."""
        trained, usual = _trained(self.units_of_stage[stage]), policy_of(self.recipe.zero, stage)

        def grid_of(layout: Layout) -> Grid:
            return place_of(layout, usual, self.batch.world_size, self._group_size, rank).grid

        if self.recipe.optimizer.name == "adafactor":
            return adafactor_step.step_bytes(trained, grid_of)
        matrices = [(layout, slot) for layout in trained for slot in layout.slots if slot.name in self.orthogonal]
        return muon_step.step_bytes(matrices, grid_of)

    @property
    def _trained(self) -> list[Layout]:
        return _trained(self.units)

    def _checkpoint_bytes(self, layouts: Sequence[Layout]) -> int:
        policy = policy_of(self.recipe.zero)

        def written(rank: int) -> int:
            nbytes = 0
            for layout in layouts:
                extents = place_of(layout, policy, self.batch.world_size, self._group_size, rank).extents
                start = extents.shard.start + extents.owned.start
                stop = max(min(extents.shard.start + extents.owned.stop, layout.total), start)
                nbytes += self._master_itemsize * (stop - start)
                nbytes += sum(self.optimizer_bytes_of([with_gap(piece)]) for piece in layout.pieces(start, stop))
            return nbytes

        return max(map(written, range(self.batch.world_size)))

    @property
    def fingerprint(self) -> str:
        """A hash of what all ranks must agree on: settings, architecture, data and arithmetic."""
        agreed = (self.recipe, self.architecture, self.batch, self.steps, self.train, self.validation)
        return hashlib.sha256(repr(agreed).encode()).hexdigest()


def _trained(units: Sequence[UnitLayout]) -> list[Layout]:
    return [layout for unit in units for layout in unit.layouts if layout.requires_grad]


def check_data(recipe: RecipeConfig, architecture: LlamaConfig, data: Sequence[DataFacts]) -> None:
    """Raises UserError where samples are longer than the model reads, or have tokens that it does not know."""
    longest = max(facts.longest for facts in data)
    if longest > architecture.max_position_embeddings:
        limit = architecture.max_position_embeddings
        raise UserError(
            Problem(
                path="data.max_tokens",
                got=f"a sample of {longest:,} tokens",
                expected=f"at most {limit:,}, the model's longest sequence",
                fix=f"data.max_tokens={limit}",
            )
        )
    largest_id = max(facts.largest_id for facts in data)
    if largest_id >= architecture.vocab_size:
        raise UserError(
            Problem(
                path="model.tokenizer",
                got=f"a tokenizer that gives the id {largest_id:,}",
                expected=f"ids below the model's vocab_size of {architecture.vocab_size:,}",
                fix="model.tokenizer=null (the model's own)" if recipe.model.path else f"model.arch.vocab_size={largest_id + 1}",
            )
        )


def make_plan(recipe: RecipeConfig, architecture: LlamaConfig, train: DataFacts, validation: DataFacts | None, world_size: int) -> Plan:
    """Raises UserError where recipe, model and data do not fit together."""
    check_data(recipe, architecture, [facts for facts in (train, validation) if facts is not None])
    batch = solve_batch(recipe.trainer, world_size)
    steps = plan_steps(recipe.trainer, train.samples, batch.global_batch_size)
    lr_factor(recipe.schedule, 0, steps.total_steps)  # refuses a warm-up as long as the run
    with torch.device("meta"):
        model = Llama(architecture)
    if recipe.data.packing:
        require_isolation(model)
    choose_trained(model, recipe.model, recipe.peft)
    made = Plan(
        recipe=recipe,
        architecture=architecture,
        batch=batch,
        steps=steps,
        train=train,
        validation=validation,
        units_of_stage={stage: _units(model, recipe, stage, world_size) for stage in (0, 1, 2, 3)},
        activations=None,
        recomputed=(),
    )
    if not recipe.model.activation_checkpointing and recipe.model.activation_budget_bytes is None:
        return made
    rows, tokens = made.micro_batch_shape
    dtype, device_type = made.compute_dtype, made.device_type
    way = attention_way(device_type, dtype, head_dim(architecture), compiled=recipe.model.compile) if recipe.data.packing else None
    activations = activation_bytes(model, rows, tokens, dtype, device_type, way)
    return replace(made, activations=activations, recomputed=_recomputed(recipe.model, activations))


def _units(model: Llama, recipe: RecipeConfig, stage: int, world_size: int) -> list[UnitLayout]:
    """As an engine at `stage` would have them."""
    zero, in_fp32 = replace(recipe.zero, stage=stage), find_fp32_modules(model, recipe.precision.fp32_modules)
    units = plan_units(model, zero=zero, fp32_parameters=parameters_of(in_fp32.values()))
    return keep_gathered(units, zero, world_size, getattr(torch, recipe.precision.compute_dtype).itemsize)


def _recomputed(model: ModelConfig, activations: ActivationBytes) -> tuple[int, ...]:
    """Which blocks the settings choose. Raises UserError for a budget that is too small in any case."""
    blocks, budget, offloads = len(activations.blocks), model.activation_budget_bytes, model.activation_offload
    if budget is None:
        return every_nth(blocks, model.activation_checkpointing)
    chosen = activations.fewest(budget, offloads=offloads)
    if chosen is None:
        least = activations.peak(range(blocks), offloads=offloads)
        less = "" if offloads else " (less with model.activation_offload=true)"
        expected = f"at least {least:,} bytes, with every block recomputed{less}"
        fix = f"model.activation_budget_bytes={least}  (or a smaller trainer.micro_batch_size)"
        raise UserError(Problem(path="model.activation_budget_bytes", got=f"{budget:,}", expected=expected, fix=fix))
    return chosen
