"""The chunked cross-entropy against its slow reference."""

from __future__ import annotations

import math

import pytest
import torch

from framework.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference


def inputs(dtype: torch.dtype, tokens: int = 23, width: int = 12, vocabulary: int = 50) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (tokens,), generator=generator)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 100])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_loss_and_gradients_equal_the_reference(dtype: torch.dtype, tolerance: float, chunk_tokens: int):
    hidden, weight, labels = inputs(dtype)
    expected = linear_cross_entropy_reference(hidden, weight, labels)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_logits=chunk_tokens * 50)
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    expected_grads = torch.autograd.grad(expected * 0.37, (hidden, weight))
    grads = torch.autograd.grad(loss * 0.37, (hidden, weight))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.dtype == dtype
        assert (grad - expected_grad).norm() <= tolerance * expected_grad.norm()


def test_a_frozen_weight_and_a_frozen_input_get_no_gradient():
    hidden, weight, labels = inputs(torch.float64)
    linear_cross_entropy(hidden, weight.detach(), labels).backward()
    (expected,) = torch.autograd.grad(linear_cross_entropy_reference(hidden, weight, labels), hidden)
    torch.testing.assert_close(hidden.grad, expected)
    assert weight.grad is None
    hidden.grad = None
    linear_cross_entropy(hidden.detach(), weight, labels).backward()
    (expected,) = torch.autograd.grad(linear_cross_entropy_reference(hidden, weight, labels), weight)
    torch.testing.assert_close(weight.grad, expected)
    assert hidden.grad is None


def test_no_tokens_give_zero_with_a_graph():
    hidden, weight, labels = inputs(torch.float32, tokens=0)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert loss.item() == 0 and hidden.grad.shape == (0, 12) and not weight.grad.any()


def test_a_second_backward_is_refused():
    hidden, weight, labels = inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already backpropagated"):
        loss.backward()


def test_all_logits_are_never_held():
    """The largest tensor that the loss makes is a chunk, or as large as the weight."""
    hidden, weight, labels = inputs(torch.float32, tokens=400, width=4, vocabulary=1000)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
        linear_cross_entropy(hidden, weight, labels, chunk_logits=10_000).backward()
    shapes = [shape for event in seen.events() for shape in event.input_shapes if all(isinstance(size, int) for size in shape)]
    largest = max(math.prod(shape) for shape in shapes)
    assert largest == 10_000


def test_under_autocast_it_computes_in_the_autocast_dtype():
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    expected = linear_cross_entropy_reference(hidden.detach().bfloat16(), weight.detach().bfloat16(), labels)
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
