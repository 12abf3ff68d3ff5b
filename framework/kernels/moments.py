"""Moments of an optimizer in 8 bits: block-wise dynamic quantisation (8-bit Optimizers, arXiv:2110.02861), in plain torch.

A block of 256 elements shares a scale, its largest magnitude. A code stands for a value from 0 to 1, with a sign or without: a decade
10^-E, E from 0 on, and a linear fraction of it, with one bit less in each further decade. So small values keep their order of magnitude
beside large ones: over 6 decades with a sign, 7 without.

Unusual: 1 and -1 have codes, so that a block that is read and written again stays what it is, to the bit. A second moment that is not zero
does not become zero (arXiv:2309.01507), or its element would take a step without bounds.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK = 256
"""Elements of a block."""
CHUNK = 1 << 18
"""Elements that are there in fp32 at a time, by whoever goes over a moment."""


@cache
def code_values(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """(values in ascending order: 255 with a sign, 256 without; where the next one begins), fp32."""
    decades, positive = (7, []) if signed else (8, [])
    for exponent in range(decades):
        fractions = 2 ** (decades - 1 - exponent)
        steps = torch.arange(1, fractions + 1, dtype=torch.float64) / fractions
        positive.append((0.1 + 0.9 * steps) * 10.0**-exponent)
    up = torch.cat(positive[::-1])
    zero = torch.zeros(1, dtype=torch.float64)
    values = torch.cat([-up.flip(0), zero, up] if signed else [zero, up]).float()
    bounds = (values[1:] + values[:-1]) / 2
    if not signed:
        bounds[0] = 0
    return values.to(device), bounds.to(device)


def blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def empty_moment(numel: int, device: torch.device, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of `numel` zeros."""
    codes = torch.full((numel,), 127 if signed else 0, dtype=torch.uint8, device=device)
    return codes, torch.zeros(blocks(numel), dtype=torch.float32, device=device)


@torch.no_grad()
def quantize_moment(x: Tensor, codes: Tensor, scales: Tensor, *, signed: bool, finite: Tensor | None = None) -> None:
    """Write what stands for `x` [n] fp32 into `codes` [n] uint8 and `scales` [blocks(n)] fp32; nothing where `finite` is False."""
    padded = torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    largest = padded.abs().amax(dim=1)
    shares = padded / torch.where(largest > 0, largest, 1)[:, None]
    found = torch.bucketize(shares, code_values(signed, x.device)[1], out_int32=True).view(-1)[: x.numel()].to(torch.uint8)
    codes.copy_(found if finite is None else torch.where(finite, found, codes))
    scales.copy_(largest if finite is None else torch.where(finite, largest, scales))


@torch.no_grad()
def dequantize_moment(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """[n] fp32."""
    values = code_values(signed, codes.device)[0][codes.int()]
    return values * scales.repeat_interleave(BLOCK)[: codes.numel()]
