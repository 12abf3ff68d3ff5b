"""The plan of a run: everything that follows from recipe, model and data, computed once and the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from framework.config.batch import BatchPlan, solve_batch
from framework.config.errors import Problem, UserError
from framework.config.schedule import StepPlan, lr_factor, plan_steps
from framework.config.schema import LlamaConfig, RecipeConfig
from framework.models.architecture import parameter_count
from framework.models.documents import require_isolation
from framework.models.llama import Llama
from framework.models.selection import choose_trained, settings_of, trained_shapes
from framework.zero import adafactor_step, muon_step
from framework.zero.layout import Layout, Piece, Slot, UnitLayout, plan_units, with_gap
from framework.zero.memory import StateBytes, state_bytes
from framework.zero.optimizer_bytes import state_bytes_of
from framework.zero.policy import SHARDED, policy_of


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
    units: list[UnitLayout]

    @property
    def parameters(self) -> int:
        """Of the model and its adapters, however they are held."""
        return parameter_count(self.architecture) + (self.trained_parameters if self.recipe.peft.method != "none" else 0)

    @property
    def trained_parameters(self) -> int:
        return sum(layout.numel for unit in self.units for layout in unit.layouts if layout.requires_grad)

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
        zero = self.recipe.zero
        policy = policy_of(type(zero)(stage=stage, reshard_after_forward=zero.reshard_after_forward))
        return state_bytes(
            self.units,
            policy,
            self.batch.world_size,
            rank=rank,
            compute_itemsize=self.compute_dtype.itemsize,
            master_itemsize=self.master_itemsize,
            optimizer_of=self.optimizer_bytes_of,
            step_bytes=self.step_bytes(self.batch.world_size if policy.optimizer is SHARDED else 1, rank)[0],
            prefetch_bytes=zero.prefetch_bytes,
            messages=self.device_type == "cpu",
            offload=self.recipe.offload,
        )

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Most that a rank writes of masters and optimizer state; as much host memory takes the copy before."""
        ranks, of_piece = self.batch.world_size, self.optimizer_bytes_of
        masters = self.master_itemsize * sum(min(layout.shard_numel(ranks), layout.total) for layout in self._trained)
        state = (sum(of_piece(with_gap(p)) for layout in self._trained for p in layout.shard_pieces(rank, ranks)) for rank in range(ranks))
        return masters + max(state)

    @property
    def master_itemsize(self) -> int:
        return max(self.compute_dtype.itemsize, 4)

    @cached_property
    def optimizer_bytes_of(self) -> Callable[[Piece], int]:
        """Bytes of optimizer state, by piece of a parameter."""
        orthogonal = {slot.name for _, slot in self.orthogonal}
        return state_bytes_of(self.recipe.optimizer, self.master_itemsize, orthogonal.__contains__)

    @cached_property
    def orthogonal(self) -> list[tuple[Layout, Slot]]:
        """Matrices whose steps Muon makes orthogonal."""
        recipe = self.recipe
        if recipe.optimizer.name != "muon":
            return []
        settings = settings_of(trained_shapes(self.architecture, recipe.model, recipe.peft), self.architecture, recipe.optimizer)
        return [(layout, slot) for layout in self._trained for slot in layout.slots if settings[slot.name].orthogonal]

    def step_bytes(self, shards: int, rank: int = 0) -> tuple[int, int]:
        """(memory, sent) of an optimizer's step that is made together by `shards` ranks."""
        if self.recipe.optimizer.name == "adafactor":
            nbytes = adafactor_step.step_bytes(slot for layout in self._trained for slot in layout.slots)
            return nbytes, 2 * (shards - 1) * nbytes // shards
        return muon_step.step_bytes(self.orthogonal, shards, rank)

    @property
    def _trained(self) -> list[Layout]:
        return [layout for unit in self.units for layout in unit.layouts if layout.requires_grad]

    @property
    def fingerprint(self) -> str:
        """A hash of what all ranks must agree on: settings, architecture, data and arithmetic."""
        agreed = (self.recipe, self.architecture, self.batch, self.steps, self.train, self.validation)
        return hashlib.sha256(repr(agreed).encode()).hexdigest()


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
    return Plan(
        recipe=recipe, architecture=architecture, batch=batch, steps=steps, train=train, validation=validation, units=plan_units(model)
    )
