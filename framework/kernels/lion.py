"""Lion (arXiv:2302.06675) on a flat shard in one pass.

Tolerance, against fp64 from the same state: exp_avg within 3 ulp of its largest term; the master within 2 ulp, except where
beta1 m + (1 - beta1) g is so near zero that its sign depends on rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from framework.kernels.library import dtype_code, library_for, stream_of
from framework.kernels.shard import Arguments, ShardCopies, ShardRange, address, check, factor_address, named_tensors, reference_step


def lion_(
    master: Tensor | None,
    exp_avg: Tensor,
    grad: Tensor,
    ranges: Sequence[ShardRange],
    *,
    betas: tuple[float, float],
    grad_factor: Tensor | None = None,
    copies: ShardCopies | None = None,
    remainder: Tensor | None = None,
) -> None:
    """One step on the elements of `ranges`, in place; arguments as for `adamw_`."""
    check(master, remainder, (exp_avg,), grad, copies, ranges)
    named = {"master": master, "remainder": remainder, "exp_avg": exp_avg, "grad": grad, "grad_factor": grad_factor}
    library = library_for("fw_lion", **named, **named_tensors(copies))
    if library is None:
        lion_reference_(master, exp_avg, grad, ranges, betas=betas, grad_factor=grad_factor, copies=copies, remainder=remainder)
        return
    arguments = Arguments(copies, ranges)
    library.call(
        "fw_lion",
        *(address(master), address(remainder), exp_avg.data_ptr(), grad.data_ptr(), dtype_code(grad.dtype)),
        *(arguments.copies, arguments.ranges, len(ranges), *betas, factor_address(grad_factor), stream_of(grad)),
    )


@torch.no_grad()
def lion_reference_(
    master: Tensor | None,
    exp_avg: Tensor,
    grad: Tensor,
    ranges: Sequence[ShardRange],
    *,
    betas: tuple[float, float],
    grad_factor: Tensor | None = None,
    copies: ShardCopies | None = None,
    remainder: Tensor | None = None,
) -> None:
    """`lion_` in plain torch."""
    check(master, remainder, (exp_avg,), grad, copies, ranges)

    def update(one: ShardRange, p: Tensor, g: Tensor, states: list[Tensor]) -> Tensor:
        (m,) = states
        direction = (m * betas[0]).add_(g, alpha=1 - betas[0]).sign_()
        m.mul_(betas[1]).add_(g, alpha=1 - betas[1])
        return (p * (1 - one.lr * one.weight_decay)).sub_(direction, alpha=one.lr)

    reference_step(
        update,
        **{"master": master, "remainder": remainder, "states": (exp_avg,), "grad": grad, "ranges": ranges, "copies": copies},
        grad_factor=grad_factor,
    )
