"""What a path to a model leads to: a run, a checkpoint of ours, of DeepSpeed or of torch, or what `models/locate.py` knows. No torch.

    RUN                          its export, or else its newest whole checkpoint
    RUN/checkpoints/step_500     that checkpoint
    a folder of DeepSpeed        with `latest`, or one of the tags in it
    a folder of torch DCP        with `.metadata` (torch.distributed.checkpoint)

A folder that has config.json and safetensors, or an adapter, is that, whatever else lies in it: the Trainer of transformers puts such files
beside the tag of DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from framework.checkpoint.folder import LATEST, checkpoints_at, pointed, read_index, what_is_missing
from framework.config.errors import Problem, UserError
from framework.config.schema import LlamaConfig
from framework.config.typed import from_dict
from framework.models.architecture import config_from_hf
from framework.models.gguf_format import config_from_gguf, read_contents
from framework.models.locate import ADAPTER_CONFIG, TOKENIZER_FILES, check_path, export_of_run, is_adapter, on_this_machine, read_json

METADATA = ".metadata"
MODEL_STATES, OPTIMIZER_STATES = "*_model_states.pt", "*_optim_states.pt"
CONFIG = "config.json"

Kind = Literal["model", "checkpoint", "deepspeed", "dcp"]


@dataclass(frozen=True)
class Source:
    """What was found. `path`: for `model` what `models/locate.py` understands, else the folder with the checkpoint's files."""

    kind: Kind
    path: str

    @property
    def folder(self) -> Path:
        return Path(self.path).expanduser()

    @property
    def is_foreign(self) -> bool:
        """Weights that bring neither architecture nor tokenizer."""
        return self.kind in ("deepspeed", "dcp")

    @property
    def is_adapter(self) -> bool:
        """Whether it holds an adapter and not a whole model."""
        if self.kind == "checkpoint":
            return read_index(self.folder)["run"].get("recipe", {}).get("peft", {}).get("method") == "lora"
        return self.kind == "model" and is_adapter(self.folder)

    def beside(self, *names: str) -> Path | None:
        """The nearest folder, this or the one above it, that has one of these files: where training programs put a model's description."""
        return next((folder for folder in (self.folder, self.folder.parent) if any((folder / name).is_file() for name in names)), None)


def find_source(path: str, setting: str = "model.path") -> Source:
    """What `path` leads to. Raises UserError for a run or checkpoint that has nothing whole; `check_source` looks at other paths."""
    folder = pointed(Path(path).expanduser(), setting)
    if not folder.is_dir() or (folder / "export").is_dir():
        return Source("model", export_of_run(path, setting))
    if (checkpoint := newest_checkpoint(folder, setting)) is not None:
        return Source("checkpoint", str(checkpoint))
    if is_adapter(folder) or ((folder / CONFIG).is_file() and any(folder.glob("*.safetensors"))):
        return Source("model", path)
    if (folder / METADATA).is_file():
        return Source("dcp", path)
    if (tag := _deepspeed_tag(folder, setting)) is not None:
        return Source("deepspeed", str(tag))
    return Source("model", export_of_run(path, setting))


def check_source(path: str, setting: str = "model.path", *, has_tokenizer: bool = False, has_architecture: bool = False) -> list[Problem]:
    """What is wrong with the model at `path`, without reading weights. `has_...`: whether tokenizer and architecture are said elsewhere."""
    try:
        source = find_source(path, setting)
    except UserError as error:
        return list(error.problems)
    problems = [] if source.kind != "model" else check_path(source.path, setting)
    described = not source.is_foreign or source.beside(CONFIG) is not None
    if has_architecture and described:
        got, expected = f"an architecture beside {setting}={path}", "one of them: weights bring their architecture"
        problems.append(Problem(path="model.arch", got=got, expected=expected, fix="model.arch=null  (or model.path=null)"))
    if not described and not has_architecture:
        got, expected = f"{path}, weights without a {CONFIG}", "the architecture that they belong to"
        fix = f"copy the model's {CONFIG} to {source.folder}  (or model.arch={{hidden_size: ...}} in the recipe)"
        problems.append(Problem(path=setting, got=got, expected=expected, fix=fix))
    if source.is_foreign and not has_tokenizer and source.beside(*TOKENIZER_FILES) is None:
        got, expected = f"{path}, weights without a tokenizer", "a tokenizer: a folder, a .gguf file or a hub name"
        problems.append(Problem(path=setting, got=got, expected=expected, fix="model.tokenizer=/path/to/tokenizer"))
    return problems


def architecture_of(path: str, setting: str = "model.path") -> LlamaConfig | None:
    """What config.json, GGUF metadata or a checkpoint of ours say of the model at `path`; None where nothing does, or not on this machine.

    Raises UserError where they say what our decoder does not have.
    """
    source = find_source(path, setting)
    if source.kind == "checkpoint":
        return from_dict(LlamaConfig, read_index(source.folder)["run"]["architecture"])
    place = source.beside(CONFIG) if source.is_foreign else on_this_machine(source.path, setting)
    if place is None:
        return None
    if place.is_file():
        return config_from_gguf(read_contents(place), str(place))
    if is_adapter(place):
        base = read_json(place / ADAPTER_CONFIG).get("base_model_name_or_path")
        return architecture_of(base, setting) if base else None
    return config_from_hf(read_json(place / CONFIG), str(place / CONFIG))


def newest_checkpoint(folder: Path, setting: str) -> Path | None:
    """The checkpoint in `folder`, or the newest whole one of the run; None where there is none. Raises UserError where none is whole."""
    found = checkpoints_at(folder)
    whole = [checkpoint for checkpoint in found if what_is_missing(checkpoint) is None]
    if found and not whole:
        reasons = "; ".join(f"{checkpoint.name}: {what_is_missing(checkpoint)}" for checkpoint in found)
        raise UserError(Problem(path=setting, got=f"{folder}, which has no whole checkpoint ({reasons})", expected="a whole one"))
    return whole[-1] if whole else None


def _deepspeed_tag(folder: Path, setting: str) -> Path | None:
    """The folder with DeepSpeed's files: this one, or the one that `latest` in it names."""
    if any(folder.glob(MODEL_STATES)) or any(folder.glob(OPTIMIZER_STATES)):
        return folder
    if not (folder / LATEST).is_file():
        return None
    tag = folder / (folder / LATEST).read_text(errors="replace").strip()
    if not any(tag.glob(MODEL_STATES)):
        got, expected = f"{folder}, whose file {LATEST} names {tag.name}, where no {MODEL_STATES} is", "a whole checkpoint"
        raise UserError(Problem(path=setting, got=got, expected=expected))
    return tag
