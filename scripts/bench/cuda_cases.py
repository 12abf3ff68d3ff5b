"""What `cuda_kernels.py` times: every operation of the CUDA library, with the least work that it can be done with and torch's own way.

Sizes are those of an 8B Llama on 8192 tokens; `small` ones only show that a case runs. A test runs all of them on the emulator, and that no
function of the library is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.kernels.adamw import adamw_
from framework.kernels.cast import cast_
from framework.kernels.cross_entropy import cross_entropy_
from framework.kernels.embedding import embedding
from framework.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from framework.kernels.lion import lion_
from framework.kernels.nf4 import nf4_dequantize, nf4_dequantize_reference
from framework.kernels.quantize import (
    dequantize,
    dequantize_reference,
    dequantize_sum_quantize,
    dequantize_sum_quantize_reference,
    quantize,
    quantize_reference,
)
from framework.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from framework.kernels.rope import rope, rope_reference
from framework.kernels.sgd import sgd_
from framework.kernels.shard import ShardCopies, adam_range, split_master
from framework.kernels.sparse_attention import block_pattern, sparse_attention
from framework.kernels.square_sum import square_sum
from framework.kernels.swiglu import swiglu, swiglu_reference
from framework.kernels.top_k import top_k, top_k_reference

BF16 = torch.bfloat16
EPS = 1e-5
BETAS = 0.9, 0.95
PARTS = 4

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`ours` and `torchs` do the same work. `torchs` is torch's own operation, or where it has none the plain-torch reference."""

    name: str
    moved_bytes: float
    """The least that has to be read and written."""
    flops: float = 0
    """Of matrix products; 0: nothing but memory can limit it."""
    unit: Literal["bf16", "fp32"] = "bf16"
    """What the products are made with: tensor cores, or ordinary fp32 arithmetic."""
    ours: Call
    torchs: Call | None = None


def cases(device: torch.device, small: bool) -> list[Case]:
    numel, (tokens, width, inner, vocabulary) = 2**27, (8192, 4096, 14336, 128256)
    if small:
        numel, (tokens, width, inner, vocabulary) = 1500, (8, 256, 128, 300)
    made = optimizer_cases(device, numel) + flat_cases(device, numel) + layer_cases(device, tokens, width, inner)
    return made + vocabulary_cases(device, tokens, width, vocabulary) + attention_cases(device, 64 if small else 4096)


