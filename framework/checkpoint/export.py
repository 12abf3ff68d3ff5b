"""From sharded masters to a Hugging Face or adapter folder: unit by unit, so that no process ever holds the whole model.

Every rank takes part in the gathering; rank 0 writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from framework.config.schema import LlamaConfig, PeftConfig
from framework.models.adapter import write_adapter
from framework.models.pretrained import ExportDtype, write_pretrained
from framework.zero import ZeroEngine

Tensors = Iterator[tuple[str, Tensor | None]]


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
