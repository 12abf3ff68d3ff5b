"""Modules that compute in fp32 inside a model of another data type: norms, the head, a router (`PrecisionConfig.fp32_modules`).

Their parameters are fp32 and lie in buffers of their own. At a module's boundary, tensors that come in are cast to fp32, and what it
returns to the data type that came in (the engine's, where only integers did), so that the modules around it need not know.

Unusual: the head, a linear layer after the last block, keeps its output in fp32, which is what it is put on the list for. A tied matrix is
one parameter: on the list under one name, it is fp32 for all modules that have it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from framework import torch_private
from framework.config.names import name_is_meant
from framework.config.schema import ZeroConfig
from framework.config.suggest import closest
from framework.zero.layout import UnitLayout, find_units, plan_units

Modules = dict[str, nn.Module]
"""By name."""


def find_fp32_modules(module: nn.Module, patterns: Sequence[str]) -> Modules:
    """The modules with parameters that `patterns` mean, those in them, and those that share a parameter with one. Raises ValueError for a
    pattern that means no module."""
    having = {name: inner for name, inner in module.named_modules(remove_duplicate=False) if name and any(True for _ in inner.parameters())}
    chosen: set[str] = set()
    for pattern in patterns:
        meant = {name for name in having if name_is_meant(pattern, name)}
        if not meant:
            words = [word for word in dict.fromkeys(name.rpartition(".")[2] for name in having) if not word.isdigit()]
            near = closest(pattern.rpartition(".")[2], words)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"fp32_modules: got {pattern!r}, expected a module with parameters ({', '.join(words)}){hint}")
        chosen |= {name for name in having if any(name == outer or name.startswith(f"{outer}.") for outer in meant)}
    parameters = parameters_of(having[name] for name in chosen)
    chosen |= {name for name, inner in having.items() if any(id(p) in parameters for p in inner.parameters(recurse=False))}
    return {name: inner for name, inner in having.items() if name in chosen}


def parameters_of(modules: Iterable[nn.Module]) -> set[int]:
    """The `id` of every parameter."""
    return {id(parameter) for module in modules for parameter in module.parameters()}


def guard(module: nn.Module, in_fp32: Modules, units: Collection[str], dtype: torch.dtype) -> list[Boundary]:
    """A boundary around every module of `in_fp32`, those inside others, too: they may be called from elsewhere."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    last = max((index for index, name in enumerate(names) if name.startswith(tuple(f"{unit}." for unit in units))), default=len(names))
    first_names = {id(inner): name for name, inner in reversed(in_fp32.items())}
    boundaries = []
    for name in first_names.values():
        is_head = isinstance(in_fp32[name], nn.Linear) and names.index(name) > last
        inside = any(name.startswith(f"{outer}.") for outer in in_fp32)
        boundaries.append(Boundary(in_fp32[name], torch.float32 if inside else dtype, is_head=is_head))
    return boundaries


def lay_out(module: nn.Module, patterns: Sequence[str], dtype: torch.dtype, zero: ZeroConfig) -> tuple[list[UnitLayout], list[Boundary]]:
    """The layouts of `module`, those of `patterns` in fp32, with boundaries around these; the rest computes in `dtype`."""
    units, in_fp32 = find_units(module), find_fp32_modules(module, patterns)
    layouts = plan_units(module, units, zero=zero, fp32_parameters=parameters_of(in_fp32.values()))
    return layouts, guard(module, in_fp32, units, dtype)


class Boundary:
    """The hooks of one module; made before a unit's own, which then see what comes in and goes out."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, *, is_head: bool) -> None:
        """`dtype`: of what goes out where no tensor of floating point comes in."""
        self._module, self._dtype, self._is_head = module, dtype, is_head
        self._came_in = dtype
        self._handles = [module.register_forward_pre_hook(self._before, with_kwargs=True), module.register_forward_hook(self._after)]

    def __deepcopy__(self, memo: dict) -> Boundary:
        """The copy of a module is an ordinary one: its hooks are of this module and pass it over."""
        return self

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if module is not self._module:  # a deep copy, which is an ordinary module
            return None
        leaves, spec = torch_private.tree_flatten((args, kwargs))
        self._came_in = next((leaf.dtype for leaf in leaves if _is_floating(leaf)), self._dtype)
        return torch_private.tree_unflatten([leaf.float() if _is_floating(leaf) else leaf for leaf in leaves], spec)

    def _after(self, module: nn.Module, args: tuple, out: Any) -> Any:
        if module is not self._module or self._is_head or self._came_in is torch.float32:
            return None
        leaves, spec = torch_private.tree_flatten(out)
        return torch_private.tree_unflatten([leaf.to(self._came_in) if _is_floating(leaf) else leaf for leaf in leaves], spec)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
