"""Did you mean: for a key or an option that does not exist, the one that was probably meant, or nothing.

A suggestion must be likely: the name that another trainer gives to the same setting, the exact last word in another group, or a near
spelling. Where there is none, the message lists what the group has instead of guessing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from framework.config.errors import Problem

NAMES_ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "min_lr": "schedule.min_lr_ratio",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "max_grad_norm": "optimizer.grad_clip",
    "gradient_clip_val": "optimizer.grad_clip",
    "gradient_clipping": "optimizer.grad_clip",
    "clip_grad": "optimizer.grad_clip",
    "warmup": "schedule.warmup_steps",
    "num_warmup_steps": "schedule.warmup_steps",
    "lr_scheduler_type": "schedule.name",
    "lr_scheduler": "schedule.name",
    "scheduler": "schedule",
    "batch_size": "trainer.micro_batch_size",
    "micro_batch": "trainer.micro_batch_size",
    "per_device_train_batch_size": "trainer.micro_batch_size",
    "train_micro_batch_size_per_gpu": "trainer.micro_batch_size",
    "train_batch_size": "trainer.global_batch_size",
    "gradient_accumulation_steps": "trainer.accumulate",
    "accumulate_grad_batches": "trainer.accumulate",
    "grad_accum": "trainer.accumulate",
    "num_train_epochs": "trainer.epochs",
    "num_epochs": "trainer.epochs",
    "max_epochs": "trainer.epochs",
    "n_epochs": "trainer.epochs",
    "total_steps": "trainer.max_steps",
    "num_steps": "trainer.max_steps",
    "train_steps": "trainer.max_steps",
    "gpus": "trainer.devices",
    "num_gpus": "trainer.devices",
    "n_gpus": "trainer.devices",
    "nproc_per_node": "trainer.devices",
    "logging_steps": "trainer.log_every_n_steps",
    "eval_steps": "eval.every_n_steps",
    "val_check_interval": "eval.every_n_steps",
    "limit_val_batches": "eval.max_batches",
    "max_seq_length": "data.max_tokens",
    "max_seq_len": "data.max_tokens",
    "max_length": "data.max_tokens",
    "seq_len": "data.max_tokens",
    "block_size": "data.max_tokens",
    "cutoff_len": "data.max_tokens",
    "context_length": "data.max_tokens",
    "dataset": "data.train",
    "train_file": "data.train",
    "train_path": "data.train",
    "validation_file": "data.validation",
    "val_size": "data.validation_fraction",
    "test_size": "data.validation_fraction",
    "max_samples": "data.max_rows",
    "train_on_inputs": "data.train_on",
    "train_on_prompt": "data.train_on",
    "mask_history": "data.train_on",
    "assistant_only_loss": "data.train_on",
    "dataloader_num_workers": "data.num_workers",
    "preprocessing_num_workers": "data.num_workers",
    "model_name_or_path": "model.path",
    "pretrained_model_name_or_path": "model.path",
    "base_model": "model.path",
    "tokenizer_name": "model.tokenizer",
    "gradient_checkpointing": "model.activation_checkpointing",
    "cpu_checkpointing": "model.activation_offload",
    "freeze_trainable_layers": "model.train_last_n_blocks",
    "load_in_4bit": "peft.base",
    "load_in_8bit": "peft.base",
    "bnb_4bit_quant_type": "peft.base",
    "quantization_bit": "peft.base",
    "layerwise_lr_decay": "optimizer.layer_lr_decay",
    "llrd": "optimizer.layer_lr_decay",
    "param_groups": "optimizer.groups",
    "torch_compile": "model.compile",
    "bf16": "precision",
    "fp16": "precision",
    "fp32": "precision",
    "dtype": "precision.compute_dtype",
    "torch_dtype": "precision.compute_dtype",
    "mixed_precision": "precision",
    "zero_stage": "zero.stage",
    "zero_hpz_partition_size": "zero.secondary_shard_size",
    "mics_shard_size": "zero.shard_size",
    "hybrid_shard_size": "zero.shard_size",
    "deepspeed": "zero",
    "strategy": "zero",
    "report_to": "logger",
    "run_name": "name",
    "experiment_name": "name",
    "wandb_project": "logger.project",
    "output_dir": "runs_dir",
    "save_dir": "runs_dir",
    "out_dir": "runs_dir",
}
"""What other trainers call our settings: the last word of the key, ours."""

VALUES_ELSEWHERE = {
    "bf16": ("bfloat16",),
    "bf16-mixed": ("bfloat16", "bf16"),
    "bf16-true": ("bfloat16", "bf16"),
    "bfloat16": ("bf16",),
    "fp16": ("bfloat16", "bf16"),
    "16": ("bfloat16", "bf16"),
    "float16": ("bfloat16", "bf16"),
    "fp32": ("float32",),
    "32": ("float32", "fp32"),
    "float32": ("fp32",),
    "fp64": ("float64",),
    "float64": ("fp64",),
    "gpu": ("cuda",),
    "chatml": ("messages",),
    "openai": ("messages",),
    "adam": ("adamw",),
    "null": ("none",),
    "false": ("none",),
    "off": ("none",),
}
"""The same for options and values of a fixed choice: other trainers' word, ours; used where ours is one of the choices."""

