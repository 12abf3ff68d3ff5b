"""Reading pretrained weights by element range, and writing Hugging Face folders tensor by tensor.

`open_pretrained` opens a Hugging Face folder or a GGUF file. All names, shapes and dtypes are checked against the architecture then, from
the files' headers alone, so that a missing shard or a foreign tensor is found before anything is loaded. `read` fetches the elements that
a rank owns and no others.

Unusual: `write_pretrained` writes each file's header first, since the architecture says all shapes, then tensors in whatever order they
come; no more than one is ever held. The folder appears under its name when it is complete and on the disk, not before.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from framework.config.errors import Problem, UserError
from framework.config.schema import LlamaConfig, ModelConfig
from framework.disk import sync
from framework.models.architecture import config_from_hf, config_to_hf, parameter_shapes
from framework.models.locate import check_folder_or_file, is_adapter, read_json, resolve
from framework.models.safetensors_io import DTYPES, Entry, RangeReader, StreamWriter, read_header
from framework.progress import progress

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LEGACY_BUFFER = ".rotary_emb.inv_freq"
"""Old Llama folders carry this constant; every implementation computes it."""
MOST_NAMED = 8
"""Tensors listed in one message."""


ExportDtype = Literal["float32", "bfloat16", "float16"]


class Pretrained(Protocol):
    """Weights on disk that a `Llama(config)` can be filled from."""

    config: LlamaConfig
    tokenizer: ModelConfig
    """What `load_tokenizer` finds the model's tokenizer by."""
    generation_config: dict
    """Content of `generation_config.json`; empty where there is none."""

    def names(self) -> dict[str, torch.Size]:
        """Shape of every parameter of `Llama(config)`, in module order; a tied `lm_head.weight` is left out."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements start:stop of the flattened parameter `name`, 1-D on the CPU, in the dtype of the file (GGUF: fp32)."""


def open_pretrained(path: str | Path, setting: str = "model.path") -> Pretrained:
    """Open what `path` names (see `locate.resolve`). Raises UserError for whatever is missing, broken, foreign or unsupported."""
    local = resolve(str(path), setting)
    check_folder_or_file(local, setting, weights=True)
    if local.is_file():
        from framework.models.gguf import GGUFModel  # numpy and the gguf package are needed for such files only

        return GGUFModel(local)
    if is_adapter(local):
        from framework.models.adapter import open_adapted

        return open_adapted(local)
    return HuggingFaceFolder(local)


def load_weights(model: nn.Module, pretrained: Pretrained, *, show: bool = True) -> None:
    """Fill every parameter of `model`, which must be allocated, whole; their dtypes and devices stay."""
    parameters = dict(model.named_parameters())
    shapes = pretrained.names()
    assert parameters.keys() == shapes.keys(), parameters.keys() ^ shapes.keys()
    with torch.no_grad():
        for name, shape in progress(shapes.items(), "loading weights", unit="tensors", show=show):
            parameters[name].copy_(pretrained.read(name, 0, shape.numel()).view(shape))


class HuggingFaceFolder:
    """A folder with `config.json` and safetensors, single or sharded."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = ModelConfig(tokenizer=str(folder))
        self.config = config_from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
        generation = folder / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}
        self._shapes = {name: torch.Size(shape) for name, shape in parameter_shapes(self.config).items()}
        self._entries = _find_tensors(folder)
        check_tensors(self._entries, self._shapes, self.config, folder)
        self._reader = RangeReader()

    def names(self) -> dict[str, torch.Size]:
        return self._shapes

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._reader.read(self._entries[name], start, stop)


def _find_tensors(folder: Path) -> dict[str, Entry]:
    """Every tensor of the folder's weights: those of the index, or of `model.safetensors`, or of the only safetensors file."""
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict):
            raise UserError(Problem(path=str(folder / INDEX), got="no weight_map", expected='{"weight_map": {TENSOR: FILE}}'))
        files = sorted(set(index.values()))
        absent = [file for file in files if not (folder / file).is_file()]
        if absent:
            got = f"{len(absent)} of {len(files)} files of {INDEX} are missing: {_list(absent)}"
            raise UserError(Problem(path=str(folder), got=got, expected="all of them", fix="download or copy them again"))
        entries = {name: entry for file in files for name, entry in read_header(folder / file).items()}
        lost = [f"{name} (in {file})" for name, file in index.items() if name not in entries or entries[name].file.name != file]
        if lost:
            got = f"tensors that are not in the file it names: {_list(lost)}"
            raise UserError(Problem(path=str(folder / INDEX), got=got, expected="an index of these files"))
        return entries
    candidates = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if len(candidates) != 1:
        got = f"{len(candidates)} files ({_list([file.name for file in candidates])}) and no {INDEX}"
        raise UserError(Problem(path=str(folder), got=got, expected=f"{SINGLE}, or shards with {INDEX}"))
    return read_header(candidates[0])


def check_tensors(
    entries: dict[str, Entry], shapes: dict[str, torch.Size], config: LlamaConfig, folder: Path, described_by: str = "config.json"
) -> None:
    """P28: the tensors are those of the architecture, no more and no fewer, with their shapes, in a floating-point type."""
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    found = {name for name in entries if name not in ignored and not name.endswith(LEGACY_BUFFER)}
    wanted = f"the {len(shapes)} tensors of {config.family} as {described_by} describes it"
    problems = []
    if missing := [name for name in shapes if name not in found]:
        problems.append(Problem(path=str(folder), got=f"{len(missing)} tensors are missing: {_list(missing)}", expected=wanted))
    if unexpected := sorted(found - shapes.keys()):
        problems.append(Problem(path=str(folder), got=f"{len(unexpected)} unexpected tensors: {_list(unexpected)}", expected=wanted))
    for name in sorted(found & shapes.keys()):
        entry = entries[name]
        if entry.shape != tuple(shapes[name]):
            got = f"{name} of shape {list(entry.shape)}"
            problems.append(Problem(path=str(entry.file), got=got, expected=f"{list(shapes[name])}, from {described_by}"))
        elif entry.dtype is None:
            got = f"{name} of type {entry.dtype_name}"
            problems.append(Problem(path=str(entry.file), got=got, expected="one of " + ", ".join(DTYPES)))
    if problems:
        raise UserError(*problems[:MOST_NAMED])


