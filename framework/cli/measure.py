"""What one rank of `framework eval` does: data, model, validation. Rank 0 leaves the result for the command that has started the ranks.

The same pieces as in training, without an optimizer: data with their masks, the sharded model, the sums over all ranks.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from framework.checkpoint.open import open_model, tokenizer_config
from framework.cli.eval import RESULT
from framework.cli.fit import choose_kernels, facts_of, prepare_once, validation_batches
from framework.config.errors import UserError
from framework.config.schema import RecipeConfig
from framework.models.selection import no_modules
from framework.models.tokenizer import load_tokenizer
from framework.plan.plan import check_data
from framework.ranks import launched
from framework.train.callbacks.failure import FailureReporter
from framework.train.callbacks.progress import ValidationBar
from framework.train.module import CausalLMModule
from framework.train.source_loss import SourceLoss, total
from framework.train.trainer import build_strategy, build_trainer


def measure(recipe: RecipeConfig, folder: Path) -> None:
    """Write `folder`/result.json: the loss of `recipe.model` on every source of validation data. Raises UserError."""
    place = launched(os.environ)
    pretrained = open_model(recipe.model.path, "MODEL")
    if problems := list(no_modules("precision.fp32_modules", recipe.precision.fp32_modules, pretrained.config)):
        raise UserError(*problems)
    tokenizer = load_tokenizer(tokenizer_config(recipe.model, pretrained)) if place.local_rank == 0 else None
    prepared = prepare_once(recipe, tokenizer, folder, place)
    check_data(recipe, pretrained.config, [facts_of(prepared.validation)])
    device_type = "cuda" if recipe.trainer.accelerator != "cpu" and torch.cuda.is_available() else "cpu"
    choose_kernels(recipe.kernels, device_type, getattr(torch, recipe.precision.compute_dtype))
    if place.rank == 0:
        print(f"\n{prepared.ledger.table()}\n", flush=True)

    batches = validation_batches(recipe, recipe.trainer.micro_batch_size, prepared, place)
    module = CausalLMModule(pretrained.config, optimizer=recipe.optimizer, schedule=recipe.schedule, total_steps=1)
    strategy = build_strategy(recipe, pretrained.read)
    trainer = build_trainer(recipe, strategy, total_steps=1, run_dir=folder, callbacks=[FailureReporter(folder), ValidationBar()])
    trainer.validate(module, batches, verbose=False)
    if place.rank == 0:
        sources = [_facts(source, samples) for source, samples in zip(module.last_validation_by_source, batches.samples, strict=True)]
        everything = _facts(total(module.last_validation_by_source), sum(batches.samples))
        result = {"model": recipe.model.path, "dtype": recipe.precision.computes_in, **everything, "sources": sources}
        (folder / RESULT).write_text(json.dumps(result, indent=2) + "\n")
    strategy.close()


def _facts(source: SourceLoss, samples: int) -> dict[str, str | int | float]:
    return {
        "source": source.name,
        "samples": samples,
        "trained_tokens": source.trained_tokens,
        "loss": source.loss,
        "perplexity": source.perplexity,
    }
