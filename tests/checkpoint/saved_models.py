"""Checkpoints of models without a training: what a run would have saved before its first step."""

from __future__ import annotations

from pathlib import Path

import torch

from framework.checkpoint.open import for_export, open_model
from framework.checkpoint.save import save
from framework.config.schema import ModelConfig, RecipeConfig, ZeroConfig
from framework.config.typed import to_dict
from framework.models.llama import Llama
from framework.zero import ZeroEngine
from tests.models.families import byte_tokenizer, save_oracle

STOP = 65
"""A token that the tokenizer does not end answers with, as a template of a recipe may teach it."""


def hugging_face(family: str, folder: Path, **options) -> Path:
    """A folder that transformers has written."""
    save_oracle(family, folder, **options)
    byte_tokenizer().save_pretrained(folder)
    return folder


def engine_from(path: Path, stage: int) -> ZeroEngine:
    pretrained = open_model(str(path))
    with torch.device("meta"):
        model = Llama(pretrained.config)
    return ZeroEngine(model, ZeroConfig(stage=stage), read=pretrained.read)


def checkpoint_of(path: Path, folder: Path, stage: int) -> None:
    """The checkpoint `folder` of a run that starts from `path`. Collective."""
    pretrained, model = open_model(str(path)), ModelConfig(path=str(path))
    run = {
        "recipe": to_dict(RecipeConfig(model=model)),
        "architecture": to_dict(pretrained.config),
        "frozen": None,
        "export": for_export(model, pretrained, [STOP]),
    }
    save(engine_from(path, stage), folder, run=run)


def masters_of(path: Path, stage: int) -> dict[str, torch.Tensor | None]:
    """What an engine that starts from `path` holds. Collective; on rank 0."""
    return dict(engine_from(path, stage).full_tensors())
