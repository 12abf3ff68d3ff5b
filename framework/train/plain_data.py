"""What Lightning puts into a checkpoint, as JSON and named tensors; and back. Nothing is pickled, so nothing that is read can run.

    packed, tensors, problems = pack(state, where='checkpoint["callbacks"]')
    state = unpack(packed, tensors.__getitem__)

Plain data keep their types: numbers (to the bit), text, bytes, tuples, sets, dictionaries with any plain keys, paths, data types, numpy
arrays, OmegaConf containers. A value of any other type is a problem that names its place: it would have to be pickled.

Unusual: what JSON does not have is a dictionary with one key that begins with "!", as in {"!tuple": [1, 2]}.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import AttributeDict
from omegaconf import Container, DictConfig, ListConfig, OmegaConf
from torch import Tensor, nn

from framework.config.errors import Problem, UserError
from framework.models.safetensors_io import DTYPE_NAMES

SEQUENCES = {tuple: "!tuple", set: "!set", frozenset: "!frozenset", torch.Size: "!size"}
MAPPINGS = {dict: "!dict", OrderedDict: "!ordered", Counter: "!counter", AttributeDict: "!attributes"}
TORCH_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
TYPES = {DictConfig: "DictConfig", ListConfig: "ListConfig", AttributeDict: "AttributeDict"}
"""What Lightning notes as the type of hyper-parameters."""


@dataclass(frozen=True)
class Parameter:
    """Stands for a parameter, whose values lie elsewhere under this name."""

    name: str


def pack(state: Any, where: str) -> tuple[Any, dict[str, Tensor], list[Problem]]:
    """(`state` as JSON, the tensors in it by name, what cannot be saved). `where`: what the user would call `state`."""
    packing = _Packing()
    return packing.pack(state, where, ()), packing.tensors, packing.problems


class _Packing:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.problems: list[Problem] = []
        self._open: set[int] = set()
        """Containers that are being packed: none of them may be in itself."""

    def pack(self, value: Any, where: str, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"!float": str(value)}
        if kind is list or kind in SEQUENCES or kind in MAPPINGS:
            return self._container(value, where, path)
        if kind is Parameter:
            return {"!parameter": value.name}
        if isinstance(value, Tensor):
            return self._tensor(value, where, path)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, where, path)
        if kind is bytes:
            return {"!bytes": base64.b64encode(value).decode()}
        if kind is PosixPath:
            return {"!path": str(value)}
        if kind is torch.dtype:
            return {"!dtype": str(value)}
        if isinstance(value, Container):
            return {"!omegaconf": self.pack(OmegaConf.to_container(value, resolve=False), where, path)}
        if isinstance(value, type) and value in TYPES:
            return {"!type": TYPES[value]}
        return self._refuse(where, f"a {kind.__module__}.{kind.__qualname__}", value)

    def _container(self, value: Any, where: str, path: tuple[str, ...]) -> Any:
        if id(value) in self._open:
            return self._refuse(where, f"a {type(value).__name__} that contains itself", value)
        self._open.add(id(value))
        try:
            if type(value) in MAPPINGS:
                return self._mapping(value, where, path)
            items = [self.pack(item, f"{where}[{at}]", (*path, str(at))) for at, item in enumerate(value)]
            return items if type(value) is list else {SEQUENCES[type(value)]: items}
        finally:
            self._open.discard(id(value))

    def _mapping(self, value: dict[Any, Any], where: str, path: tuple[str, ...]) -> Any:
        values = [self.pack(item, f"{where}[{key!r}]", (*path, str(key))) for key, item in value.items()]
        if type(value) is dict and all(type(key) is str and not key.startswith("!") for key in value):
            return dict(zip(value, values, strict=True))
        keys = [self.pack(key, f"a key of {where}", (*path, "keys", str(at))) for at, key in enumerate(value)]
        return {MAPPINGS[type(value)]: list(zip(keys, values, strict=True))}

    def _tensor(self, value: Tensor, where: str, path: tuple[str, ...]) -> Any:
        if type(value) is not Tensor and not isinstance(value, nn.Parameter):
            return self._refuse(where, f"a {type(value).__module__}.{type(value).__qualname__}", value)
        if value.is_meta or value.layout is not torch.strided or value.dtype not in DTYPE_NAMES:
            return self._refuse(where, f"a tensor of {value.dtype}, {value.layout}, on {value.device}", value)
        name = "/".join(path)
        if name in self.tensors:
            name = f"{name}#{len(self.tensors)}"
        self.tensors[name] = value.detach()
        return {"!tensor": name}

    def _array(self, value: np.ndarray | np.generic, where: str, path: tuple[str, ...]) -> Any:
        try:
            tensor = torch.from_numpy(np.array(value, order="C"))
        except TypeError:  # a type of numbers that torch does not have, or objects
            tensor = None
        if tensor is None or tensor.dtype not in DTYPE_NAMES:
            return self._refuse(where, f"a numpy {type(value).__name__} of {value.dtype}", value)
        return {"!array" if isinstance(value, np.ndarray) else "!scalar": self._tensor(tensor, where, path)["!tensor"]}

    def _refuse(self, where: str, got: str, value: Any) -> None:
        if "hyper_parameters" in where or "hparams" in where:
            fix = "self.save_hyperparameters(ignore=[...])"
        elif isinstance(value, nn.Module) or hasattr(value, "state_dict"):
            fix = "its state_dict(), to be loaded in load_state_dict or on_load_checkpoint"
        else:
            fix = "the numbers, text, lists, dicts, tensors and numpy arrays that it can be made from again"
        self.problems.append(Problem(path=where, got=got, expected="plain data: nothing is pickled in a checkpoint", fix=fix))


def unpack(packed: Any, tensor: Callable[[str], Tensor]) -> Any:
    """What `pack` was given. Raises UserError for a type that this version does not know."""
    if isinstance(packed, list):
        return [unpack(item, tensor) for item in packed]
    if not isinstance(packed, dict):
        return packed
    tag = next(iter(packed)) if len(packed) == 1 else ""
    if not tag.startswith("!"):
        return {key: unpack(item, tensor) for key, item in packed.items()}
    content = packed[tag]
    if kind := next((kind for kind, name in SEQUENCES.items() if name == tag), None):
        return kind(unpack(content, tensor))
    if kind := next((kind for kind, name in MAPPINGS.items() if name == tag), None):
        return _mapping_of(kind, ((unpack(key, tensor), unpack(item, tensor)) for key, item in content))
    makers = {
        "!float": float,
        "!parameter": Parameter,
        "!tensor": tensor,
        "!array": lambda name: tensor(name).numpy(),
        "!scalar": lambda name: tensor(name).numpy()[()],
        "!bytes": base64.b64decode,
        "!path": Path,
        "!dtype": TORCH_DTYPES.__getitem__,
        "!omegaconf": lambda inner: OmegaConf.create(unpack(inner, tensor)),
        "!type": lambda name: next(kind for kind, known in TYPES.items() if known == name),
    }
    if tag not in makers:
        expected = "one of those that this version of framework writes"
        raise UserError(Problem(path="checkpoint", got=f"a value of type {tag!r}", expected=expected, fix="a newer version"))
    return makers[tag](content)


def _mapping_of(kind: type, pairs: Iterable[tuple[Any, Any]]) -> Any:
    """Counter and AttributeDict do not take pairs."""
    return kind(dict(pairs)) if kind in (Counter, AttributeDict) else kind(pairs)