def _list(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def write_pretrained(
    folder: str | Path,
    config: LlamaConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: ExportDtype,
    tokenizer=None,
    stop_token_ids: Sequence[int] = (),
    generation_config: dict | None = None,
    max_shard_bytes: int = 5_000_000_000,
    show: bool = True,
) -> Path:
    """Write `folder` so that transformers 4 and 5 load it: weights, configuration, tokenizer and chat template.

    `tensors` yields every parameter of `Llama(config)` once, in any order (tied ones under their first name). `generation_config` is that
    of the model trained from; its eos list gains the tokenizer's stop tokens and `stop_token_ids`. Raises UserError when `folder` is in
    the way, ValueError when a tensor is missing, unknown, repeated or of another shape (P28); then nothing is left behind.
    """
    folder = Path(folder)
    with new_folder(folder) as partial:
        _write_weights(partial, config, tensors, getattr(torch, dtype), max_shard_bytes, show)
        write_description(partial, config, dtype, tokenizer, stop_token_ids, generation_config or {})
    return folder


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` when all of it is on the disk; after an exception nothing is left behind.

    Raises UserError when `folder` is in the way or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(Problem(path=str(folder), got="something that exists", expected="a new folder to export to"))
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        _sync_folder(partial)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(Problem(path=str(folder), got=str(error), expected="a folder on a disk with room for the model")) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(folder.parent)


def _write_weights(
    folder: Path, config: LlamaConfig, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, max_shard_bytes: int, show: bool
) -> None:
    shapes = parameter_shapes(config)
    shards = _plan_shards(shapes, dtype, max_shard_bytes)
    with contextlib.ExitStack() as opened:
        writer_of: dict[str, StreamWriter] = {}
        for file, names in shards.items():
            writer = StreamWriter(folder / file, {name: (shapes[name], dtype) for name in names})
            opened.callback(writer.close)
            writer_of |= dict.fromkeys(names, writer)
        written: set[str] = set()
        for name, tensor in progress(tensors, "writing weights", total=len(shapes), unit="tensors", show=show):
            if name not in shapes or name in written:
                raise ValueError(f"{name} is {'repeated' if name in written else 'not a parameter of this architecture'}")
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, the architecture says {list(shapes[name])}")
            check_fits(name, tensor, dtype)
            writer_of[name].write(name, tensor)
            written.add(name)
        if missing := [name for name in shapes if name not in written]:
            raise ValueError(f"{len(missing)} parameters were not given: {_list(missing)}")
    if len(shards) > 1:
        total_bytes = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize
        weight_map = {name: file for file, names in shards.items() for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def check_fits(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raises UserError where values of `tensor` would become infinite."""
    if dtype == torch.float16 and tensor.abs().max() > torch.finfo(dtype).max:
        got = f"float16, which cannot hold {name} (up to {tensor.abs().max():.3g})"
        raise UserError(Problem(path="checkpoint.export_dtype", got=got, expected="bfloat16 or float32"))


def _plan_shards(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, max_shard_bytes: int) -> dict[str, list[str]]:
    """File name -> its tensors, in module order, each file as full as it may be."""
    groups: list[list[str]] = [[]]
    filled_bytes = 0
    for name, shape in shapes.items():
        tensor_bytes = prod(shape) * dtype.itemsize
        if groups[-1] and filled_bytes + tensor_bytes > max_shard_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(name)
        filled_bytes += tensor_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": names for number, names in enumerate(groups, start=1)}


def write_description(
    folder: Path, config: LlamaConfig, dtype: ExportDtype, tokenizer, stop_token_ids: Sequence[int], generation_config: dict
) -> None:
    """Everything beside the weights: config.json, tokenizer, chat template and generation_config.json."""
    token_ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")}
    write_json(folder / "config.json", config_to_hf(config, dtype=dtype, token_ids=token_ids))
    write_tokenizer(folder, tokenizer, stop_token_ids, generation_config)


def write_tokenizer(folder: Path, tokenizer, stop_token_ids: Sequence[int], generation_config: dict) -> None:
    """The tokenizer's files, and generation_config.json with the tokens at which an answer stops."""
    stops = token_ids_of(generation_config.get("eos_token_id"))
    if tokenizer is not None:
        from framework.models import tokenizer as tokenizers  # transformers is needed for this only

        tokenizers.save_tokenizer(tokenizer, folder)
        stops += tokenizers.stop_token_ids(tokenizer)
    stops = list(dict.fromkeys([*stops, *stop_token_ids]))
    kept = {key: value for key, value in generation_config.items() if key != "transformers_version"}
    token_ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")}
    known = {key: value for key, value in token_ids.items() if value is not None}
    write_json(folder / "generation_config.json", {**known, **kept, "eos_token_id": stops or None})


def token_ids_of(eos: int | list[int] | None) -> list[int]:
    """The `eos_token_id` of a generation config, which may be none, one or several."""
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def write_json(file: Path, data: dict) -> None:
    file.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync_folder(folder: Path) -> None:
    for file in folder.iterdir():
        sync(file)
    sync(folder)
