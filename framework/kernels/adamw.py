"""AdamW (arXiv:1711.05101) on a flat shard in one pass: gradient in any dtype, factor, update, copies out.

The arithmetic is that of torch.optim.AdamW(fused=True). Tolerance, against fp64 from the same state: exp_avg and exp_avg_sq within 3 ulp
(of their largest term), the change of the master within 2e-6 of itself and 1 ulp of the master.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from framework.kernels.library import dtype_code, library_for, stream_of
from framework.kernels.shard import Arguments, ShardCopies, ShardRange, address, check, factor_address, named_tensors, reference_step


def adamw_(
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    ranges: Sequence[ShardRange],
    *,
    betas: tuple[float, float],
    eps: float,
    grad_factor: Tensor | None = None,
    copies: ShardCopies | None = None,
    remainder: Tensor | None = None,
) -> None:
    """One step on the elements of `ranges` (`adam_range`), in place.

    master, exp_avg, exp_avg_sq: [n] fp32; grad: [n] fp32, bf16 or fp16. grad_factor: one fp32 element that every gradient is multiplied by
    first; if it is not finite nothing changes. master=None with remainder [n] int16: the master is copies.data and it (`split_master`).
    Neither: parameters are copies.data, in bf16, alone.
    """
    check(master, remainder, (exp_avg, exp_avg_sq), grad, copies, ranges)
    states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    named = {"master": master, "remainder": remainder, **states, "grad": grad, "grad_factor": grad_factor}
    library = library_for("fw_adamw", **named, **named_tensors(copies))
    if library is None:
        adamw_reference_(
            *(master, exp_avg, exp_avg_sq, grad, ranges),
            **{"betas": betas, "eps": eps, "grad_factor": grad_factor, "copies": copies, "remainder": remainder},
        )
        return
    arguments = Arguments(copies, ranges)
    library.call(
        "fw_adamw",
        *(address(master), address(remainder), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), grad.data_ptr(), dtype_code(grad.dtype)),
        *(arguments.copies, arguments.ranges, len(ranges), *betas, eps, factor_address(grad_factor), stream_of(grad)),
    )


@torch.no_grad()
def adamw_reference_(
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    ranges: Sequence[ShardRange],
    *,
    betas: tuple[float, float],
    eps: float,
    grad_factor: Tensor | None = None,
    copies: ShardCopies | None = None,
    remainder: Tensor | None = None,
) -> None:
    """`adamw_` in plain torch."""
    check(master, remainder, (exp_avg, exp_avg_sq), grad, copies, ranges)

    def update(one: ShardRange, p: Tensor, g: Tensor, states: list[Tensor]) -> Tensor:
        m, v = states
        m.lerp_(g, 1 - betas[0])
        v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        p = p * (1 - one.lr * one.weight_decay)
        return p.addcdiv_(m, v.sqrt().div_(one.bias_correction2_sqrt).add_(eps), value=-one.lr / one.bias_correction1)

    reference_step(
        update,
        **{"master": master, "remainder": remainder, "states": (exp_avg, exp_avg_sq), "grad": grad, "ranges": ranges, "copies": copies},
        grad_factor=grad_factor,
    )
