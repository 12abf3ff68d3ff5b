"""Adapters on disk, in the format of the `peft` package: `adapter_config.json` and `adapter_model.safetensors`.

`write_adapter` writes what training made. `open_adapted` opens such a folder together with the model that it names and gives the merged
weights by element range, like any other pretrained model: to generate with, to export, to train on.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. Tensors are named base_model.model.LAYER.lora_A.weight, .lora_B.weight
and .lora_magnitude_vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from framework.config.errors import Problem, UserError
from framework.config.schema import LlamaConfig, ModelConfig, PeftConfig
from framework.models.locate import ADAPTER_CONFIG, ADAPTER_WEIGHTS, are_different, export_of_run, read_json
from framework.models.lora import merged_rows, scaling
from framework.models.pretrained import Pretrained, new_folder, open_pretrained, write_json, write_tokenizer
from framework.models.safetensors_io import RangeReader, StreamWriter, read_header
from framework.models.targets import adapter_shapes, linear_layers, target_names

PREFIX = "base_model.model."
FILE_NAMES = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}
MOST_NAMED = 5

# Settings of `peft` that change the numbers and that our adapters do not have: key -> the values under which they change nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change the base weights, too
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
    "lora_bias": (False, None),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None, {}),
    "kasa_config": (None, {}),
    "monteclora_config": (None, {}),
    "velora_config": (None, {}),
}


class Adapter:
    """The tensors of an adapter folder by element range, under the names that they have in the module."""

    def __init__(self, folder: Path) -> None:
        settings = read_json(folder / ADAPTER_CONFIG)
        self.folder, self.config = folder, _config_of(settings, folder)
        self.base_path: str | None = settings.get("base_model_name_or_path")
        entries = read_header(folder / ADAPTER_WEIGHTS)
        self._entries = {inner: entry for name, entry in entries.items() if (inner := _inner_name(name)) is not None}
        if unknown := [name for name in entries if _inner_name(name) is None]:
            got = f"{len(unknown)} tensors that belong to no LoRA layer: {', '.join(unknown[:MOST_NAMED])}"
            raise UserError(Problem(path=str(folder / ADAPTER_WEIGHTS), got=got, expected=f"tensors like {PREFIX}LAYER.lora_A.weight"))
        self.layers = sorted({name.rpartition(".")[0] for name in self._entries})
        self._reader = RangeReader()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._reader.read(self._entries[name], start, stop)

    def whole(self, name: str) -> Tensor | None:
        """The tensor, or None where the adapter has none of this name."""
        entry = self._entries.get(name)
        return None if entry is None else self._reader.read(entry, 0, prod(entry.shape)).view(entry.shape)

    def check(self, architecture: LlamaConfig, config: PeftConfig) -> None:
        """Raises UserError unless there are exactly the tensors that `config` means for this architecture."""
        wanted = adapter_shapes(architecture, config)
        found = {name: entry.shape for name, entry in self._entries.items()}
        differing = [name for name in sorted(found.keys() | wanted.keys()) if found.get(name) != wanted.get(name)]
        if differing:
            name = differing[0]
            got = f"{name} of shape {list(found[name])}" if name in found else f"no {name}"
            expected = f"shape {list(wanted[name])}" if name in wanted else "no tensor of this name"
            raise UserError(Problem(path=str(self.folder / ADAPTER_WEIGHTS), got=got, expected=f"{expected}, for this model"))


def open_adapter(config: PeftConfig, architecture: LlamaConfig) -> Adapter:
    """The adapter in `config.path`, to go on training. Raises UserError where its settings are not those of `config`."""
    adapter = Adapter(Path(export_of_run(config.path, "peft.path")).expanduser())
    problems = [
        Problem(path=f"peft.{key}", got=str(mine), expected=f"{its}, as in {adapter.folder}", fix=f"peft.{key}={str(its).lower()}")
        for key in ("rank", "alpha", "rslora", "dora")
        if (mine := getattr(config, key)) != (its := getattr(adapter.config, key))
    ]
    chosen, known = target_names(architecture, config), linear_layers(architecture)
    if set(chosen) != set(adapter.layers) and known.keys() >= set(adapter.layers):  # else it belongs to another model: `check` says so
        its = ",".join(_short_targets(architecture, adapter.layers))
        got, expected = f"[{','.join(config.targets)}]", f"the layers that the adapter in {adapter.folder} is for"
        problems.append(Problem(path="peft.targets", got=got, expected=expected, fix=f'"peft.targets=[{its}]"'))
    if problems:
        raise UserError(*problems)
    adapter.check(architecture, config)
    return adapter


def other_base(config: PeftConfig, model_path: str) -> str | None:
    """The model that the adapter in `config.path` says it was trained on, where that is not the one at `model_path`."""
    folder = Path(export_of_run(config.path, "peft.path")).expanduser()
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    return base if base and are_different(base, model_path) else None


class LoraTensors(Protocol):
    """The tensors of an adapter, under the names that they have in the module."""

    config: PeftConfig

    def whole(self, name: str) -> Tensor | None:
        """The tensor, or None where the adapter has none of this name."""


class AdaptedModel:
    """A pretrained model with an adapter merged into its weights: `Pretrained`. They are those of the original model, also where the
    adapter was trained over what quantising left of them (QLoRA): the two answer alike, not to the last digit."""

    def __init__(self, adapter: LoraTensors, base: Pretrained, tokenizer: ModelConfig, generation_config: dict) -> None:
        self.adapter, self.base, self.config = adapter, base, base.config
        self.tokenizer, self.generation_config = tokenizer, generation_config

    def names(self) -> dict[str, torch.Size]:
        return self.base.names()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Whole rows are merged and the wanted part of them returned, in fp32; other tensors come as they are."""
        layer, _, kind = name.rpartition(".")
        lora_b = self.adapter.whole(f"{layer}.lora_B") if kind == "weight" else None
        if lora_b is None or start == stop:
            return self.base.read(name, start, stop)
        inputs = self.base.names()[name][1]
        first, last = start // inputs, -(-stop // inputs)
        magnitude = self.adapter.whole(f"{layer}.lora_magnitude")
        rows = merged_rows(
            self.base.read(name, first * inputs, last * inputs).view(-1, inputs),
            self.adapter.whole(f"{layer}.lora_A"),
            lora_b[first:last],
            None if magnitude is None else magnitude[first:last],
            scaling(self.adapter.config),
        )
        return rows.flatten()[start - first * inputs : stop - first * inputs]


