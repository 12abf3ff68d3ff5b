"""The one small all-reduce of a step: gradient norm, loss, tokens, requests and which parameters were used, all at once.

Each element of the model is counted by exactly one rank, so that the sum of squares is the exact global norm under every placement.
A sum that is not finite is found here, before any parameter is touched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from framework.kernels.square_sum import square_sum
from framework.zero.buffer import FlatBuffer
from framework.zero.comm import Comm

NOT_THE_SAME_ORDER = (
    "ranks ran blocks in different orders and got each other's parameters (branches that depend on data belong into a block)"
)


class NonFiniteError(RuntimeError):
    """A loss or gradient is infinite or NaN. Parameters and optimizer state are those of before the step."""


@dataclass(frozen=True)
class StepStats:
    """What a step did, over all ranks; 0-d fp64 tensors on the device (reading one on CUDA waits for the device)."""

    loss: torch.Tensor
    """Sum of the losses / tokens."""
    grad_norm: torch.Tensor
    """L2 norm of the gradient of `loss`, before clipping."""
    tokens: torch.Tensor
    stop: torch.Tensor
    """Number of ranks that ask to stop after this step."""
    busy: torch.Tensor
    """Number of ranks that still have work in the background (`ZeroEngine.busy`)."""
    skipped: torch.Tensor
    """Whether gradients overflowed under the loss scale, so that nothing was updated: 0-d bool."""
    loss_scale: torch.Tensor | None = None
    """That this step's losses were multiplied by; None: they were not."""


class Verdict:
    """Whether a step was finite, and if not, whether that ends the run: for the host to read later. On CUDA it waits for that step alone,
    not for what was queued since."""

    def __init__(self, finite: torch.Tensor, fatal: torch.Tensor) -> None:
        self._told = torch.stack([finite, fatal]).to("cpu", non_blocking=True)
        self._written = torch.cuda.current_stream(finite.device).record_event() if finite.is_cuda else None

    def read(self) -> tuple[bool, bool]:
        """(finite, fatal)"""
        if self._written is not None:
            self._written.synchronize()
        finite, fatal = self._told.tolist()
        return finite, fatal


@dataclass(frozen=True)
class GlobalSums:
    """The all-reduced vector, taken apart."""

    square_sum: torch.Tensor
    loss_sum: torch.Tensor
    tokens: torch.Tensor
    stop: torch.Tensor
    busy: torch.Tensor
    used: torch.Tensor
    """How many ranks used each trained parameter in this step, in the engine's order."""
    same_order: torch.Tensor
    """Whether all ranks have made the same calls of collectives, see `Traffic.order`."""


def sum_over_ranks(
    buffers: list[FlatBuffer], world: Comm, loss_sum: torch.Tensor, tokens: torch.Tensor, stop: bool, busy: bool, device: torch.device
) -> GlobalSums:
    """All-reduce what `StepStats` is made of. `buffers`: the trained ones, gradients reduced."""
    total, order = torch.zeros((), dtype=torch.float64, device=device), world.traffic.order
    host = [float(stop), float(busy), float(order), float(order**2)]
    for buffer in buffers:
        total += square_sum(buffer.grad[buffer.owned])
        host += [float(index in buffer.used) for index in range(len(buffer.layout.slots))]
    from_host = torch.tensor(host, dtype=torch.float64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    sums = torch.cat([torch.stack([total, loss_sum.double(), tokens.double()]), from_host])
    world.all_reduce(sums).wait()
    same_order = sums[5].square() == sums[6] * world.size  # equality of Cauchy and Schwarz: all are equal, and every rank sees whether
    return GlobalSums(*sums[:5], sums[7:], same_order)


def where_not_finite(buffers: list[FlatBuffer], world: Comm, loss_sum: torch.Tensor) -> str:
    """A sentence that names the ranks with a bad loss and the parameters with a bad gradient. Collective."""
    bad_names = [
        piece.slot.name
        for buffer in buffers
        for piece in buffer.pieces
        if not bool(torch.isfinite(buffer.grad[piece.shard_start : piece.shard_stop]).all())
    ]
    reports = world.gather_objects((math.isfinite(float(loss_sum)), bad_names))
    bad_ranks = [rank for rank, (finite, _) in enumerate(reports) if not finite]
    names = list(dict.fromkeys(name for _, found in reports for name in found))
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    parts = []
    if bad_ranks:
        parts.append(f"the loss is not finite on rank {', '.join(map(str, bad_ranks))}")
    if names:
        parts.append(f"the gradient is not finite in {shown}")
    return " and ".join(parts) or "the squared gradient norm overflows"
