"""The recipes' LightningModule and Trainer: steps, learning rate, validation and their timing, against a loop in plain torch (fp64)."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch.testing import assert_close

from framework.config.errors import UserError
from framework.config.schedule import lr_factor
from framework.config.schema import (
    EvalConfig,
    LlamaConfig,
    OptimizerConfig,
    PrecisionConfig,
    RecipeConfig,
    ScheduleConfig,
    TrainerConfig,
    ZeroConfig,
)
from framework.data.batches import EvalBatches, StepBatches
from framework.data.dataset import TokenDataset, TokenDatasetBuilder
from framework.models.llama import Llama
from framework.train.module import CausalLMModule
from framework.train.trainer import build_strategy, build_trainer
from framework.zero import NonFiniteError
from tests.train import lightning_models  # noqa: F401  quietens Lightning

ARCHITECTURE = LlamaConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32
)
OPTIMIZER = OptimizerConfig(lr=0.02, weight_decay=0.1, grad_clip=0.7)
SCHEDULE = ScheduleConfig(name="cosine", warmup_steps=2, min_lr_ratio=0.1)
TOTAL_STEPS = 5  # of 3 an epoch, the last of which is short
GLOBAL_BATCH = 4


def recipe(stage: int = 3, every_n_steps: int | None = None) -> RecipeConfig:
    return RecipeConfig(
        seed=3,
        zero=ZeroConfig(stage=stage),
        precision=PrecisionConfig(compute_dtype="float64"),
        optimizer=OPTIMIZER,
        schedule=SCHEDULE,
        trainer=TrainerConfig(accelerator="cpu"),
        eval=EvalConfig(every_n_steps=every_n_steps),
    )


def dataset(samples: int, seed: int, trained: bool = True) -> TokenDataset:
    """Samples of 2 to 9 tokens, about half of them trained."""
    random, builder = np.random.default_rng(seed), TokenDatasetBuilder()
    for _ in range(samples):
        length = int(random.integers(2, 10))
        mask = (random.random(length) < 0.5) & trained
        mask[0] = False
        mask[-1] = trained
        builder.add(random.integers(0, ARCHITECTURE.vocab_size, length).astype(np.int32), mask)
    return builder.build()


TRAIN, VALIDATION = dataset(11, seed=0), dataset(7, seed=1)


def initial_weights() -> dict[str, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return {name: parameter.detach().double() for name, parameter in Llama(ARCHITECTURE).named_parameters()}


def read(name: str, start: int, stop: int) -> torch.Tensor:
    return initial_weights()[name].flatten()[start:stop]


def loss_sum(model: Llama, micro: dict) -> torch.Tensor:
    logits = model(micro["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), micro["labels"].flatten(), reduction="sum", ignore_index=-100)


@pytest.fixture(scope="module")
def reference():
    """{"losses", "norms", "lrs", "validation" (after each step), "weights"} of a loop without engine, accumulation or Lightning."""
    model = Llama(ARCHITECTURE).double()
    model.load_state_dict(initial_weights())
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    batches = StepBatches(TRAIN, micro_batch_size=GLOBAL_BATCH, accumulate=1, seed=3)
    run = {"losses": [], "norms": [], "lrs": [], "validation": []}
    for epoch in range(2):
        batches.set_epoch(epoch)
        for (micro,) in batches:
            if len(run["losses"]) == TOTAL_STEPS:
                break
            optimizer.zero_grad()
            run["lrs"].append(OPTIMIZER.lr * lr_factor(SCHEDULE, len(run["losses"]), TOTAL_STEPS))
            for group in optimizer.param_groups:
                group["lr"] = run["lrs"][-1]
            loss = loss_sum(model, micro) / micro["trained_tokens"]
            loss.backward()
            run["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip).item())
            optimizer.step()
            run["losses"].append(loss.item())
            with torch.no_grad():
                (whole,) = EvalBatches(VALIDATION, micro_batch_size=len(VALIDATION))
                run["validation"].append(loss_sum(model, whole).item() / whole["trained_tokens"])
    return run | {"weights": {name: parameter.detach() for name, parameter in model.named_parameters()}}


class Watch(Callback):
    """What callbacks see after each step and validation."""

    def __init__(self) -> None:
        self.losses, self.norms, self.lrs, self.steps, self.validation = [], [], [], [], {}
        self.sigterm_handlers = set()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(pl_module.last_stats.loss.item())
        self.norms.append(pl_module.last_stats.grad_norm.item())
        self.lrs.append(pl_module.lr)
        self.steps.append(trainer.global_step)
        self.sigterm_handlers.add(signal.getsignal(signal.SIGTERM))

    def on_validation_end(self, trainer, pl_module) -> None:
        assert trainer.global_step not in self.validation, "validated twice after one step"
        self.validation[trainer.global_step] = pl_module.last_validation


def train(run_dir, micro_batch_size=4, accumulate=1, stage=3, every_n_steps=None, eval_batch=3, validation=VALIDATION, weights=read):
    """One run of the recipes' pieces on this rank."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    config, watch = recipe(stage, every_n_steps), Watch()
    strategy = build_strategy(config, weights)
    trainer = build_trainer(config, strategy, total_steps=TOTAL_STEPS, run_dir=run_dir, callbacks=[watch])
    module = CausalLMModule(ARCHITECTURE, optimizer=OPTIMIZER, schedule=SCHEDULE, total_steps=TOTAL_STEPS)
    place = {"rank": rank, "world_size": world_size}
    batches = StepBatches(
        TRAIN, micro_batch_size=micro_batch_size, accumulate=accumulate, seed=config.seed, total_steps=TOTAL_STEPS, **place
    )
    trainer.fit(module, batches, EvalBatches(validation, micro_batch_size=eval_batch, **place))
    weights = {name: tensor for name, tensor in strategy.engine.full_tensors() if tensor is not None}
    strategy.close()
    return {"weights": weights} | {name: getattr(watch, name) for name in ("losses", "norms", "lrs", "steps", "validation")}


