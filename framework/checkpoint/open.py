"""Opening whatever a path leads to as weights to train from, to export and to ask: `Pretrained`, by element range.

    model = open_model("RUN/checkpoints/step_500")      or a run, a folder of DeepSpeed or of torch DCP, a Hugging Face folder, GGUF, ...
    model.read("model.norm.weight", 0, 16)              fp32 masters of a checkpoint, whatever ranks and stage have written them

Weights of DeepSpeed and DCP are matched with the architecture by name, after wrappers (`module.`, `_orig_mod.`) and one prefix are taken
off. What an export of a checkpoint needs beside the weights (tokenizer, stop tokens), the checkpoint remembers: `for_export`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from framework.checkpoint.load import Checkpoint
from framework.checkpoint.source import CONFIG, Source, check_source, find_source
from framework.config.errors import Problem, UserError
from framework.config.schema import LlamaConfig, ModelConfig, PeftConfig
from framework.config.typed import from_dict
from framework.models.adapter import AdaptedModel, open_adapted
from framework.models.architecture import config_from_hf, parameter_shapes
from framework.models.locate import TOKENIZER_FILES, is_adapter, read_json
from framework.models.pretrained import Pretrained, check_tensors, open_pretrained, token_ids_of
from framework.models.safetensors_io import DTYPES, Entry
from framework.models.targets import adapter_shapes

WRAPPERS = {"module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Words that DDP, torch.compile, DeepSpeed under Lightning, FSDP and activation checkpointing put into names."""
PREFIXES = {"model", "state_dict"}
"""Words that may come before a name: the attribute or the key that the model was saved under."""
ANCHOR = "model.embed_tokens.weight"
DIGEST_ELEMENTS = 64


class ForeignWeights(Protocol):
    """Named tensors of a checkpoint that says nothing about their architecture."""

    folder: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    only_parameters: bool
    """Whether every name is that of a parameter."""

    def describe(self) -> str: ...

    def read(self, name: str, start: int, stop: int) -> Tensor: ...

    def places(self, name: str) -> list[str]: ...

    def check(self) -> tuple[int, list[str]]: ...


def open_model(path: str, setting: str = "model.path", arch: LlamaConfig | None = None) -> Pretrained:
    """The weights that `path` leads to. `arch`: the architecture of weights that do not bring it.

    Raises UserError for whatever is missing, broken, foreign or unsupported.
    """
    source = find_source(path, setting)
    if source.kind == "checkpoint":
        checkpoint = Checkpoint(source.folder)
        return _adapted(checkpoint) if source.is_adapter else TrainedModel(checkpoint)
    if source.is_foreign:
        if problems := check_source(path, setting, has_tokenizer=True, has_architecture=arch is not None):
            raise UserError(*problems)
        return ForeignModel(open_weights(source), source, arch)
    if is_adapter(source.folder):
        return open_adapted(source.folder, open_model)
    return open_pretrained(source.path, setting)


def open_weights(source: Source) -> ForeignWeights:
    """The tensors of a DeepSpeed or DCP folder, as they are called there."""
    if source.kind == "dcp":
        from framework.checkpoint.dcp import DCPWeights  # torch.distributed.checkpoint is needed for such folders only

        return DCPWeights(source.folder)
    from framework.checkpoint.deepspeed import DeepSpeedWeights

    return DeepSpeedWeights(source.folder)


