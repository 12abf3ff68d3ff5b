"""Lightning's checkpoints under `ZeroStrategy`: folders `NAME.ckpt/` in the format of `framework/checkpoint/`, which every rank writes its
part of and reads its part from, so that no rank ever holds the whole model.

    load_weights(module, "runs/best.ckpt")        into an ordinary module, also of a script without ranks
    read_checkpoint("runs/best.ckpt")             what Lightning hands to `on_load_checkpoint`: a dict, weights read when they are asked for

Trained and frozen parameters lie in the ranks' files; buffers, and tensors in the states of callbacks and the like, in
`extra.safetensors`; all else is JSON in the index (`plain_data.py`). Files of other strategies and of earlier versions are read, too,
mapped and with `weights_only=True`.

Unusual: while a checkpoint is saved, its `state_dict` holds parameters without values, on every rank; a hook may drop names from it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.core import saving
from torch import Tensor, nn

from framework.checkpoint.folder import INDEX, read_index, replaced_folder
from framework.checkpoint.load import Checkpoint, load_optimizer, restore_random_state
from framework.checkpoint.save import SaveError, save
from framework.config.errors import Problem, UserError
from framework.train.held import sharded_part
from framework.train.plain_data import Parameter, pack, unpack
from framework.zero import ZeroEngine
from framework.zero.load import Read

KEY = "lightning"
"""In the `run` of an index."""
ONE_FILE = "zero-engine-1"
"""What earlier versions wrote into the optimizer's state."""
PARAMETER = "engine_parameter"
"""Attribute of a tensor on the meta device that stands for a parameter."""


# ---- writing
def state_without_parameters(module: nn.Module, sharded: nn.Module, engine: ZeroEngine | None) -> dict[str, Any]:
    """`module.state_dict()` with tensors on the meta device in the place of parameters of `sharded`; `engine`: the one that has it now."""
    names, state = parameter_names(sharded), _state(module, engine)
    own = dict(module.named_parameters(remove_duplicate=False))
    for name, value in state.items():
        if id(value) in names:
            state[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            setattr(state[name], PARAMETER, names[id(value)])
        elif id(own.get(name)) in names:
            got, expected = f"a state_dict() with another {name} than the parameter", "the parameter itself, or nothing of that name"
            raise UserError(Problem(path=type(module).__name__, got=got, expected=expected, fix="super().state_dict(*args, **kwargs)"))
    return dict(state)


def _state(module: nn.Module, engine: ZeroEngine | None) -> dict[str, Any]:
    """`module.state_dict()` with the parameters themselves, which are not read."""
    if engine is None:
        return module.state_dict(keep_vars=True)
    engine.names_only = True
    try:
        return module.state_dict(keep_vars=True)
    finally:
        engine.names_only = False


def parameter_names(sharded: nn.Module) -> dict[int, str]:
    """What an engine calls the parameters of `sharded`, by id."""
    return {id(parameter): name for name, parameter in sharded.named_parameters()}


def write_checkpoint(engine: ZeroEngine, folder: Path, checkpoint: dict[str, Any]) -> None:
    """What `Trainer.save_checkpoint` has collected, and of `engine` what belongs to it. Collective; rank 0's `checkpoint` counts.

    Raises UserError on all ranks where something in it is not plain data or a file could not be written; an earlier checkpoint stays.
    """
    state = dict(checkpoint)
    state["state_dict"] = {
        name: Parameter(getattr(value, PARAMETER)) if hasattr(value, PARAMETER) else value for name, value in state["state_dict"].items()
    }
    packed, tensors, problems = pack(state, "checkpoint") if engine.world.rank == 0 else (None, None, [])
    kept = {value.name for value in state["state_dict"].values() if isinstance(value, Parameter)}
    if engine.world.rank == 0 and folder.is_dir() and not (folder / INDEX).is_file() and any(folder.iterdir()):
        problems.append(Problem(path=str(folder), got="a folder that is no checkpoint", expected="a new name, or that of a checkpoint"))
    problems, kept = engine.world.gather_objects((problems, kept))[0]
    if problems:
        raise UserError(*problems)
    frozen = [
        buffer for buffer in engine.buffers if not buffer.layout.requires_grad and any(slot.name in kept for slot in buffer.layout.slots)
    ]
    try:
        save(engine, folder, run={KEY: packed}, frozen=frozen, extra=tensors, with_optimizer="optimizer_states" in state)
    except SaveError as error:
        expected = "a disk that takes it, and a folder that all ranks see"
        raise UserError(Problem(path=str(folder), got=str(error), expected=expected, fix="ModelCheckpoint(dirpath=...)")) from error


def belongs_to(engine: ZeroEngine, module: nn.Module) -> bool:
    """Whether the engine's parameters are still those of `module`."""
    ours = {id(parameter) for buffer in engine.buffers for parameter in buffer.parameters}
    return ours == {id(parameter) for parameter in sharded_part(module).parameters()}


@torch.no_grad()
def take_over(engine: ZeroEngine) -> None:
    """Give masters the values of their parameters, where the module was given back and its weights have been changed since."""
    for buffer in engine.buffers:
        parameters = {slot.name: parameter for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True)}
        with buffer.rewriting() as masters:
            for piece in buffer.pieces:
                master = masters[piece.shard_start : piece.shard_stop]
                now = parameters[piece.slot.name].reshape(-1)[piece.start : piece.stop].to(master.device)
                changed = now != master.to(now.dtype)
                master[changed] = now[changed].to(master.dtype)


