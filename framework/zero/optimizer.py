"""A torch optimizer moved onto shards: it keeps its class, groups and schedulers, but updates this rank's pieces of the flat masters.

Every parameter of the module becomes one 1-D fp32 parameter per rank: the piece of it that this rank owns. Element-wise optimizers (AdamW,
SGD, ...) do on the pieces exactly what they would do on the whole; a parameter that got no gradient on any rank is skipped, as
torch skips `grad=None`, instead of being decayed by a zero gradient. AdamW, Lion and SGD run on whole buffers (`flat_optimizer.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from framework import torch_private
from framework.zero.buffer import FlatBuffer
from framework.zero.flat_optimizer import FlatOptimizer
from framework.zero.layout import Piece
from framework.zero.offload import HostMemory, HostUpdates

NOT_ELEMENT_WISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam", "Shampoo", "SOAP", "LAMB", "Lamb", "LARS")
"""Optimizers whose update of an element depends on others of the same tensor: wrong on pieces."""


class ShardedOptimizer:
    """`optimizer` (torch) over pieces of `buffers`. The instance given is changed in place and stays the one to set `lr` on.

    Raises ValueError when the optimizer has state already, is not element-wise, or holds a parameter that is not the module's.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, buffers: list[FlatBuffer], originals: dict[int, nn.Parameter], host: HostMemory
    ) -> None:
        """`originals`: the module's parameter now, by the `id` of the one that the optimizer was made with."""
        if type(optimizer).__name__ in NOT_ELEMENT_WISE:
            raise ValueError(
                f"{type(optimizer).__name__} is not element-wise, so it cannot run on shards of parameters: use AdamW, SGD or another "
                "optimizer whose update of an element depends on that element alone"
            )
        if optimizer.state:
            raise ValueError("the optimizer has state already: make it, give it to the engine, and load its state through the engine")
        self.torch = optimizer
        self._stepping = False
        optimizer.register_step_pre_hook(self._refuse_bare_step)
        self.pieces: list[tuple[FlatBuffer, int, Piece, nn.Parameter]] = []
        """(buffer, index of its slot, piece, the 1-D parameter that the optimizer holds)."""
        shards: dict[int, list[nn.Parameter]] = {}
        for buffer in buffers:
            index_of = {slot: index for index, slot in enumerate(buffer.layout.slots)}
            for piece in buffer.pieces:
                index = index_of[piece.slot]
                shard = nn.Parameter(buffer.master.data[piece.shard_start : piece.shard_stop])
                self.pieces.append((buffer, index, piece, shard))
                shards.setdefault(id(buffer.parameters[index]), []).append(shard)
        known = {id(parameter) for buffer in buffers for parameter in buffer.parameters}
        taken: set[int] = set()
        for number, group in enumerate(optimizer.param_groups):
            mine: list[nn.Parameter] = []
            for old in group["params"]:
                parameter = originals.get(id(old))
                if parameter is None:
                    raise ValueError(
                        f"optimizer group {number} holds a tensor of shape {tuple(old.shape)} that is not a parameter of the module"
                    )
                if id(parameter) in known:  # frozen ones have no gradient and nothing to update
                    mine += shards.get(id(parameter), [])
                    taken.add(id(parameter))
            group["params"] = mine
            group.pop("param_names", None)
        self.pieces = [entry for entry in self.pieces if id(entry[0].parameters[entry[1]]) in taken]
        on_host = [buffer for buffer in buffers if buffer.master_on_host]
        self._updates = self._flat = None
        if FlatOptimizer.takes(optimizer, buffers):
            self._updates = HostUpdates(host, on_host, buffers[0].full.device) if on_host else None
            self._flat = FlatOptimizer(optimizer, self.pieces, self._updates)

    def step(self, factor: torch.Tensor, finite: torch.Tensor, is_used: list[bool], offsets: dict[int, int]) -> None:
        """Update with gradient = `buffer.grad` * `factor`; where `finite` is False nothing changes (fused optimizers; for others the caller
        has looked). `is_used[offsets[id(buffer)] + slot index]` says which parameters any rank used."""
        if self._flat is not None:
            self._flat.step(factor.masked_fill(~finite, torch.nan), is_used, offsets)  # `torch.where` would copy the number and wait
            self._step_torch()  # without gradients: nothing but the hooks and the counters that users put there
            return
        in_kernel = self.scales_in_kernel
        for buffer, index, piece, shard in self.pieces:
            if is_used[offsets[id(buffer)] + index]:
                grad = buffer.grad[piece.shard_start : piece.shard_stop]
                if not in_kernel:
                    grad = grad.mul_(factor.to(grad.dtype)).to(shard.device)
                shard.grad = grad
        if in_kernel:
            self.torch.grad_scale = factor.reciprocal().float()
            self.torch.found_inf = (~finite).float()
        try:
            self._step_torch()
        finally:
            if in_kernel:
                del self.torch.grad_scale, self.torch.found_inf
            for *_, shard in self.pieces:
                shard.grad = None

    def _step_torch(self) -> None:
        self._stepping = True
        try:
            self.torch.step()
        finally:
            self._stepping = False

    def _refuse_bare_step(self, *_: object) -> None:
        if not self._stepping:
            raise RuntimeError("optimizer.step() alone would update nothing, because gradients lie in the engine: call engine.step()")

    @property
    def scales_in_kernel(self) -> bool:
        """Whether the optimizer's own kernel multiplies the gradient by the factor and skips a step that is not finite."""
        if self._flat is not None:
            return True
        return torch_private.takes_grad_scale(self.torch) and all(
            buffer.master_dtype is torch.float32 and not buffer.master_on_host for buffer, *_ in self.pieces
        )

    def take_back_count(self) -> None:
        """The last step turned out to have been skipped by the device: it does not count."""
        if self._flat is not None:
            self._flat.take_back_count()

    def adopt_state(self) -> None:
        """State was put into `torch.state` from outside."""
        if self._flat is not None:
            self._flat.adopt_state()

    @property
    def writes_shards(self) -> bool:
        """Whether a step leaves the updated parameters in `FlatBuffer.shard`, too, and not in the masters alone."""
        return self._flat is not None

    def state_pieces(self) -> Iterator[tuple[FlatBuffer, Piece, dict]]:
        """Each piece with its optimizer state."""
        for buffer, _, piece, shard in self.pieces:
            yield buffer, piece, self.torch.state.get(shard, {})

    def state_nbytes(self, *, on_host: bool) -> int:
        """Bytes of the optimizer state that lies in host memory, or of the rest, without its counters; of a tensor that several parameters
        have views of, all of it, once."""
        states = [state for buffer, _, state in self.state_pieces() if buffer.master_on_host is on_host]
        values = [value for state in states for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
        return sum({torch_private.storage_id(value): value.untyped_storage().nbytes() for value in values}.values())