UNKNOWN = "a key that does not exist"
"""What was got where there is no such setting."""

WORD_CUTOFF = 0.7
"""Least similarity (difflib ratio) of a last word within the group that was named."""
OPTION_CUTOFF = 0.6
"""The same for an option among the few of a group."""
PATH_CUTOFF = 0.8
"""The same for a last word of another group, and for the name of a group."""


def unknown_key(path: str, known: Mapping[str, Any], value: str = "VALUE", options_of: Mapping[str, list[str]] | None = None) -> Problem:
    """The problem that `path` is not among the `known` paths. `options_of`: groups with their options, for fixes that choose one."""
    meant = suggest_paths(path, known)
    group = path.rpartition(".")[0]
    if meant:
        fix = f"{meant[0]}={_value_for(meant[0], path, value, options_of or {})}"
        return Problem(path=path, got=UNKNOWN, expected=_or(meant), fix=fix)
    here = [key for key in known if key.rpartition(".")[0] == group]
    if group in known and not here:
        expected = f"a value for `{group}`, which has no keys"
        return Problem(path=path, got=UNKNOWN, expected=expected, fix=f"{group}={value}")
    if here:
        return Problem(path=path, got=UNKNOWN, expected=f"one of {', '.join(here)}")
    return Problem(path=path, got=UNKNOWN, expected="a setting that `framework help` lists")


def suggest_paths(path: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Known paths that `path` may have meant, likeliest first."""
    known = list(known)
    group, _, word = path.rpartition(".")
    words: dict[str, list[str]] = {}
    for key in known:
        words.setdefault(key.rpartition(".")[2], []).append(key)
    meant = [key for key in words.get(word, []) if not group or _depth(key) > 1]
    if NAMES_ELSEWHERE.get(word.lower()) in known and not meant:
        meant = [NAMES_ELSEWHERE[word.lower()]]
    if not meant:
        siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == group}
        meant = [siblings[near] for near in difflib.get_close_matches(word, siblings, n=most, cutoff=WORD_CUTOFF)]
    first, _, rest = path.partition(".")
    if not meant and rest:  # the group is misspelt
        for near in difflib.get_close_matches(first, [key for key in known if "." not in key], n=1, cutoff=WORD_CUTOFF):
            if near != first:
                meant = [f"{near}.{rest}"] if f"{near}.{rest}" in known else suggest_paths(f"{near}.{rest}", known)
    if not meant:
        meant = [key for near in difflib.get_close_matches(word, words, n=most, cutoff=PATH_CUTOFF) for key in words[near]]
    return sorted(meant, key=lambda key: key.rpartition(".")[0] != group)[:most]


def closest(word: str, options: Iterable[str], most: int = 3) -> list[str]:
    """Options that `word` may have meant, likeliest first."""
    by_lower = {option.lower(): option for option in options}
    for ours in VALUES_ELSEWHERE.get(word.lower(), ()):
        if ours in by_lower:
            return [by_lower[ours]]
    return [by_lower[near] for near in difflib.get_close_matches(word.lower(), by_lower, n=most, cutoff=OPTION_CUTOFF)]


def _value_for(meant: str, path: str, value: str, options_of: Mapping[str, list[str]]) -> str:
    """The user's own value where it can serve, for a group one of its options."""
    if meant not in options_of:
        return value
    word = path.rpartition(".")[2]
    options = options_of[meant]
    return word if word in options else value if value in options else "|".join(options)


def _or(meant: list[str]) -> str:
    return meant[0] if len(meant) == 1 else f"one of {', '.join(meant)}"


def _depth(key: str) -> int:
    return key.count(".") + 1
