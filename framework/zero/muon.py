"""Muon (Keller Jordan, 2024; "Muon is Scalable for LLM Training", arXiv:2502.16982) as a torch optimizer: hidden matrices take steps in
which all directions count alike, everything else is updated by AdamW.

The arithmetic is that of torch.optim.Muon: the momentum is a running mean, it is made orthogonal by five Newton-Schulz iterations in
bf16, and weight decay is decoupled. Groups with `orthogonal=True` hold matrices; the others are AdamW's. Given to a ZeroEngine, the same
happens on shards (`muon_step.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from framework.kernels.adamw import adamw_
from framework.kernels.shard import adam_range
from framework.zero.whole_step import WholeStep

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SMALLEST_NORM = 1e-7


class Muon(WholeStep):
    """`lr` is that of every group; `adjust_lr` says how it depends on a matrix' shape (see `lr_of_shape`).

    Raises ValueError for settings out of range and for an orthogonal group with something that is no matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        orthogonal: bool = True,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr: Literal["original", "match_rms_adamw"] = "original",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if min(lr, weight_decay, eps) < 0 or not all(0 <= beta < 1 for beta in (momentum, *betas)):
            raise ValueError(
                f"Muon: got lr={lr}, weight_decay={weight_decay}, eps={eps}, momentum={momentum}, betas={betas}; expected lr, weight_decay "
                "and eps from 0, momentum and betas in [0, 1)"
            )
        if adjust_lr not in ("original", "match_rms_adamw"):
            raise ValueError(f"Muon: got adjust_lr={adjust_lr!r}, expected 'original' or 'match_rms_adamw'")
        of_matrices = {"orthogonal": orthogonal, "momentum": momentum, "nesterov": nesterov, "adjust_lr": adjust_lr}
        super().__init__(params, {"lr": lr, **of_matrices, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            if group["orthogonal"] and (others := [tuple(p.shape) for p in group["params"] if p.dim() != 2]):
                raise ValueError(f"Muon: got a parameter of shape {others[0]} in a group of matrices; put it in one with orthogonal=False")

    def update_whole(self, group: dict[str, Any], state: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        if not state:
            state.update(new_state(group, parameter))
        if group["orthogonal"]:
            momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
            direction = orthogonal(ahead(group, grad, momentum).bfloat16())
            parameter.copy_(moved(group, parameter.shape, parameter, direction))
        else:
            state["step"] += 1
            flat = (tensor.view(-1) for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"], grad))
            adamw_step(group, int(state["step"]), *flat)


def new_state(group: dict[str, Any], like: Tensor) -> dict[str, Tensor]:
    """Of a parameter (or a piece of one) that was never updated."""
    if group["orthogonal"]:
        return {"momentum_buffer": torch.zeros_like(like)}
    return {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(like), "exp_avg_sq": torch.zeros_like(like)}


def ahead(group: dict[str, Any], grad: Tensor, momentum: Tensor) -> Tensor:
    """What is to be made orthogonal."""
    return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def moved(group: dict[str, Any], shape: torch.Size, parameter: Tensor, direction: Tensor) -> Tensor:
    """What becomes of `parameter`, or a piece of it; it is a matrix of `shape`."""
    decayed = parameter * (1 - group["lr"] * group["weight_decay"])
    return decayed.add_(direction, alpha=-lr_of_shape(group["lr"], group["adjust_lr"], shape))


def adamw_step(
    group: dict[str, Any], step: int, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, factor: Tensor | None = None
) -> None:
    """AdamW's step number `step`, from 1, on flat tensors; a `factor` that is not finite changes nothing."""
    whole = adam_range(0, master.numel(), lr=group["lr"], weight_decay=group["weight_decay"], step=step, betas=group["betas"])
    adamw_(master, exp_avg, exp_avg_sq, grad, [whole], betas=group["betas"], eps=group["eps"], grad_factor=factor)


def lr_of_shape(lr: float, adjust_lr: str, shape: torch.Size) -> float:
    """original: larger for matrices with more rows than columns. match_rms_adamw: so that updates are as large as AdamW's usually are, and
    AdamW's learning rate and weight decay hold."""
    rows, columns = shape
    return lr * (math.sqrt(max(1, rows / columns)) if adjust_lr == "original" else 0.2 * math.sqrt(max(rows, columns)))


def orthogonal(matrix: Tensor) -> Tensor:
    """U V' of U S V' = `matrix` [rows, columns] bf16, roughly: the singular values come out between about 0.7 and 1.2.

    Newton-Schulz: X <- a X + b (X X') X + c (X X')^2 X, on the side that makes X X' small.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def workspace_bytes(shape: torch.Size) -> int:
    """Most that `orthogonal` holds at a time besides its argument, bf16: X before and after an iteration, X X' and its polynomial."""
    return 2 * (2 * shape.numel() + 2 * min(shape) ** 2)
