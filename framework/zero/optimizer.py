"""A torch optimizer moved onto shards: it keeps its class, groups and schedulers, but updates this rank's pieces of the flat masters.

Every parameter of the module becomes one 1-D fp32 parameter per rank: the piece of it that this rank owns. Element-wise optimizers (AdamW,
SGD, ...) do on the pieces exactly what they would do on the whole; a parameter that got no gradient on any rank is skipped, as
torch skips `grad=None`, instead of being decayed by a zero gradient. AdamW, Lion and SGD run on whole buffers (`flat_optimizer.py`), and
those of `STEPS` have a step of their own, in which ranks tell each other what a piece does not show (`piece_step.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from framework import torch_private
from framework.zero.adafactor_step import AdafactorStep
from framework.zero.buffer import FlatBuffer, is_elsewhere
from framework.zero.eight_bit import AdamW8bit, EightBitStep, Lion8bit
from framework.zero.flat_optimizer import FlatOptimizer
from framework.zero.layout import Piece
from framework.zero.muon import Muon
from framework.zero.muon_step import MuonStep
from framework.zero.offload import HostMemory, HostUpdates
from framework.zero.piece_step import Member, PieceStep

NOT_ELEMENT_WISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam", "Shampoo", "SOAP", "LAMB", "Lamb", "LARS")
"""Optimizers whose update of an element depends on others of the same tensor: wrong on pieces."""
STEPS: dict[type[torch.optim.Optimizer], type[PieceStep]] = {Muon: MuonStep, torch.optim.Adafactor: AdafactorStep}
"""By class: what makes its step on pieces, together with the other ranks."""
EIGHT_BIT = (AdamW8bit, Lion8bit)


class ShardedOptimizer:
    """`optimizer` (torch) over pieces of `buffers`. The instance given is changed in place and stays the one to set `lr` on.

    Raises ValueError when the optimizer has state already, is not element-wise, or holds a parameter that is not the module's.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, buffers: list[FlatBuffer], originals: dict[int, nn.Parameter], host: HostMemory
    ) -> None:
        """`originals`: the module's parameter now, by the `id` of the one that the optimizer was made with."""
        if type(optimizer).__name__ in NOT_ELEMENT_WISE and type(optimizer) not in STEPS:
            raise ValueError(
                f"{type(optimizer).__name__} is not element-wise, so it cannot run on shards of parameters: use AdamW, SGD or another "
                "optimizer whose update of an element depends on that element alone, or one of "
                f"{', '.join(f'{kind.__module__}.{kind.__name__}' for kind in STEPS)}"
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
                shard = _parameter(buffer, piece)
                self.pieces.append((buffer, index, piece, shard))
                shards.setdefault(id(buffer.parameters[index]), []).append(shard)
        known = {id(parameter) for buffer in buffers for parameter in buffer.parameters}
        group_of: dict[int, int] = {}
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
                    group_of[id(parameter)] = number
            group["params"] = mine
            group.pop("param_names", None)
        self.pieces = [entry for entry in self.pieces if id(entry[0].parameters[entry[1]]) in group_of]
        on_host = [buffer for buffer in buffers if buffer.master_on_host]
        self._updates = self._flat = None
        takes = FlatOptimizer.takes(optimizer, buffers)
        if not takes and any(buffer.master is None for buffer in buffers):
            raise ValueError(
                f"{type(optimizer).__name__} with these options updates fp32 master weights: take AdamW, Lion or SGD where "
                "PrecisionConfig.master_weights is not 'full'"
            )
        if type(optimizer) in EIGHT_BIT and any(buffer.master_dtype is torch.float64 for buffer in buffers):
            raise ValueError(f"{type(optimizer).__name__} is for fp32 masters: in float64 use AdamW or Lion")
        if type(optimizer) in EIGHT_BIT and not any(buffer.state_on_disk for buffer in buffers):
            self._updates = HostUpdates(host, on_host, buffers[0].full.device, 0) if on_host else None
            self._flat = EightBitStep(optimizer, self._members(buffers, group_of), self._updates)
        elif (make_step := STEPS.get(type(optimizer))) is not None:
            if on_host:
                raise ValueError(f"{type(optimizer).__name__} needs its state on the device: use OffloadConfig(optimizer='none')")
            for buffer in buffers:
                _ = buffer.shard_comm  # refuses shards in another order than that of ranks
            self._flat = make_step(optimizer, self._members(buffers, group_of))
        elif takes:
            moments = FlatOptimizer.states_of(optimizer)
            self._updates = HostUpdates(host, on_host, buffers[0].full.device, len(moments)) if on_host else None
            for buffer in on_host if host.config.optimizer == "nvme" else ():
                buffer.store_moments(host, moments)
            self._flat = FlatOptimizer(optimizer, self.pieces, self._updates)
        elif on_host and host.config.optimizer == "nvme":
            raise ValueError(
                f"{type(optimizer).__name__} as it is here runs by torch alone, on state in memory: for optimizer='nvme' use "
                "AdamW, Lion or SGD with fp32 masters and without options that our kernels do not have, or optimizer='cpu'"
            )

    def _members(self, buffers: list[FlatBuffer], group_of: dict[int, int]) -> dict[FlatBuffer, list[Member]]:
        """What the optimizer updates, also where this rank has no piece of it; `group_of`: the group of a parameter, by its `id`."""
        mine = {(buffer, index): (piece, shard) for buffer, index, piece, shard in self.pieces}
        return {
            buffer: [
                Member(index, slot, group_of[id(parameter)], *mine.get((buffer, index), (None, None)))
                for index, (slot, parameter) in enumerate(zip(buffer.layout.slots, buffer.parameters, strict=True))
                if id(parameter) in group_of
            ]
            for buffer in buffers
        }

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

    def check_options(self) -> None:
        """Before a step: raises RuntimeError for what was set in the optimizer's groups and would not be done."""
        if isinstance(self._flat, FlatOptimizer):
            self._flat.check_options()

    def take_back_count(self) -> None:
        """The last step turned out to have been skipped by the device: it does not count."""
        if self._flat is not None:
            self._flat.take_back_count()

    def adopt_state(self, buffer: FlatBuffer) -> None:
        """State of `buffer` was put into `torch.state` from outside."""
        if self._flat is not None:
            self._flat.adopt_state(buffer)

    @property
    def writes_shards(self) -> bool:
        """Whether a step leaves the updated parameters in `FlatBuffer.shard`, too, and not in the masters alone."""
        return self._flat is not None and self._flat.writes_shards

    @property
    def writes_blocks(self) -> bool:
        """The same of `FlatBuffer.blocks`, where parameters are gathered in 8 bits."""
        return self._flat is not None and self._flat.writes_blocks

    @property
    def keeps_8_bits(self) -> bool:
        """Whether moments of large matrices are codes and scales (`eight_bit.py`)."""
        return isinstance(self._flat, EightBitStep)

    def state_pieces(self) -> Iterator[tuple[FlatBuffer, Piece, dict]]:
        """Each piece with its optimizer state."""
        for buffer, _, piece, shard in self.pieces:
            yield buffer, piece, self.torch.state.get(shard, {})

    def state_nbytes(self, *, on_host: bool) -> int:
        """Bytes of the optimizer state that lies in host memory, or of that on the device, without its counters; of a tensor that several
        parameters have views of, all of it, once."""
        states = [state for buffer, _, state in self.state_pieces() if buffer.master_on_host is on_host]
        values = [value for state in states for value in state.values() if isinstance(value, torch.Tensor) and not is_elsewhere(value)]
        return sum({torch_private.storage_id(value): value.untyped_storage().nbytes() for value in values if value.dim()}.values())


def _parameter(buffer: FlatBuffer, piece: Piece) -> nn.Parameter:
    """What the optimizer holds for `piece`: a view of the masters, or where these are no tensor of their own, NaN in their shape and dtype:
    our kernels alone know how to update them."""
    if buffer.master is not None:
        return nn.Parameter(buffer.master.data[piece.shard_start : piece.shard_stop])
    return nn.Parameter(torch.full((1,), torch.nan, dtype=buffer.master_dtype, device=buffer.state_device).expand(piece.numel))
