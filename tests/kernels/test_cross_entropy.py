"""Softmax cross-entropy on logits, against fp64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from framework.kernels.cross_entropy import cross_entropy, cross_entropy_, cross_entropy_reference_
from framework.kernels.library import KernelError
from framework.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from tests.kernels.tolerance import DTYPES, assert_rounded, randn, unaligned

FUNCTION = "fw_cross_entropy"


@pytest.mark.parametrize("vocabulary", [1, 50, 1003, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_and_gradient_are_those_of_fp64(layer_device, dtype: torch.dtype, vocabulary: int):
    labels = torch.tensor([0, vocabulary - 1, -100, vocabulary // 2], device=layer_device)
    for place in (torch.Tensor.clone, unaligned):
        logits = place(randn(4, vocabulary, dtype=dtype, device=layer_device, scale=4))
        exact = logits.double().requires_grad_()
        exact_loss = F.cross_entropy(exact, labels, reduction="none")
        (exact_grad,) = torch.autograd.grad(exact_loss.sum(), exact)
        for kept in (True, False):
            written = place(logits)
            loss = cross_entropy_(written, labels, with_grad=not kept, grad_factor=0.5)
            assert loss.dtype == torch.float32
            assert_rounded(loss, exact_loss.detach(), 2e-6, of=exact_loss.detach().abs().clamp(min=1))
            if kept:
                assert torch.equal(written, logits)
            else:
                assert_rounded(written, exact_grad * 0.5, 2e-6)
        leaf = place(logits).requires_grad_()
        (grad,) = torch.autograd.grad(cross_entropy(leaf, labels).sum(), leaf)
        assert_rounded(grad, exact_grad, 2e-6, units=1)


def test_minus_infinity_is_a_logit_like_others_and_nan_is_not_hidden(layer_device):
    logits = randn(3, 40, device=layer_device)
    logits[0, :39], logits[1, 3], logits[2, 5] = -math.inf, -math.inf, math.nan
    labels = torch.tensor([39, 1, 1], device=layer_device)
    expected = F.cross_entropy(logits.double(), labels, reduction="none")
    loss = cross_entropy_(logits, labels)
    assert loss[0] == 0 and loss[1].item() == pytest.approx(expected[1].item()) and loss[2].isnan()
    assert not logits[0].any() and logits[1, 3] == 0 and logits[2].isnan().all()


def test_no_rows_are_no_work_and_views_are_refused(layer_device):
    labels = torch.zeros(0, dtype=torch.int64, device=layer_device)
    assert cross_entropy_(torch.zeros(0, 7, device=layer_device), labels).shape == (0,)
    with pytest.raises(KernelError, match="logits is not contiguous"):
        cross_entropy_(torch.zeros(4, 6, device=layer_device).T, torch.zeros(6, dtype=torch.int64, device=layer_device))


def test_a_label_outside_of_the_vocabulary_touches_no_other_row(layer_device):
    logits = randn(3, 40, device=layer_device)
    expected = logits.clone()
    loss = cross_entropy_(logits, torch.tensor([1, 40, 2], device=layer_device))
    assert loss.isnan().tolist() == [False, True, False]
    cross_entropy_reference_(expected, torch.tensor([1, -100, 2], device=layer_device))
    torch.testing.assert_close(logits[::2], expected[::2])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_the_chunked_loss_uses_it(layer_device, dtype: torch.dtype, tolerance: float):
    hidden = randn(23, 12, dtype=dtype, device=layer_device).requires_grad_()
    weight = randn(50, 12, dtype=dtype, device=layer_device).requires_grad_()
    labels = torch.arange(23, device=layer_device)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_logits=5 * 50)
    expected = linear_cross_entropy_reference(hidden, weight, labels)
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    grads, expected_grads = (torch.autograd.grad(value * 0.37, (hidden, weight)) for value in (loss, expected))
    for grad, want in zip(grads, expected_grads, strict=True):
        assert grad.dtype == dtype and (grad - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("labels", [torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)], ids=["int32", "too_few"])
def test_labels_that_do_not_fit_are_refused(layer_device, labels: torch.Tensor):
    with pytest.raises(KernelError, match="got labels"):
        cross_entropy_(randn(3, 5, device=layer_device), labels.to(layer_device))


def test_the_gradient_is_rounded_once_whatever_it_is_multiplied_by(layer_device):
    logits, labels = randn(4, 50, dtype=torch.bfloat16, device=layer_device), torch.arange(4, device=layer_device)
    exact = logits.double().requires_grad_()
    (torch.nn.functional.cross_entropy(exact, labels, reduction="none") * 0.3).sum().backward()
    mine = logits.clone().requires_grad_()
    (cross_entropy(mine, labels) * 0.3).sum().backward()
    assert_rounded(mine.grad, exact.grad, 2e-6)
