"""Where every parameter lies: units, flat spaces and shards. Pure arithmetic; the only tensors seen here are asked for their shape.

A *unit* is a module whose parameters are gathered and released together: each repeated block is one, the rest belongs to the
root. A *layout* is the flat space of a unit's parameters with one value of `requires_grad` and one data type; offsets are
multiples of `ALIGN` and do **not** depend on the world size: only the padding at the tail does. Resharding is therefore slicing of
intervals, and a piece of a parameter is a contiguous range of its flattened elements.

    unit `layers.3`   | q_proj      | k_proj   | ... | norm |pad|        rank r of N owns [r*S, (r+1)*S), S = shard_numel(N)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import nn

from framework.config.names import is_meant
from framework.config.schema import ZeroConfig
from framework.zero.policy import Policy, policy_of, policy_of_parameter

ALIGN = 256
"""Elements; every parameter starts at a multiple of it, so that blocks of up to 256 elements never straddle two ranks."""
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""What frozen parameters may be besides floating point."""


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a layout."""

    name: str
    shape: torch.Size
    offset: int
    aliases: tuple[str, ...] = ()
    """Further names of the same (tied) parameter."""

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in an interval of the flat space."""

    slot: Slot
    start: int
    """First element, counted in the flattened parameter."""
    stop: int
    shard_start: int
    """First element, counted from the beginning of the interval."""

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def shard_stop(self) -> int:
        return self.shard_start + self.numel


def span(pieces: Sequence[Piece]) -> int:
    """Elements from the beginning of the first of these pieces of a layout to the end of the last one."""
    return pieces[-1].shard_stop - pieces[0].shard_start if pieces else 0


def with_gap(piece: Piece) -> Piece:
    """`piece` and the gap behind it, which is there for the alignment of the next parameter."""
    return replace(piece, stop=piece.start + _align(piece.numel))


@dataclass(frozen=True)
class Layout:
    """The flat space of one unit's parameters that share `requires_grad` and the kind of their values."""

    unit: str
    requires_grad: bool
    slots: tuple[Slot, ...]
    integer: torch.dtype | None = None
    """Data type of integers (codes of a quantised weight), which are frozen and stay what they are; None: floating point, which is held
    in whatever the engine computes in."""
    policy: Policy | None = None
    """Where its state lives; None: where that of most does, which the engine knows."""
    fp32: bool = False
    """Whether they are floating point of modules that compute in fp32 whatever the engine computes in (`fp32_modules.py`)."""

    @property
    def total(self) -> int:
        """Elements, alignment gaps included, padding for the world size not."""
        return self.slots[-1].offset + _align(self.slots[-1].numel)

    @property
    def numel(self) -> int:
        """Elements of the parameters alone."""
        return sum(slot.numel for slot in self.slots)

    def itemsize(self, compute_itemsize: int) -> int:
        """Bytes of an element where floating-point parameters have `compute_itemsize`."""
        if self.fp32:
            return 4
        return compute_itemsize if self.integer is None else self.integer.itemsize

    def shard_numel(self, world_size: int) -> int:
        return _align(-(-self.total // world_size))

    def padded(self, world_size: int) -> int:
        return self.shard_numel(world_size) * world_size

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """What of which parameters lies in [start, stop) of the flat space, in order; gaps and padding belong to none."""
        found = []
        for slot in self.slots:
            low, high = max(start, slot.offset), min(stop, slot.stop)
            if low < high:
                found.append(Piece(slot, low - slot.offset, high - slot.offset, low - start))
        return found


@dataclass(frozen=True)
class UnitLayout:
    """A unit: its module's name (empty for the root) and its layouts."""

    name: str
    layouts: tuple[Layout, ...]


def find_units(module: nn.Module) -> dict[str, nn.Module]:
    """Repeated blocks of `module`, by name: what the outermost containers hold, if it is at least two modules of one class with
    parameters. Blocks do not nest, and are called: a list of lists of layers has layers for blocks, not lists."""
    units: dict[str, nn.Module] = {}

    def visit(parent: nn.Module, prefix: str) -> None:
        children = [(f"{prefix}{name}", child) for name, child in parent.named_children()]
        repeated: set[type] = set()
        if isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            children = list(_called(children))
            counts = Counter(type(child) for _, child in children if _has_parameters(child))
            repeated = {kind for kind, count in counts.items() if count >= 2}
        for name, child in children:
            if type(child) in repeated and _has_parameters(child) and child not in units.values():
                units[name] = child
            else:
                visit(child, f"{name}.")

    visit(module, "")
    return units


def plan_units(
    module: nn.Module,
    units: dict[str, nn.Module] | None = None,
    *,
    zero: ZeroConfig | None = None,
    fp32_parameters: Set[int] = frozenset(),
) -> list[UnitLayout]:
    """Layouts of the root (first) and of every unit, in registration order.

    A parameter that occurs in two units, or in a unit and outside, is owned by the root: the lowest common ancestor. Parameters
    keep module order; one layout holds those that are trained, one those that are frozen, and one the integers of each data type; those
    that `zero` gives another policy have layouts of their own, and those of `fp32_parameters`, by their `id`.
    """
    units = find_units(module) if units is None else units
    owner: dict[int, str] = {}
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        unit = next((u for u in units if name.startswith(f"{u}.")), "")
        key = id(parameter)
        parameters[key] = parameter
        names.setdefault(key, []).append(name)
        owner[key] = unit if owner.get(key, unit) == unit else ""
    usual = None if zero is None else policy_of(zero)
    for rule in zero.modules if zero is not None else ():
        if not any(is_meant(rule.pattern, name) for found in names.values() for name in found):
            raise ValueError(f"ZeroConfig.modules: {rule.pattern!r} is no module or parameter")
    planned = []
    for unit in ["", *units]:
        mine = [key for key in parameters if owner[key] == unit]
        kinds: dict[tuple[bool, torch.dtype | None, Policy | None, bool], list[int]] = {
            (trained, None, None, False): [] for trained in (True, False)
        }
        for key in mine:
            integer = _integer(parameters[key].dtype)
            policy = None if zero is None else policy_of_parameter(zero, names[key])
            fp32 = integer is None and key in fp32_parameters
            kinds.setdefault((parameters[key].requires_grad, integer, None if policy == usual else policy, fp32), []).append(key)
        layouts = [
            Layout(unit, trained, tuple(_slots(chosen, names, parameters)), integer, policy, fp32)
            for (trained, integer, policy, fp32), chosen in kinds.items()
            if chosen
        ]
        planned.append(UnitLayout(unit, tuple(layouts)))
    return planned


def _integer(dtype: torch.dtype) -> torch.dtype | None:
    return None if dtype.is_floating_point else dtype


def _slots(keys: list[int], names: dict[int, list[str]], parameters: dict[int, nn.Parameter]) -> Iterator[Slot]:
    offset = 0
    for key in keys:
        first, *aliases = names[key]
        yield Slot(first, parameters[key].shape, offset, tuple(aliases))
        offset += _align(parameters[key].numel())


def _align(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN


def _called(children: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """`children`, but for one that has no forward of its own (a list), what it holds."""
    for name, child in children:
        if type(child).forward is nn.Module.forward:
            yield from _called([(f"{name}.{inner}", module) for inner, module in child.named_children()])
        else:
            yield name, child


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
