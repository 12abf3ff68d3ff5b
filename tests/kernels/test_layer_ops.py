"""Layers as operations of torch: registered rightly (`opcheck`), no break in a compiled graph, the reference where there is no library."""

from __future__ import annotations

import pytest
import torch

import framework.kernels.library as kernels
from framework.kernels.cross_entropy import cross_entropy
from framework.kernels.embedding import embedding
from framework.kernels.library import KernelError
from framework.kernels.linear_cross_entropy import linear_cross_entropy
from framework.kernels.quantized_linear import quantize_weight
from framework.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from framework.kernels.rope import rope
from framework.kernels.sparse_attention import block_pattern, sparse_attention
from framework.kernels.swiglu import swiglu
from framework.kernels.top_k import top_k
from tests.kernels.tolerance import randn


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return randn(*shape, seed=seed).requires_grad_()


def moved(arguments: tuple, device: torch.device) -> tuple:
    return tuple(one.detach().to(device).requires_grad_(one.requires_grad) if isinstance(one, torch.Tensor) else one for one in arguments)


def arguments() -> dict[str, tuple]:
    """Of every registered operation, on the CPU."""
    x, other, weight = leaf(3, 40), leaf(3, 40, seed=1), leaf(40)
    q, k, v = leaf(1, 2, 40, 16), leaf(1, 1, 40, 16), leaf(1, 1, 40, 16)
    tables = block_pattern(64, 32, local_blocks=1, global_blocks=1).tables(torch.device("cpu"))
    labels, ids = torch.tensor([1, -100, 39]), torch.randint(0, 5, (2, 70), generator=torch.Generator().manual_seed(0))
    plain = [tensor.detach() for tensor in (x, other, weight, q, k, v)]
    return {
        "rms_norm": (x, weight, 1e-5),
        "add_rms_norm": (x, other, weight, 1e-5),
        "rms_norm_backward": (plain[0], plain[1], plain[0], plain[2], torch.ones(3)),
        "swiglu": (x, other),
        "swiglu_backward": (plain[0], plain[1], plain[0]),
        "rope": (leaf(2, 3, 2, 8), randn(3, 4), randn(3, 4, seed=1), False),
        "cross_entropy": (x, labels),
        "cross_entropy_backward": (torch.ones(3), plain[0], labels),
        "linear_cross_entropy": (leaf(3, 8), leaf(40, 8), labels, 80, True, True),
        "embedding": (ids, leaf(5, 8), 1),
        "embedding_backward": (randn(2, 70, 8), ids, 5, 1),
        "quantized_matmul": (x, *quantize_weight(plain[0], "nf4", 64), 3, 40, "nf4", 64, True),
        "top_k": (x, 7, False),
        "sparse_attention": (q, k, v, *tables, 32, 0.25, True),
        "sparse_attention_backward": (plain[3], *plain[3:], plain[3], torch.ones(1, 2, 40), *tables, 32, 0.25, True),
    }


@pytest.mark.parametrize("name", arguments())
def test_opcheck_has_nothing_to_say(device, name: str):
    torch.library.opcheck(getattr(torch.ops.framework, name).default, moved(arguments()[name], device))


@pytest.mark.parametrize("name", ["add_rms_norm", "sparse_attention"])
def test_opcheck_has_nothing_to_say_where_there_is_no_library(reference_only, name: str):
    torch.library.opcheck(getattr(torch.ops.framework, name).default, arguments()[name])


@pytest.fixture
def on_emulator(emulated_library):
    with kernels.substitute("cpu", emulated_library):
        kernels.choose("compiled")
        yield
        kernels.choose("auto")


def network(x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Every layer once."""
    labels, pattern = torch.arange(6, device=x.device), block_pattern(32, 32, local_blocks=1)
    y, total = add_rms_norm(x, other, weight, 1e-5)
    y = swiglu(y, rms_norm(total, weight, 1e-5)) + embedding(labels % 3, table)
    heads = rope(y.view(1, 6, 2, 16), x.new_ones(6, 8), x.new_zeros(6, 8)).transpose(1, 2)
    y = sparse_attention(heads, heads, heads, pattern).transpose(1, 2).reshape(6, 32)
    return cross_entropy(top_k(y, 20), labels).sum() + linear_cross_entropy(y, total, labels, chunk_logits=12)


@pytest.mark.parametrize("mode", ["compiled", "reference"])
def test_a_compiled_network_is_one_graph_with_the_same_gradients(device, mode: str):
    kernels.choose(mode)
    torch._dynamo.reset()
    inputs = moved((leaf(6, 32), leaf(6, 32, seed=1), leaf(32), leaf(3, 32)), device)
    eager = torch.autograd.grad(network(*inputs), inputs)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    for got, want in zip(torch.autograd.grad(compiled(*inputs), inputs), eager, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_without_a_library_a_layer_is_its_reference_and_a_demand_for_one_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "_loaded", {"cpu": "it was not built"})
    x, weight = randn(3, 40), randn(40)
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    kernels.choose("compiled")
    try:
        with pytest.raises(KernelError, match="fw_rms_norm_forward cannot be used: it was not built"):
            rms_norm(x, weight, 1e-5)
    finally:
        kernels.choose("auto")


def test_fp64_and_meta_tensors_take_the_reference(on_emulator):
    kernels.choose("auto")
    x = leaf(3, 40).double()
    assert rms_norm(x, x[0].detach(), 1e-5).dtype == torch.float64
    assert swiglu(torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta")).device.type == "meta"


def test_transforms_of_torch_func_take_the_reference(device):
    """Their tensors have no memory that a kernel could read."""
    kernels.choose("auto")
    x, weight = (tensor.to(device) for tensor in (randn(3, 4, 40), randn(40)))

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, 1e-5).square().sum()

    leaf = weight.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(weight), torch.autograd.grad(loss(leaf), leaf)[0], rtol=1e-5, atol=1e-5)
    each = torch.func.vmap(lambda rows: swiglu(rows, rows))(x)
    torch.testing.assert_close(each, swiglu(x, x), rtol=1e-5, atol=1e-6)
    kernels.choose("compiled")
    try:
        with pytest.raises(KernelError, match="fw_swiglu_forward does not know torch.func's transforms"):
            torch.func.vmap(lambda rows: swiglu(rows, rows))(x)
    finally:
        kernels.choose("auto")


def test_a_gradient_of_a_gradient_is_refused(device):
    kernels.choose("auto")
    x, weight = moved((leaf(3, 40), leaf(40)), device)
    (first,) = torch.autograd.grad(rms_norm(x, weight, 1e-5).square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()
