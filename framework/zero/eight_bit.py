"""AdamW and Lion whose moments of large matrices are kept in 8 bits, block by block (arXiv:2110.02861): 1 byte and 1/64 for each value of a
moment in place of 4.

A moment is read, used by the fp32 kernel and written again in chunks, so that it is never there in fp32 as a whole. Blocks begin where a
parameter does and do not straddle ranks, so the numbers are the same to the bit under every stage and number of ranks.

Which stay in fp32: parameters with fewer than 4,096 elements, and those that are no matrices (norms, biases).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.kernels.adamw import adamw_
from framework.kernels.lion import lion_
from framework.kernels.moments import BLOCK, CHUNK, blocks, dequantize_moment, empty_moment, quantize_moment
from framework.kernels.shard import ShardCopies, ShardRange, adam_range
from framework.zero.buffer import FlatBuffer
from framework.zero.offload import HostUpdates
from framework.zero.piece_step import Member, Members, PieceStep
from framework.zero.whole_step import WholeStep

SMALLEST = 4096
"""Elements of a matrix whose moments are in 8 bits."""
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
CODE, SCALE = "_code", "_scale"


class EightBit(WholeStep):
    """`step` is the reference for the one on shards: the same arithmetic on whole tensors."""

    moments: ClassVar[tuple[str, ...]]

    @staticmethod
    def fp32_step(group: dict[str, Any], step: int, master: Tensor, moments: Sequence[Tensor], grad: Tensor, **options: Any) -> None:
        """The step number `step`, from 1, on flat tensors."""
        raise NotImplementedError

    def update_whole(self, group: dict[str, Any], state: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        if not state:
            state.update(self.new_state(parameter.shape, parameter.view(-1)))
        state["step"] += 1
        self.update(group, int(state["step"]), state, parameter.view(-1), grad.view(-1))

    def new_state(self, shape: torch.Size, piece: Tensor) -> dict[str, Tensor]:
        """Of a piece of a parameter of `shape` that was never updated."""
        state = {"step": torch.tensor(0.0)}
        for key in self.moments:
            if in_8_bits(shape):
                state[key + CODE], state[key + SCALE] = empty_moment(piece.numel(), piece.device, signed=SIGNED[key])
            else:
                state[key] = torch.zeros_like(piece)
        return state

    def update(
        self,
        group: dict[str, Any],
        step: int,
        state: dict[str, Tensor],
        master: Tensor,
        grad: Tensor,
        factor: Tensor | None = None,
        copy: Tensor | None = None,
    ) -> None:
        """One step on a piece ([n] each). `copy`: the parameters in the compute dtype; a `factor` that is not finite changes nothing."""
        quantized = self.moments[0] + CODE in state
        finite = None if factor is None else torch.isfinite(factor)
        for start in range(0, master.numel(), CHUNK if quantized else max(1, master.numel())):
            at = slice(start, min(start + CHUNK, master.numel())) if quantized else slice(0, master.numel())
            of_blocks = slice(start // BLOCK, blocks(at.stop))
            stored = [(state[key + CODE][at], state[key + SCALE][of_blocks], SIGNED[key]) for key in self.moments if quantized]
            moments = [dequantize_moment(codes, scales, signed=signed) for codes, scales, signed in stored]
            copies = None if copy is None else ShardCopies(data=copy[at])
            in_fp32 = moments or [state[key] for key in self.moments]
            self.fp32_step(group, step, master[at], in_fp32, grad[at], grad_factor=factor, copies=copies)
            for moment, (codes, scales, signed) in zip(moments, stored, strict=True):
                quantize_moment(moment, codes, scales, signed=signed, finite=finite)


class AdamW8bit(EightBit):
    """AdamW. Raises ValueError for settings out of range."""

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        _check(type(self).__name__, betas, lr=lr, weight_decay=weight_decay, eps=eps)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @staticmethod
    def fp32_step(group: dict[str, Any], step: int, master: Tensor, moments: Sequence[Tensor], grad: Tensor, **options: Any) -> None:
        settings = {"lr": float(group["lr"]), "weight_decay": float(group["weight_decay"]), "step": step, "betas": group["betas"]}
        whole = adam_range(0, master.numel(), **settings)
        adamw_(master, *moments, grad, [whole], betas=group["betas"], eps=group["eps"], **options)


class Lion8bit(EightBit):
    """Lion. Raises ValueError for settings out of range."""

    moments = ("exp_avg",)

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        _check(type(self).__name__, betas, lr=lr, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @staticmethod
    def fp32_step(group: dict[str, Any], step: int, master: Tensor, moments: Sequence[Tensor], grad: Tensor, **options: Any) -> None:
        whole = ShardRange(start=0, stop=master.numel(), lr=float(group["lr"]), weight_decay=float(group["weight_decay"]))
        lion_(master, *moments, grad, [whole], betas=group["betas"], **options)


class EightBitStep(PieceStep):
    """Sends nothing; with masters in host memory the CPU does it."""

    writes_shards = True

    def __init__(self, optimizer: EightBit, members: Members, updates: HostUpdates | None = None) -> None:
        super().__init__(optimizer, members)
        self._updates = updates

    def _step(self, used: Members, factor: Tensor) -> None:
        for buffer, members in used.items():
            mine = [member for member in members if member.piece is not None]
            if not mine:
                continue
            extent = slice(mine[0].at.start, mine[-1].at.stop)
            pieces = [self._piece(buffer, member, extent.start) for member in mine]
            update = partial(_update, buffer.master[extent], pieces)
            if buffer.master_on_host:
                self._updates.submit(buffer, extent, update, factor.float())
            else:
                copies = buffer.shard is not buffer.master and buffer.is_written_with_master
                update(buffer.grad[extent], buffer.shard[extent] if copies else None, factor.float())

    def _piece(self, buffer: FlatBuffer, member: Member, begin: int) -> tuple[slice, Callable[..., None]]:
        """Where it lies, counted from `begin`, and its update with the settings of now: the CPU may come to it later."""
        state = self._state(member, partial(self._torch.new_state, member.slot.shape, buffer.master[member.at]))
        update = partial(self._torch.update, dict(self._group(member)), self._count(state), state)
        return slice(member.at.start - begin, member.at.stop - begin), update

    def adopt_state(self, buffer: FlatBuffer) -> None:
        """Moments that were saved in fp32 become codes where this optimizer keeps codes."""
        for member in self._members.get(buffer, ()):
            state = self._torch.state.get(member.parameter)
            if state and in_8_bits(member.slot.shape):
                for key in self._torch.moments:
                    if key in state:
                        x, signed = state.pop(key), SIGNED[key]
                        state[key + CODE], state[key + SCALE] = empty_moment(x.numel(), x.device, signed=signed)
                        quantize_moment(x, state[key + CODE], state[key + SCALE], signed=signed)


def _update(
    master: Tensor, pieces: list[tuple[slice, Callable[..., None]]], grad: Tensor, copy: Tensor | None, factor: Tensor
) -> list[ShardRange]:
    """All pieces of a buffer's extent ([n] each). Returns what was updated."""
    for at, update in pieces:
        update(master[at], grad[at], factor, None if copy is None else copy[at])
    return [ShardRange(start=at.start, stop=at.stop, lr=0.0) for at, _ in pieces]


def in_8_bits(shape: torch.Size) -> bool:
    """Whether moments of a parameter of `shape` are."""
    return len(shape) >= 2 and shape.numel() >= SMALLEST


def bytes_per_moment(numel: int) -> int:
    """In 8 bits."""
    return numel + 4 * blocks(numel)


def readable(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with functions that give moments in fp32 in the place of codes and scales."""
    quantized = [key for key in SIGNED if key + CODE in state]
    plain = {key: value for key, value in state.items() if key.removesuffix(CODE).removesuffix(SCALE) not in quantized}
    return plain | {key: partial(dequantize_moment, state[key + CODE], state[key + SCALE], signed=SIGNED[key]) for key in quantized}


def dequantized(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with moments in fp32."""
    return {key: value() if isinstance(value, partial) else value for key, value in readable(state).items()}


def _check(name: str, betas: tuple[float, float], **from_zero: float) -> None:
    if min(from_zero.values()) < 0 or not all(0 <= beta < 1 for beta in betas):
        got = ", ".join(f"{key}={value}" for key, value in from_zero.items())
        raise ValueError(f"{name}: got {got}, betas={betas}; expected {', '.join(from_zero)} from 0, betas in [0, 1)")
