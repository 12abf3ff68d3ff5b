"""From masters to a folder for others: in a run unit by unit, from files tensor by tensor, so that no process ever holds the whole model.

`export_folder` and `export_adapter` take a running engine: every rank takes part in the gathering, rank 0 writes. `export_weights` and
`export_saved_adapter` take what is on the disk, and one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from framework.checkpoint.open import CheckpointAdapter
from framework.config.schema import LlamaConfig, ModelConfig, PeftConfig
from framework.models.adapter import write_adapter
from framework.models.pretrained import ExportDtype, Pretrained, check_fits, new_folder, write_description, write_pretrained
from framework.models.tokenizer import load_tokenizer
from framework.progress import busy
from framework.zero import ZeroEngine

Tensors = Iterator[tuple[str, Tensor | None]]
Layout = Literal["hf", "dcp"]


def export_folder(
    engine: ZeroEngine,
    architecture: LlamaConfig,
    folder: Path,
    *,
    dtype: ExportDtype,
    max_shard_bytes: int,
    tokenizer: Any,
    stop_token_ids: Sequence[int],
    generation_config: dict[str, Any] | None = None,
) -> None:
    """Write the engine's trained weights to the new `folder`. Collective.

    `tokenizer`, `stop_token_ids` and `generation_config` are needed on rank 0. Raises UserError where the folder cannot be written;
    then it does not exist, and the ranks have all taken part.
    """
    with _on_rank_0(engine, engine.full_tensors()) as tensors:
        if tensors is not None:
            write_pretrained(
                folder,
                architecture,
                tensors,
                dtype=dtype,
                tokenizer=tokenizer,
                stop_token_ids=stop_token_ids,
                generation_config=generation_config,
                max_shard_bytes=max_shard_bytes,
            )


def export_adapter(
    engine: ZeroEngine,
    architecture: LlamaConfig,
    config: PeftConfig,
    base_path: str,
    folder: Path,
    *,
    tokenizer: Any,
    stop_token_ids: Sequence[int],
    generation_config: dict[str, Any] | None = None,
) -> None:
    """Write the trained adapter to the new `folder`, in fp32, as one for the model at `base_path`. Collective, as `export_folder`."""
    with _on_rank_0(engine, engine.full_tensors(trained_only=True)) as tensors:
        if tensors is not None:
            write_adapter(
                folder,
                architecture,
                config,
                base_path,
                tensors,
                tokenizer=tokenizer,
                stop_token_ids=stop_token_ids,
                generation_config=generation_config,
            )


@contextmanager
def _on_rank_0(engine: ZeroEngine, tensors: Tensors) -> Iterator[Tensors | None]:
    """`tensors` on rank 0, which writes them, None on the others; all of them take part to the end, also after an error."""
    try:
        yield None if engine.world.rank else tensors
    finally:
        for _ in tensors:
            pass


def export_weights(
    folder: Path, model: Pretrained, *, layout: Layout, dtype: ExportDtype, max_shard_bytes: int, tokenizer: ModelConfig | None = None
) -> None:
    """Write `model` to the new `folder`, one tensor at a time: as Hugging Face or as torch.distributed.checkpoint with the same
    configuration and tokenizer beside it. `tokenizer`: in place of the model's own. Raises UserError where it cannot be written."""
    loaded = load_tokenizer(tokenizer or model.tokenizer)
    shapes = model.names()

    def read(name: str) -> Tensor:
        return model.read(name, 0, shapes[name].numel()).view(shapes[name])

    if layout == "hf":
        tensors = ((name, read(name)) for name in shapes)
        options = {"dtype": dtype, "tokenizer": loaded, "generation_config": model.generation_config, "max_shard_bytes": max_shard_bytes}
        write_pretrained(folder, model.config, tensors, **options)
        return
    from framework.checkpoint.dcp import write_dcp  # torch.distributed.checkpoint is needed for such folders only

    tied = {"lm_head.weight": "model.embed_tokens.weight"} if model.config.tie_word_embeddings else {}
    named = {name: tuple(shape) for name, shape in shapes.items()} | {alias: tuple(shapes[name]) for alias, name in tied.items()}

    def checked(name: str) -> Tensor:
        tensor = read(tied.get(name, name))
        check_fits(name, tensor, getattr(torch, dtype))
        return tensor

    with new_folder(folder) as partial, busy(f"writing {folder}"):
        write_dcp(partial, checked, named, getattr(torch, dtype))
        write_description(partial, model.config, dtype, loaded, (), model.generation_config)


def export_saved_adapter(folder: Path, adapter: CheckpointAdapter, tokenizer: ModelConfig | None = None) -> None:
    """Write the adapter of a checkpoint to the new `folder`, in fp32, as `export_adapter` does at the end of a run."""
    write_adapter(
        folder,
        adapter.architecture,
        adapter.config,
        adapter.base_path,
        ((name, adapter.whole(name)) for name in adapter.shapes),
        tokenizer=load_tokenizer(tokenizer or adapter.tokenizer),
        generation_config=adapter.generation_config,
    )