# ---- our own checkpoints
def for_export(model: ModelConfig, pretrained: Pretrained | None, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """What a checkpoint remembers, so that a model can be made of it anywhere on this machine."""
    tokenizer = tokenizer_config(model, pretrained)
    paths = {key: getattr(tokenizer, key) for key in ("path", "tokenizer", "chat_template")}
    return {
        "base": None if model.path is None else _absolute(model.path),
        "tokenizer": {key: _absolute(path) for key, path in paths.items() if path is not None},
        "stop_token_ids": list(stop_token_ids),
        "generation_config": pretrained.generation_config if pretrained else {},
    }


def tokenizer_config(model: ModelConfig, pretrained: Pretrained | None) -> ModelConfig:
    """What `load_tokenizer` needs for a recipe's `model`: its own tokenizer, or that of the weights it starts from."""
    if model.tokenizer is not None or pretrained is None:
        return model
    found = pretrained.tokenizer
    return found if model.chat_template is None else dataclasses.replace(found, chat_template=model.chat_template)


def digest_of(pretrained: Pretrained) -> str:
    """Of some elements of each tensor: enough to tell models apart, and quick."""
    digest = hashlib.sha256()
    for name, shape in pretrained.names().items():
        digest.update(name.encode())
        digest.update(pretrained.read(name, 0, min(DIGEST_ELEMENTS, shape.numel())).float().numpy())
    return digest.hexdigest()


class TrainedModel:
    """A checkpoint of a run that trained all parameters: `Pretrained`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config, remembered = _remembered(checkpoint)
        self._checkpoint = checkpoint
        self._shapes = {name: torch.Size(shape) for name, shape in parameter_shapes(self.config).items()}
        _check_names(checkpoint, self._shapes)
        self.tokenizer = ModelConfig(**remembered["tokenizer"])
        self.generation_config = _with_stops(remembered["generation_config"], remembered["stop_token_ids"])

    def names(self) -> dict[str, torch.Size]:
        return self._shapes

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._checkpoint.read(name, start, stop)


class CheckpointAdapter:
    """The adapter that a checkpoint of a run with `peft=lora` holds: `LoraTensors`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.architecture, remembered = _remembered(checkpoint)
        self._checkpoint = checkpoint
        self.config = from_dict(PeftConfig, checkpoint.run["recipe"]["peft"])
        self.shapes = adapter_shapes(self.architecture, self.config)
        _check_names(checkpoint, self.shapes)
        self.base_path: str = remembered["base"]
        self.tokenizer = ModelConfig(**remembered["tokenizer"])
        self.generation_config = _with_stops(remembered["generation_config"], remembered["stop_token_ids"])

    def whole(self, name: str) -> Tensor | None:
        shape = self.shapes.get(name)
        return None if shape is None else self._checkpoint.read(name, 0, prod(shape)).view(shape)


def _adapted(checkpoint: Checkpoint) -> AdaptedModel:
    """The adapter of `checkpoint` on the model that it was trained on. Raises UserError where that is another one now."""
    adapter = CheckpointAdapter(checkpoint)
    base = open_model(adapter.base_path, f"{checkpoint.folder}: the model that its adapter was trained on")
    if digest_of(base) != checkpoint.run["frozen"]:
        got = f"{adapter.base_path}, whose weights are not those that the adapter was trained on"
        raise UserError(Problem(path=str(checkpoint.folder), got=got, expected="the model as it was then"))
    return AdaptedModel(adapter, base, adapter.tokenizer, adapter.generation_config)


def _with_stops(generation_config: Mapping[str, Any], stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """P10: generation stops at the tokens that training taught as ends, too."""
    stops = list(dict.fromkeys([*token_ids_of(generation_config.get("eos_token_id")), *stop_token_ids]))
    return {**generation_config, "eos_token_id": stops} if stops else dict(generation_config)


def _remembered(checkpoint: Checkpoint) -> tuple[LlamaConfig, dict[str, Any]]:
    run = checkpoint.run
    if missing := [key for key in ("architecture", "recipe", "export", "frozen") if key not in run]:
        got = f"no {', '.join(missing)} in {checkpoint.folder / 'index.json'}"
        raise UserError(Problem(path=str(checkpoint.folder), got=got, expected="a checkpoint that `framework train` has saved"))
    return from_dict(LlamaConfig, run["architecture"]), run["export"]


def _check_names(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    found = {name: place.shape for name, place in checkpoint.places.items()}
    wanted = {name: tuple(shape) for name, shape in shapes.items()}
    if found != wanted:
        name = min(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        got, expected = f"{name} {found.get(name, 'missing')}", f"{wanted.get(name, 'no such parameter')}, as its architecture says"
        raise UserError(Problem(path=str(checkpoint.folder), got=got, expected=expected))


def _absolute(path: str) -> str:
    """A local path from the root on; other notations as they are."""
    local = Path(path).expanduser()
    return str(local.absolute()) if local.exists() else path


# ---- checkpoints of DeepSpeed and DCP
class ForeignModel:
    """Weights of another trainer under our names: `Pretrained`."""

    def __init__(self, weights: ForeignWeights, source: Source, arch: LlamaConfig | None) -> None:
        self._weights = weights
        described = source.beside(CONFIG)
        self.config = arch if described is None else config_from_hf(read_json(described / CONFIG), str(described / CONFIG))
        self._shapes = {name: torch.Size(shape) for name, shape in parameter_shapes(self.config).items()}
        self._theirs = _our_names(weights)
        entries = {ours: _entry(weights, theirs) for ours, theirs in self._theirs.items()}
        check_tensors(entries, self._shapes, self.config, weights.folder, "model.arch" if described is None else CONFIG)
        self.tokenizer = ModelConfig(tokenizer=str(source.beside(*TOKENIZER_FILES) or weights.folder))
        generation = (described or weights.folder) / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}

    def names(self) -> dict[str, torch.Size]:
        return self._shapes

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._weights.read(self._theirs[name], start, stop)


def _our_names(weights: ForeignWeights) -> dict[str, str]:
    """Our name -> theirs, of the tensors that belong to the model. Raises UserError where no name or several fit."""
    plain: dict[str, str] = {}
    for theirs in weights.shapes:
        ours = ".".join(word for word in theirs.split(".") if word not in WRAPPERS)
        if ours in plain:
            got = f"{plain[ours]} and {theirs}, two tensors for {ours}"
            raise UserError(Problem(path=str(weights.folder), got=got, expected="one model"))
        plain[ours] = theirs
    prefixes = [name.removesuffix(ANCHOR) for name in plain if name == ANCHOR or name.endswith(f".{ANCHOR}")]
    prefixes = [prefix for prefix in prefixes if set(prefix.split(".")[:-1]) <= PREFIXES]
    if len(prefixes) != 1:
        some = ", ".join(list(weights.shapes)[:3])
        got = f"{len(prefixes)} tensors that could be {ANCHOR} (the first of {len(plain)}: {some})"
        raise UserError(Problem(path=str(weights.folder), got=got, expected="one model with the names of Hugging Face's Llama family"))
    (prefix,) = prefixes
    if weights.only_parameters or prefix:
        return {name.removeprefix(prefix): theirs for name, theirs in plain.items() if weights.only_parameters or name.startswith(prefix)}
    return {name: theirs for name, theirs in plain.items() if name.split(".")[0] in ("model", "lm_head")}


def _entry(weights: ForeignWeights, name: str) -> Entry:
    """For `check_tensors`: what a tensor is, not where."""
    dtype = getattr(torch, weights.dtypes[name], None)
    known = dtype if dtype in DTYPES.values() else None
    return Entry(file=weights.folder, dtype=known, dtype_name=weights.dtypes[name], shape=weights.shapes[name], offset=0)
