"""Flat shards for the tests of the optimizers, and AdamW, Lion and SGD in fp64 by their formulas."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.kernels.shard import ShardCopies, ShardRange, split_master

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COPIES = (None, *DTYPES, "remainder")
ODD_SIZES = (1, 3, 15, 16, 17, 64, 131, 4099, 70001)
EPSILON = torch.finfo(torch.float32).eps


@dataclass
class Shard:
    """A shard whose tensors start `skip` elements into their storage, so that nothing is aligned by luck."""

    master: Tensor | None
    states: list[Tensor]
    grad: Tensor
    copies: ShardCopies | None
    remainder: Tensor | None

    def parameters(self) -> Tensor:
        """fp32, a copy."""
        from framework.kernels.shard import join_master

        return join_master(self.copies.data, self.remainder) if self.master is None else self.master.clone()


def make_shard(numel: int, grad_dtype: torch.dtype, copy: torch.dtype | str | None, n_states: int, skip: int = 1, seed: int = 0) -> Shard:
    generator = torch.Generator().manual_seed(seed)

    def tensor(values: Tensor) -> Tensor:
        whole = torch.zeros(numel + skip, dtype=values.dtype)
        whole[skip:] = values
        return whole[skip:]

    master = tensor(torch.randn(numel, generator=generator))
    states = [tensor(torch.randn(numel, generator=generator).mul(0.1)), tensor(torch.rand(numel, generator=generator).mul(0.1))][:n_states]
    grad = tensor(torch.randn(numel, generator=generator).mul(8).to(grad_dtype))
    if copy == "remainder":
        high, low = split_master(master)
        return Shard(None, states, grad, ShardCopies(data=tensor(high)), tensor(low))
    copies = None if copy is None else ShardCopies(data=tensor(torch.zeros(numel, dtype=copy)))
    return Shard(master, states, grad, copies, None)


def three_ranges(numel: int, **settings: float) -> list[ShardRange]:
    """Different learning rates and weight decays, starts and stops at odd places, and a gap."""
    cuts = sorted({0, numel // 7, numel // 2 + 1 if numel > 2 else numel // 2, numel})
    ranges = [
        ShardRange(start=start, stop=stop, lr=0.01 * (index + 1), weight_decay=0.1 * index, **settings)
        for index, (start, stop) in enumerate(itertools.pairwise(cuts))
    ]
    return ranges[:1] + ranges[2:] if len(ranges) > 2 else ranges


def close(found: Tensor, expected: Tensor, size: Tensor, ulps: float) -> None:
    """Within `ulps` fp32 roundings of numbers as large as `size`; all fp64."""
    allowed = ulps * EPSILON * size.abs() + 1e-37
    wrong = ~((found.double() - expected).abs() <= allowed)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.numel()} elements, the first at {wrong.nonzero()[0].item()}"


def rounded_copy(master: Tensor, dtype: torch.dtype) -> Tensor:
    """What an optimizer writes besides `master`: a cast, in bf16 with ties away from zero (normal numbers)."""
    if dtype != torch.bfloat16:
        return master.to(dtype)
    mantissa, exponent = torch.frexp(master.double().abs())  # [0.5, 1)
    return torch.copysign(torch.ldexp((mantissa * 256 + 0.5).floor() / 256, exponent), master).to(dtype)