def local_path(path: str | Path) -> Path:
    """Raises UserError for a path on other storage."""
    if not _is_local_file_protocol(path):
        expected = "a folder on a disk that all ranks see: each of them writes its part"
        raise UserError(Problem(path="checkpoint", got=str(path), expected=expected, fix="ModelCheckpoint(dirpath=FOLDER)"))
    return Path(os.path.abspath(str(path).removeprefix("file://")))


# ---- reading
class StoredWeights(MutableMapping[str, Any]):
    """The `state_dict` of a checkpoint folder: a parameter is read each time that it is asked for."""

    def __init__(self, checkpoint: Checkpoint, entries: dict[str, Any]) -> None:
        self.checkpoint, self._entries = checkpoint, entries

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened tensor."""
        value = self._entries[name]
        return self.checkpoint.read(value.name, start, stop) if isinstance(value, Parameter) else _flat(value)[start:stop]

    def shape(self, name: str) -> tuple[int, ...]:
        value = self._entries[name]
        return self.checkpoint.places[value.name].shape if isinstance(value, Parameter) else tuple(value.shape)

    def __getitem__(self, name: str) -> Any:
        value = self._entries[name]
        return self.checkpoint.whole(value.name) if isinstance(value, Parameter) else value

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The dictionary that Lightning knows as a checkpoint. Raises UserError for whatever is missing, damaged or of another kind."""
    folder = _standing(local_path(path))
    if not folder.is_dir():
        return _read_file(folder)
    packed = read_index(folder)["run"].get(KEY) if (folder / INDEX).is_file() else None
    if packed is None:
        expected = "a checkpoint that a Trainer has written under ZeroStrategy"
        raise UserError(Problem(path=str(path), got="a folder of another kind", expected=expected))
    checkpoint = Checkpoint(folder)
    state = unpack(packed, checkpoint.extra)
    state["state_dict"] = StoredWeights(checkpoint, state["state_dict"])
    for of_optimizer in state.get("optimizer_states", ()):
        of_optimizer["checkpoint"] = checkpoint
    return state


def _standing(folder: Path) -> Path:
    """Where it is: a crash may have come when it had given its name away and the new checkpoint had not got it yet."""
    old = replaced_folder(folder)
    return old if not os.path.lexists(folder) and old.is_dir() else folder


