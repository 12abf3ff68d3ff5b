"""SGD with momentum on a flat shard in one pass, as torch.optim.SGD: weight decay is added to the gradient.

Tolerance, against fp64 from the same state: momentum_buffer within 3 ulp of its largest term, master within 3 ulp of the largest of itself
and its change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from framework.kernels.library import KernelError, dtype_code, library_for, stream_of
from framework.kernels.shard import Arguments, ShardCopies, ShardRange, address, check, factor_address, named_tensors, reference_step


def sgd_(
    master: Tensor | None,
    momentum_buffer: Tensor | None,
    grad: Tensor,
    ranges: Sequence[ShardRange],
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    first_step: bool = False,
    grad_factor: Tensor | None = None,
    copies: ShardCopies | None = None,
    remainder: Tensor | None = None,
) -> None:
    """One step on the elements of `ranges`, in place; arguments as for `adamw_`. first_step: the buffer is filled and not read."""
    states = () if momentum_buffer is None else (momentum_buffer,)
    check(master, remainder, states, grad, copies, ranges)
    _check_momentum(momentum, momentum_buffer)
    named = {"master": master, "remainder": remainder, "momentum_buffer": momentum_buffer, "grad": grad, "grad_factor": grad_factor}
    library = library_for("fw_sgd", **named, **named_tensors(copies))
    if library is None:
        sgd_reference_(
            *(master, momentum_buffer, grad, ranges),
            **{"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "first_step": first_step},
            **{"grad_factor": grad_factor, "copies": copies, "remainder": remainder},
        )
        return
    arguments = Arguments(copies, ranges)
    library.call(
        "fw_sgd",
        *(address(master), address(remainder), address(momentum_buffer), grad.data_ptr(), dtype_code(grad.dtype)),
        *(arguments.copies, arguments.ranges, len(ranges), momentum, dampening, nesterov, first_step),
        *(factor_address(grad_factor), stream_of(grad)),
    )


@torch.no_grad()
def sgd_reference_(
    master: Tensor | None,
    momentum_buffer: Tensor | None,
    grad: Tensor,
    ranges: Sequence[ShardRange],
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    first_step: bool = False,
    grad_factor: Tensor | None = None,
    copies: ShardCopies | None = None,
    remainder: Tensor | None = None,
) -> None:
    """`sgd_` in plain torch."""
    states = () if momentum_buffer is None else (momentum_buffer,)
    check(master, remainder, states, grad, copies, ranges)
    _check_momentum(momentum, momentum_buffer)

    def update(one: ShardRange, p: Tensor, g: Tensor, states: list[Tensor]) -> Tensor:
        g = g.add(p, alpha=one.weight_decay)
        if states:
            (buffer,) = states
            if first_step:
                buffer.copy_(g)
            else:
                buffer.mul_(momentum).add_(g, alpha=1 - dampening)
            g = g.add(buffer, alpha=momentum) if nesterov else buffer
        return p.sub(g, alpha=one.lr)

    reference_step(
        update,
        **{"master": master, "remainder": remainder, "states": states, "grad": grad, "ranges": ranges, "copies": copies},
        grad_factor=grad_factor,
    )


def _check_momentum(momentum: float, momentum_buffer: Tensor | None) -> None:
    if momentum != 0 and momentum_buffer is None:
        raise KernelError(f"momentum={momentum} needs a momentum_buffer.")
