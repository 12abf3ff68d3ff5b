"""From sharded masters to a Hugging Face folder: unit by unit, so that no process ever holds the whole model.

Every rank takes part in the gathering; rank 0 writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from framework.config.schema import LlamaConfig
from framework.models.pretrained import ExportDtype, write_pretrained
from framework.zero import ZeroEngine


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
    tensors = engine.full_tensors()
    if engine.world.rank:
        for _ in tensors:
            pass
        return
    try:
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
    finally:
        for _ in tensors:  # after an error: the other ranks are still gathering
            pass