def backward_of(outputs: Tensor | tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> Call:
    """The backward pass alone, again and again."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = tuple(torch.randn_like(output) for output in outputs)
    return lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True)


def optimizer_cases(device: torch.device, n: int) -> list[Case]:
    """bf16 gradients in, bf16 copy out, fp32 master and state."""
    master, m, v = (torch.rand(n, device=device) for _ in range(3))
    grad = torch.randn(n, device=device, dtype=BF16)
    copies, factor = ShardCopies(data=torch.empty_like(grad)), torch.ones(1, device=device)
    ranges = [adam_range(0, n, lr=1e-3, weight_decay=0.1, step=1, betas=BETAS)]
    high, low = split_master(master)
    parameter = torch.nn.Parameter(master.clone())
    settings = {"grad_factor": factor, "copies": copies}
    momentum = {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "first_step": False}

    def torchs(optimizer: torch.optim.Optimizer) -> Call:
        def step() -> None:
            parameter.grad = grad.float()
            optimizer.step()
            copies.data.copy_(parameter.detach())

        return step

    def lion_in_torch() -> None:
        g = grad.float()
        master.mul_(1 - 1e-4).sub_(m.lerp(g, 1 - BETAS[0]).sign_(), alpha=1e-3)
        m.lerp_(g, 1 - BETAS[1])
        copies.data.copy_(master)

    return [
        Case(
            name="AdamW",
            moved_bytes=28 * n,
            ours=lambda: adamw_(master, m, v, grad, ranges, betas=BETAS, eps=1e-8, **settings),
            torchs=torchs(torch.optim.AdamW([parameter], lr=1e-3, betas=BETAS, fused=True)),
        ),
        Case(
            name="AdamW, master as bf16 and remainder",
            moved_bytes=26 * n,
            ours=lambda: adamw_(
                *(None, m, v, grad, ranges),
                **{"betas": BETAS, "eps": 1e-8, "grad_factor": factor, "copies": ShardCopies(data=high), "remainder": low},
            ),
        ),
        Case(
            name="Lion",
            moved_bytes=20 * n,
            ours=lambda: lion_(master, m, grad, ranges, betas=BETAS, **settings),
            torchs=lion_in_torch,
        ),
        Case(
            name="SGD with momentum",
            moved_bytes=20 * n,
            ours=lambda: sgd_(master, m, grad, ranges, **momentum, **settings),
            torchs=torchs(torch.optim.SGD([parameter], lr=1e-3, momentum=0.9, weight_decay=0.1, fused=True)),
        ),
    ]


def flat_cases(device: torch.device, n: int) -> list[Case]:
    wide, narrow = torch.randn(n, device=device), torch.randn(n, device=device, dtype=BF16)
    half, out, error = torch.empty(n, device=device, dtype=torch.float16), torch.empty_like(narrow), torch.zeros(n, device=device)
    eight, four = (quantize(narrow, bits=bits) for bits in (8, 4))
    parts = tuple(torch.stack((tensor,) * PARTS) for tensor in eight)
    nibbles, absmax = torch.zeros(-(-n // 2), dtype=torch.uint8, device=device), torch.ones(-(-n // 64), device=device)

    def cast(name: str, source: Tensor, target: Tensor) -> Case:
        moved = source.nbytes + target.nbytes
        return Case(name=f"cast {name}", moved_bytes=moved, ours=lambda: cast_(target, source), torchs=lambda: target.copy_(source))

    def squares(name: str, x: Tensor) -> Case:
        norm = lambda: torch.linalg.vector_norm(x, dtype=torch.float32)  # noqa: E731
        return Case(name=f"sum of squares, {name}", moved_bytes=x.nbytes, ours=lambda: square_sum(x), torchs=norm)

    return [
        squares("fp32", wide),
        squares("bf16", narrow),
        cast("bf16 to fp32", narrow, wide),
        cast("fp32 to bf16", wide, out),
        cast("fp32 to fp16", wide, half),
        Case(
            name="quantise bf16 to int8",
            moved_bytes=3 * n,
            ours=lambda: quantize(narrow, out=eight),
            torchs=lambda: quantize_reference(narrow),
        ),
        Case(
            name="quantise bf16 to int4",
            moved_bytes=2.5 * n,
            ours=lambda: quantize(narrow, bits=4, out=four),
            torchs=lambda: quantize_reference(narrow, bits=4),
        ),
        Case(
            name="quantise bf16 to int8, error feedback",
            moved_bytes=11 * n,
            ours=lambda: quantize(narrow, error=error, out=eight),
            torchs=lambda: quantize_reference(narrow, error=error),
        ),
        Case(
            name="dequantise int8 to bf16",
            moved_bytes=3 * n,
            ours=lambda: dequantize(*eight, n, out=out),
            torchs=lambda: out.copy_(dequantize_reference(*eight, n)),
        ),
        Case(
            name="dequantise int4 to bf16, added",
            moved_bytes=4.5 * n,
            ours=lambda: dequantize(*four, n, bits=4, out=out, add=True),
            torchs=lambda: out.add_(dequantize_reference(*four, n, bits=4)),
        ),
        Case(
            name=f"sum of {PARTS} int8 parts to int8",
            moved_bytes=(PARTS + 1) * n,
            ours=lambda: dequantize_sum_quantize(*parts, n),
            torchs=lambda: dequantize_sum_quantize_reference(*parts, n),
        ),
        Case(
            name="nf4 to bf16",
            moved_bytes=2.5 * n,
            ours=lambda: nf4_dequantize(nibbles, absmax, n, out=out),
            torchs=lambda: out.copy_(nf4_dequantize_reference(nibbles, absmax, n)),
        ),
    ]


def layer_cases(device: torch.device, tokens: int, width: int, inner: int) -> list[Case]:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=BF16).requires_grad_()

    x, residual, weight, gate, up = leaf(tokens, width), leaf(tokens, width), leaf(width), leaf(tokens, inner), leaf(tokens, inner)
    n, n_inner, head_dim = tokens * width, tokens * inner, 128
    heads = leaf(1, tokens, width // head_dim, head_dim)
    angles = torch.randn(tokens, head_dim // 2, device=device)
    tables = angles.cos(), angles.sin()
    kept, some = gate.detach(), inner // 10

    def pair(name: str, forward_bytes: float, backward_bytes: float, ours: Call, torchs: Call, inputs: tuple[Tensor, ...]) -> list[Case]:
        backward = {"ours": backward_of(ours(), inputs), "torchs": backward_of(torchs(), inputs)}
        return [
            Case(name=f"{name} forward", moved_bytes=forward_bytes, ours=ours, torchs=torchs),
            Case(name=f"{name} backward", moved_bytes=backward_bytes, **backward),
        ]

    return [
        *pair("RMSNorm", 4 * n, 6 * n, lambda: rms_norm(x, weight, EPS), lambda: rms_norm_reference(x, weight, EPS), (x, weight)),
        *pair(
            *("residual + RMSNorm", 8 * n, 8 * n),
            *(lambda: add_rms_norm(x, residual, weight, EPS), lambda: add_rms_norm_reference(x, residual, weight, EPS)),
            (x, residual, weight),
        ),
        *pair("RoPE", 4 * n, 4 * n, lambda: rope(heads, *tables), lambda: rope_reference(heads, *tables), (heads,)),
        *pair("SwiGLU", 6 * n_inner, 10 * n_inner, lambda: swiglu(gate, up), lambda: swiglu_reference(gate, up), (gate, up)),
        Case(name="top-k of a tenth", moved_bytes=4 * n_inner, ours=lambda: top_k(kept, some), torchs=lambda: top_k_reference(kept, some)),
    ]


def vocabulary_cases(device: torch.device, tokens: int, width: int, vocabulary: int) -> list[Case]:
    rows = tokens // 2
    logits = torch.randn(rows, vocabulary, device=device, dtype=BF16)
    labels, ids = (torch.randint(0, vocabulary, (size,), device=device) for size in (rows, tokens))
    table = torch.randn(vocabulary, width, device=device, dtype=BF16).requires_grad_()
    hidden = torch.randn(rows, width, device=device, dtype=BF16).requires_grad_()

    def torchs_loss() -> Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="none")

    def torchs_gradient() -> Tensor:
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(leaf.float(), labels, reduction="sum"), leaf)[0]

    def of_linear(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Call:
        return lambda: torch.autograd.grad(function(hidden, table, labels), (hidden, table))

    return [
        Case(
            name="cross-entropy",
            moved_bytes=logits.nbytes,
            ours=lambda: cross_entropy_(logits, labels, with_grad=False),
            torchs=torchs_loss,
        ),
        Case(
            name="cross-entropy with gradient",
            moved_bytes=3 * logits.nbytes,
            ours=lambda: cross_entropy_(logits, labels),
            torchs=torchs_gradient,
        ),
        Case(
            name="linear cross-entropy, both ways",
            moved_bytes=2 * hidden.nbytes + 2 * table.nbytes,
            flops=6 * rows * width * vocabulary,
            ours=of_linear(linear_cross_entropy),
            torchs=of_linear(linear_cross_entropy_reference),
        ),
        Case(
            name="embedding backward",
            moved_bytes=2 * tokens * width + table.nbytes,
            ours=backward_of(embedding(ids, table), (table,)),
            torchs=backward_of(F.embedding(ids, table), (table,)),
        ),
    ]


def attention_cases(device: torch.device, tokens: int) -> list[Case]:
    """The products of what the pattern lets a query see: 2 of them forwards, 5 backwards, in fp32 without tensor cores."""
    q, k, v = (torch.randn(1, 8, tokens, 64, device=device, dtype=BF16).requires_grad_() for _ in range(3))
    pattern = block_pattern(tokens, 64, local_blocks=4, global_blocks=1)
    mask = pattern.mask(tokens, True).to(device)
    product_flops = 2 * float(mask.sum()) * q.shape[1] * q.shape[3]

    def torchs() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return [
        Case(
            name="block-sparse attention forward",
            moved_bytes=4 * q.nbytes,
            flops=2 * product_flops,
            unit="fp32",
            ours=lambda: sparse_attention(q, k, v, pattern),
            torchs=torchs,
        ),
        Case(
            name="block-sparse attention backward",
            moved_bytes=8 * q.nbytes,
            flops=5 * product_flops,
            unit="fp32",
            ours=backward_of(sparse_attention(q, k, v, pattern), (q, k, v)),
            torchs=backward_of(torchs(), (q, k, v)),
        ),
    ]
