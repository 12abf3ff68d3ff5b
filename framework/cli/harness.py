"""Hands a model over to the lm-evaluation-harness, the package `lm_eval`: its tasks, its prompts, its marks; nothing of ours.

It reads Hugging Face folders and hub names. A GGUF file or an adapter becomes such a folder first, as `framework export --merge` writes it.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from framework.checkpoint.source import Source, check_source, find_source
from framework.config.errors import Problem, UserError
from framework.models.locate import PACKAGE_SCHEME
from framework.progress import loading_libraries

PACKAGE = "lm_eval"
LARGEST_FILE_BYTES = 5 * 10**9
INSTALL = 'pip install "lm-eval[hf]"'


def evaluate(model: str, tasks: str, limit: int | None, settings: Sequence[str]) -> dict[str, Any]:
    """Print the harness's table and return its results by task. Raises UserError for what can be known before it begins."""
    source, names = _checked(model, tasks, limit, settings)
    with loading_libraries():
        import lm_eval
        import torch
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table

    unknown = [name for name in names if not TaskManager().match_tasks([name])]
    if unknown:
        raise UserError(Problem(path="--tasks", got=", ".join(unknown), expected="tasks of lm-eval (`lm-eval ls tasks` lists them)"))
    with tempfile.TemporaryDirectory(prefix="framework-eval-") as scratch:
        folder = as_folder(source, Path(scratch) / "model")
        results = lm_eval.simple_evaluate(**arguments(folder, names, limit, "cuda" if torch.cuda.is_available() else "cpu"))
    print(make_table(results))
    return results["results"]


def arguments(folder: str, tasks: list[str], limit: int | None, device: str) -> dict[str, Any]:
    """Of `lm_eval.simple_evaluate`. Its batches are as large as fit on a GPU; on a CPU larger ones would gain nothing."""
    return {
        "model": "hf",
        "model_args": {"pretrained": folder, "dtype": "auto"},
        "tasks": tasks,
        "limit": limit,
        "device": device,  # it would take CUDA for granted
        "batch_size": "auto" if device == "cuda" else 1,
    }


def _checked(model: str, tasks: str, limit: int | None, settings: Sequence[str]) -> tuple[Source, list[str]]:
    """(where the model is, names of tasks)"""
    problems: list[Problem] = []
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if importlib.util.find_spec(PACKAGE) is None:
        got = "tasks of the lm-evaluation-harness, which is not installed"
        problems.append(Problem(path="--tasks", got=got, expected=f"the package {PACKAGE}", fix=INSTALL))
    if not names:
        problems.append(Problem(path="--tasks", got=repr(tasks), expected="names of tasks", fix="--tasks hellaswag,arc_easy"))
    if limit is not None and limit < 1:
        problems.append(Problem(path="--limit", got=str(limit), expected="1 or more"))
    if settings:
        got = f"{' '.join(settings)} beside --tasks"
        problems.append(Problem(path="--tasks", got=got, expected="no settings: tasks have data of their own"))
    problems += check_source(model, "MODEL")
    if problems:
        raise UserError(*problems)
    return find_source(model, "MODEL"), names


def as_folder(source: Source, folder: Path) -> str:
    """`source` where the harness reads it as it is, else the new `folder` with the same model."""
    local = source.folder
    if source.kind == "model" and not source.path.startswith(PACKAGE_SCHEME) and not local.is_file() and not source.is_adapter:
        return str(local) if local.exists() else source.path
    with loading_libraries():
        from framework.checkpoint.export import export_weights
        from framework.checkpoint.open import open_model
    export_weights(
        folder, open_model(source.path, "MODEL"), layout="hf", dtype="bfloat16", max_shard_bytes=LARGEST_FILE_BYTES, tokenizer=None
    )
    return str(folder)
