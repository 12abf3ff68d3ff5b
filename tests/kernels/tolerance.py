"""Comparison with fp64: a result rounded once to its dtype, plus a small error of the fp32 arithmetic before."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_rounded(actual: Tensor, exact: Tensor, relative: float, of: Tensor | None = None, units: float = 0.5) -> None:
    """|actual - exact| <= `units` last places of `actual`'s dtype + `relative` * `of` (by default the largest |exact|). NaN equals NaN."""
    info, exact = torch.finfo(actual.dtype), exact.double().to(actual.device)
    of = exact.abs().nan_to_num(0, 0).max() if of is None else of.double().to(actual.device)
    exact = torch.where(exact.abs() > info.max * (1 + info.eps / 4), exact.sign() * torch.inf, exact)
    same = (actual == exact) | (actual.isnan() & exact.isnan())
    allowed = units * info.eps * exact.abs() + relative * of + units * info.tiny * info.eps
    error = (actual.double() - exact).abs()
    wrong = ~(same | (error <= allowed))
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} elements are off; the first at {wrong.nonzero()[0].tolist()}: "
        f"{actual[wrong][0].item()} instead of {exact[wrong][0].item()}"
    )


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0, scale: float = 1.0) -> Tensor:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)


def unaligned(x: Tensor) -> Tensor:
    """A contiguous copy that does not start at a multiple of 16 bytes."""
    return torch.cat((x.new_zeros(1), x.detach().flatten()))[1:].view(x.shape)
