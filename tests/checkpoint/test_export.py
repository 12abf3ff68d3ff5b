"""Exporting from shards: equal to the masters, from any stage, and without leaving other ranks waiting after an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from framework.checkpoint.export import export_folder
from framework.config.errors import UserError
from framework.config.schema import LlamaConfig, PrecisionConfig, ZeroConfig
from framework.models.llama import Llama
from framework.models.pretrained import open_pretrained
from framework.zero import ZeroEngine
from tests.models.families import byte_tokenizer

ARCHITECTURE = LlamaConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    tie_word_embeddings=True,
)


def export(folder: Path, stage: int, dtype: str, max_shard_bytes: int = 10**9) -> tuple[dict[str, torch.Tensor], str | None]:
    with torch.device("meta"):
        model = Llama(ARCHITECTURE)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), PrecisionConfig(compute_dtype="bfloat16"), seed=4)
    error = None
    try:
        export_folder(
            engine, ARCHITECTURE, folder, dtype=dtype, max_shard_bytes=max_shard_bytes, tokenizer=byte_tokenizer(), stop_token_ids=[258]
        )
    except UserError as caught:
        error = str(caught)
    dist.barrier()  # every rank has come back
    return {name: tensor for name, tensor in engine.full_tensors() if tensor is not None}, error


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 40_000])
def test_p26_every_tensor_is_whole_and_equal_to_the_master(ranks, tmp_path, stage: int, max_shard_bytes: int) -> None:
    masters, error = ranks(2, export, tmp_path / "export", stage, "float32", max_shard_bytes)[0]
    assert error is None
    written = open_pretrained(tmp_path / "export")
    assert written.config == ARCHITECTURE
    assert written.names() == {name: tensor.shape for name, tensor in masters.items()}
    for name, tensor in masters.items():
        assert torch.equal(written.read(name, 0, tensor.numel()), tensor.flatten()), name
    assert (len(list((tmp_path / "export").glob("*.safetensors"))) > 1) == (max_shard_bytes < 10**9)


def test_p10_the_trained_stop_token_ends_generation(ranks, tmp_path) -> None:
    ranks(1, export, tmp_path / "export", 3, "bfloat16")
    assert 258 in open_pretrained(tmp_path / "export").generation_config["eos_token_id"]


def test_an_export_that_cannot_be_written_says_so_and_leaves_no_rank_waiting(ranks, tmp_path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "mine.txt").write_text("do not touch")
    results = ranks(2, export, tmp_path / "export", 3, "float32")
    assert "expected a new folder to export to" in results[0][1] and results[1][1] is None
    assert (tmp_path / "export" / "mine.txt").read_text() == "do not touch"