def _read_file(file: Path) -> dict[str, Any]:
    """One file of `torch.save`: of another strategy, or of an earlier version of this one."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise UserError(Problem(path=str(file), got="no such file or folder", expected="a checkpoint")) from error
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        got = f"a file that does not load with weights_only=True ({str(error).splitlines()[0]})"
        fix = 'module.load_state_dict(torch.load(PATH, weights_only=False)["state_dict"])  # if you trust it: a pickle can run anything'
        raise UserError(Problem(path=str(file), got=got, expected="tensors and plain data", fix=fix)) from error


def load_weights(module: nn.Module, folder: str | Path, *, strict: bool = True) -> None:
    """Parameters and buffers of a checkpoint into an ordinary `module` of one process. For one on the meta device, they become its own."""
    weights = read_checkpoint(folder)["state_dict"]
    module.load_state_dict(weights, strict=strict, assign=any(parameter.is_meta for parameter in module.parameters()))


def load_state(module: nn.Module, sharded: nn.Module, weights: Mapping[str, Any], strict: bool, base: Read | None) -> Read:
    """Load what is no parameter of `sharded` into `module`; the others are read, by element range, through what comes back.

    `base`: where parameters come from that `weights` does not have and that are on the meta device; only without `strict`.
    """
    names = parameter_names(sharded)
    own = {name: value for name, value in module.state_dict(keep_vars=True).items() if id(value) in names}
    rest = {name: weights[name] for name in weights if name not in own}
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    found = module.load_state_dict(rest, strict=False, **({"assign": True} if on_meta else {}))
    stored = {names[id(value)]: name for name, value in reversed(own.items()) if name in weights}  # a tied one has several names
    missing = [name for name in found.missing_keys if name not in own]
    missing += [name for name, value in own.items() if names[id(value)] not in stored]
    problems = []
    for what, wrong in (("no", missing), ("the unknown", found.unexpected_keys)):
        if strict and wrong:
            some = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            fix = f"{type(module).__name__}.strict_loading = False  # takes what fits"
            problems.append(Problem(path="ckpt_path", got=f"{what} {some}", expected=f"the tensors of {type(module).__name__}", fix=fix))
    for name in stored.values():
        shape = weights.shape(name) if isinstance(weights, StoredWeights) else tuple(weights[name].shape)
        if shape != tuple(own[name].shape):
            problems.append(Problem(path="ckpt_path", got=f"{name} {list(shape)}", expected=f"{list(own[name].shape)}"))
    if problems:
        raise UserError(*problems)
    kept = {names[id(value)]: value.detach().clone() for value in own.values() if names[id(value)] not in stored and not value.is_meta}

    def read(name: str, start: int, stop: int) -> Tensor:
        if name in stored and isinstance(weights, StoredWeights):
            return weights.read(stored[name], start, stop)
        if name in stored:
            return _flat(weights[stored[name]])[start:stop]
        if name in kept:
            return _flat(kept[name])[start:stop]
        if base is not None:
            return base(name, start, stop)
        raise UserError(Problem(path="ckpt_path", got=f"no {name}", expected="it, for a module on the meta device"))

    return read


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)


def restore_optimizer(engine: ZeroEngine, module: nn.Module, sharded: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Optimizer state, the options of its groups, step count and, with as many ranks as have saved, torch's generators."""
    states = checkpoint["optimizer_states"]
    if len(states) == 1 and isinstance(states[0].get("checkpoint"), Checkpoint):
        stored, groups = states[0]["checkpoint"], states[0]["param_groups"]
        if len(groups) != len(engine.optimizer.param_groups):
            got, expected = f"{len(groups)} param groups", f"the {len(engine.optimizer.param_groups)} of configure_optimizers"
            raise UserError(Problem(path=str(stored.folder), got=got, expected=expected))
        load_optimizer(engine, stored, groups)
        restore_random_state(stored, engine)
    elif len(states) == 1 and states[0].get("format") == ONE_FILE:
        names = parameter_names(sharded)
        weights = checkpoint["state_dict"]
        masters = {names[id(value)]: weights[name] for name, value in _state(module, engine).items() if id(value) in names}
        engine.load_state_dict({"model": masters, **states[0]})
    else:
        got, expected = "a checkpoint with optimizer state of another strategy", "one written under ZeroStrategy"
        fix = 'model.load_state_dict(torch.load(PATH)["state_dict"]); trainer.fit(model)  # weights only'
        raise UserError(Problem(path="fit(ckpt_path=)", got=got, expected=expected, fix=fix))


# ---- LightningModule.load_from_checkpoint
def _reads_folders(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load`, which knows files only, for folders of ours, too."""

    @wraps(load)
    def read(path: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(path, str | Path) and _is_local_file_protocol(path) and (_standing(local_path(path)) / INDEX).is_file():
            return read_checkpoint(path)
        return load(path, *arguments, **options)

    return read


saving.pl_load = _reads_folders(saving.pl_load)
