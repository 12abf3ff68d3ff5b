"""What blocks keep for backward, in bytes, and which of them compute it a second time instead (activation checkpointing).

The bytes are measured, so that no formula can drift from the blocks: each runs once on fake tensors, which have shapes and no memory,
and what autograd saves is added up, each storage once. Parameters are not counted; rotary tables and masks, which all blocks share, are
counted once. Blocks that `torch.compile` has fused save at most that.

    stored      saves `inside` bytes and its input
    recomputed  keeps its input alone, on the device or in host memory; `inside` is there again while its own backward runs
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from framework import torch_private
from framework.config.schema import LlamaConfig
from framework.models import documents
from framework.models.documents import Documents, Way
from framework.models.rope import rotary_tables

if TYPE_CHECKING:
    from framework.models.llama import Llama


class InputSaver(Protocol):
    """How the input of a recomputed block is kept until backward: in host memory, in parts on several ranks, or both."""

    def pack(self, x: Tensor) -> Any: ...

    def unpack(self, kept: Any) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """Of one block, on one rank, for one micro-batch."""

    inside: int
    """Saved for backward besides the input."""
    input: int
    saves_input: bool

    @property
    def stored(self) -> int:
        return self.inside + self.input * self.saves_input


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Of all blocks, and what they share."""

    blocks: tuple[BlockBytes, ...]
    shared: int

    def peak(self, recomputed: Collection[int], *, offloads: bool) -> int:
        """The most on the device, at the end of forward or while a block is recomputed, where these blocks are."""
        kept, peaks, fetched = self.shared, [], 0
        for index, block in enumerate(self.blocks):
            if index not in recomputed:
                kept += block.stored
                continue
            peaks.append(kept + block.input + block.inside + fetched)
            kept += 0 if offloads else block.input
            fetched = block.input if offloads else 0  # the one before it, for its backward; the last one, on its way to the host
        return max([kept + fetched, *peaks])

    def on_host(self, recomputed: Collection[int]) -> int:
        """Bytes of the inputs of these blocks."""
        return sum(self.blocks[index].input for index in recomputed)

    def fewest(self, budget_bytes: int, *, offloads: bool) -> tuple[int, ...] | None:
        """The fewest first blocks to be recomputed for a peak within the budget; None: all of them are not enough. The first, because what
        the last ones store is gone by the time that the first are recomputed."""
        saving = [index for index, block in enumerate(self.blocks) if block.stored]
        for count in range(len(saving) + 1):
            if self.peak(saving[:count], offloads=offloads) <= budget_bytes:
                return tuple(saving[:count])
        return None


def every_nth(blocks: int, n: bool | int) -> tuple[int, ...]:
    """Of so many blocks, each (`True`), none (`False`) or the first and every n-th after it."""
    return tuple(range(0, blocks, int(n))) if n else ()


def activation_bytes(model: Llama, rows: int, tokens: int, dtype: torch.dtype, device_type: str, way: Way | None) -> ActivationBytes:
    """What the blocks of `model` (on any device; only shapes and `requires_grad` are looked at) save for `rows` rows of `tokens` tokens.
    `way`: how documents are kept apart in attention, where rows are packs."""
    decoder, config = model.model, model.config
    with torch_private.fake_tensors(), torch.device(device_type):
        x = torch.empty(rows, tokens, config.hidden_size, dtype=dtype)
        tables = decoder.one_document(x, None, 0) if way is None else _packed_tables(config, x, way)
        shared = {torch_private.storage_id(table): table.untyped_storage().nbytes() for table in _tensors(tables)}
        requires_grad = model.model.embed_tokens.weight.requires_grad
        measured: dict[Any, BlockBytes] = {}
        blocks = []
        for block in decoder.layers:
            key = requires_grad, tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters())
            if key not in measured:
                measured[key] = _of_block(block, x, requires_grad, tables, set(shared))
            blocks.append(measured[key])
            requires_grad = requires_grad or any(p.requires_grad for p in block.parameters())
    return ActivationBytes(blocks=tuple(blocks), shared=sum(shared.values()))


def _of_block(block: nn.Module, x: Tensor, requires_grad: bool, tables: tuple, shared: set[int]) -> BlockBytes:
    parameters = {}
    for name, p in block.named_parameters():
        dtype = x.dtype if p.is_floating_point() else p.dtype
        parameters[name] = torch.empty(p.shape, dtype=dtype).requires_grad_(p.requires_grad)
    x = x.clone().requires_grad_(requires_grad)
    with saved_bytes() as saved:
        out = torch.func.functional_call(block, parameters, (x, *tables))
    for other in (*map(torch_private.storage_id, parameters.values()), *shared):
        saved.pop(other, None)
    saves_input = saved.pop(torch_private.storage_id(x), None) is not None
    return BlockBytes(inside=sum(saved.values()), input=x.nbytes if out.requires_grad else 0, saves_input=saves_input)


@contextmanager
def saved_bytes() -> Iterator[dict[int, int]]:
    """Bytes of what autograd saves inside, by storage; the storages live as long as the results do."""
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[torch_private.storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved


def _packed_tables(config: LlamaConfig, x: Tensor, way: Way) -> tuple[Tensor, Tensor, Documents | Tensor]:
    """As `Decoder` makes them, for rows that are one document: what is saved does not depend on how many they are."""
    rows, tokens = x.shape[:2]
    positions = torch.zeros(rows, tokens, dtype=torch.int64)
    cos, sin = rotary_tables(config, positions, tokens)
    if way == "mask":
        return cos, sin, torch.empty(rows, 1, tokens, tokens, dtype=x.dtype)
    if way == "varlen":
        return cos, sin, Documents((), tokens, config.sliding_window, torch.empty(rows + 1, dtype=torch.int32), None)
    return cos, sin, documents.separate([[tokens]] * rows, way, config.sliding_window, x.dtype, x.device)


def _tensors(tables: tuple) -> list[Tensor]:
    held = [table for table in tables if isinstance(table, Tensor)]
    return held + [t for table in tables if isinstance(table, Documents) for t in (table.offsets, table.mask) if t is not None]