@pytest.mark.parametrize(("micro_batch_size", "accumulate"), [(4, 1), (2, 2), (1, 4)])
def test_p21_the_split_of_a_batch_changes_nothing(micro_batch_size, accumulate, reference, tmp_path):
    got = train(tmp_path, micro_batch_size, accumulate)
    for name in ("losses", "norms", "lrs"):
        assert_close(got[name], reference[name], rtol=1e-10, atol=1e-12)
    assert_close(got["weights"], reference["weights"], rtol=1e-9, atol=1e-11)
    assert got["steps"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_p21_two_ranks_follow_the_same_numbers(stage, reference, tmp_path, ranks):
    for got in ranks(2, train, tmp_path, 1, 2, stage):
        for name in ("losses", "norms", "lrs"):
            assert_close(got[name], reference[name], rtol=1e-10, atol=1e-12)
        assert got["validation"][TOTAL_STEPS] == pytest.approx(reference["validation"][-1], rel=1e-10)
    first, _ = ranks(2, train, tmp_path, 2, 1, stage)
    assert_close(first["weights"], reference["weights"], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("every_n_steps", "steps"), [(None, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_validation_runs_every_n_steps_and_after_the_last_one(every_n_steps, steps, reference, tmp_path):
    got = train(tmp_path, every_n_steps=every_n_steps)["validation"]
    assert list(got) == steps
    assert got == pytest.approx({step: reference["validation"][step - 1] for step in steps}, rel=1e-10)


@pytest.mark.parametrize("eval_batch", [1, 2, 7])
def test_p19_validation_loss_does_not_depend_on_batch_size_or_ranks(eval_batch, reference, tmp_path, ranks):
    expected = pytest.approx(reference["validation"][-1], rel=1e-10)
    assert train(tmp_path, eval_batch=eval_batch)["validation"][5] == expected
    for got in ranks(2, train, tmp_path, 2, 1, 3, None, eval_batch):
        assert got["validation"][5] == expected


def test_p20_validation_without_a_trained_token_is_an_error_and_never_zero(tmp_path):
    with pytest.raises(UserError, match="without a single trained token"):
        train(tmp_path, validation=dataset(3, seed=2, trained=False))


def test_p48_a_loss_that_is_not_finite_ends_the_run_with_the_step_named(tmp_path):
    with pytest.raises(NonFiniteError, match="step 1"):
        train(tmp_path, weights=lambda name, start, stop: read(name, start, stop) * float("inf"))


def test_p15_packs_are_refused_where_the_model_would_not_keep_documents_apart():
    module = CausalLMModule(ARCHITECTURE, optimizer=OPTIMIZER, schedule=SCHEDULE, total_steps=1)
    module.model = torch.nn.Embedding(4, 4)
    packed = {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "labels": None, "trained_tokens": 0, "document_lengths": [[2, 2]]}
    with pytest.raises(UserError, match="Embedding, which does not keep the documents of a pack apart"):
        module.loss_sum(packed)


def test_lightning_installs_no_signal_handlers(tmp_path):
    before, watch = signal.getsignal(signal.SIGTERM), Watch()
    config = recipe()
    trainer = build_trainer(config, build_strategy(config, read), total_steps=1, run_dir=tmp_path, callbacks=[watch])
    module = CausalLMModule(ARCHITECTURE, optimizer=OPTIMIZER, schedule=ScheduleConfig(name="constant"), total_steps=1)
    trainer.fit(module, StepBatches(TRAIN, micro_batch_size=4, accumulate=1))
    assert watch.sigterm_handlers == {before}


def test_only_matrices_and_embeddings_decay():
    module = CausalLMModule(ARCHITECTURE, optimizer=OPTIMIZER, schedule=SCHEDULE, total_steps=1)
    module.configure_model()
    names = {parameter: name for name, parameter in module.model.named_parameters()}
    decayed, spared = module.configure_optimizers().param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert all("norm" in names[parameter] for parameter in spared["params"])
    assert {"model.embed_tokens.weight", "lm_head.weight"} < {names[parameter] for parameter in decayed["params"]}


def test_the_model_is_built_on_the_meta_device():
    module = CausalLMModule(ARCHITECTURE, optimizer=OPTIMIZER, schedule=SCHEDULE, total_steps=1)
    module.configure_model()
    assert all(parameter.is_meta for parameter in module.parameters())
