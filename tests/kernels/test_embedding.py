"""The deterministic gradient of an embedding, against fp64."""

from __future__ import annotations

import pytest
import torch

from framework.kernels.embedding import embedding, embedding_reference
from tests.kernels.tolerance import DTYPES, assert_rounded, randn


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["mixed", "one token", "runs that end where chunks do", "few"])
def test_rows_are_sums_over_their_tokens(device, kind: str, dtype: torch.dtype):
    shuffled = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    ids = {
        "mixed": torch.randint(0, 5, (3, 67), generator=torch.Generator().manual_seed(0)),
        "one token": torch.full((2, 150), 3),
        "runs that end where chunks do": torch.arange(4).repeat_interleave(64)[shuffled],
        "few": torch.tensor([6]),
    }[kind].to(device)
    weight = randn(7, 300, dtype=dtype, device=device).requires_grad_()
    dy = randn(*ids.shape, 300, dtype=dtype, device=device)
    y = embedding(ids, weight, padding_index=1)
    assert torch.equal(y, embedding_reference(ids, weight))
    (grad,) = torch.autograd.grad(y, weight, dy)
    exact, absolute = (torch.zeros(7, 300, dtype=torch.float64, device=device) for _ in range(2))
    exact.index_add_(0, ids.flatten(), dy.flatten(0, -2).double())
    absolute.index_add_(0, ids.flatten(), dy.flatten(0, -2).double().abs())
    exact[1] = 0
    assert_rounded(grad, exact, 1e-6, of=absolute)


def test_no_tokens_give_no_gradient(device):
    weight = randn(7, 8, device=device).requires_grad_()
    (grad,) = torch.autograd.grad(embedding(torch.zeros(0, 3, dtype=torch.int64, device=device), weight).sum(), weight)
    assert not grad.any()