def open_adapted(folder: Path, open_base: Callable[[str, str], Pretrained] = open_pretrained) -> AdaptedModel:
    """The adapter in `folder` on the model that it names, which `open_base(path, setting)` opens."""
    adapter = Adapter(folder)
    if not adapter.base_path:
        expected = "the model that it was trained on, in base_model_name_or_path"
        raise UserError(Problem(path=str(folder / ADAPTER_CONFIG), got="an adapter of no named model", expected=expected))
    base = open_base(adapter.base_path, f"{folder / ADAPTER_CONFIG}: base_model_name_or_path")
    adapter.check(base.config, dataclasses.replace(adapter.config, targets=adapter.layers))
    has_tokenizer, generation = (folder / "tokenizer.json").is_file(), folder / "generation_config.json"
    return AdaptedModel(
        adapter,
        base,
        ModelConfig(tokenizer=str(folder)) if has_tokenizer else base.tokenizer,
        read_json(generation) if generation.is_file() else base.generation_config,
    )


def write_adapter(
    folder: Path,
    architecture: LlamaConfig,
    config: PeftConfig,
    base_path: str,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    tokenizer=None,
    stop_token_ids: Sequence[int] = (),
    generation_config: dict | None = None,
) -> None:
    """Write the new `folder` so that `peft` loads it on the model at `base_path`. `tensors`: each trained parameter once, in any order.

    Raises UserError when `folder` is in the way, ValueError when a tensor is missing, unknown, repeated or of another shape (P28).
    """
    shapes = adapter_shapes(architecture, config)
    with new_folder(folder) as partial:
        writer = StreamWriter(partial / ADAPTER_WEIGHTS, {_file_name(name): (shape, torch.float32) for name, shape in shapes.items()})
        left = dict(shapes)
        for name, tensor in tensors:
            if tuple(tensor.shape) != left.pop(name, None):
                raise ValueError(f"got {name} {list(tensor.shape)}, expected each of the adapter's parameters once ({shapes.get(name)})")
            writer.write(_file_name(name), tensor)
        if left:
            raise ValueError(f"{len(left)} parameters were not given: {', '.join(list(left)[:MOST_NAMED])}")
        writer.close()
        write_json(partial / ADAPTER_CONFIG, _settings(architecture, config, base_path))
        write_tokenizer(partial, tokenizer, stop_token_ids, generation_config or {})


def _settings(architecture: LlamaConfig, config: PeftConfig, base_path: str) -> dict:
    adapted, local = target_names(architecture, config), Path(base_path).expanduser()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(local.absolute()) if local.exists() else base_path,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": _short_targets(architecture, adapted),
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _short_targets(architecture: LlamaConfig, layers: list[str]) -> list[str]:
    """Last words of names where they mean `layers` and no other, else the whole names."""
    leaves = sorted({name.rpartition(".")[2] for name in layers})
    meant = [name for name in linear_layers(architecture) if name.rpartition(".")[2] in leaves]
    return leaves if len(meant) == len(layers) else layers


def _config_of(settings: dict, folder: Path) -> PeftConfig:
    file = str(folder / ADAPTER_CONFIG)
    if settings.get("peft_type") != "LORA":
        raise UserError(Problem(path=file, got=f"peft_type {settings.get('peft_type')!r}", expected="LORA"))
    problems = [
        Problem(path=file, got=f"{key}: {settings[key]!r}", expected=f"{key}: {values[0]!r}, all that is supported here")
        for key, values in NEUTRAL.items()
        if key in settings and settings[key] not in values
    ]
    if problems:
        raise UserError(*problems)
    return PeftConfig(
        method="lora",
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        rslora=bool(settings.get("use_rslora")),
        dora=bool(settings.get("use_dora")),
    )


def _file_name(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    return f"{PREFIX}{layer}.{FILE_NAMES[kind]}"


def _inner_name(name: str) -> str | None:
    for kind, suffix in FILE_NAMES.items():
        if name.startswith(PREFIX) and name.endswith(f".{suffix}"):
            return f"{name[len(PREFIX) : -len(suffix) - 1]}.{kind}"
    return None
