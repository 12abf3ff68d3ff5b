"""Times of the CUDA kernels on this GPU, each beside the bytes that it must move and torch's own operation.

    python scripts/bench/cuda_kernels.py                 a table, and with --json FILE the same numbers
    python scripts/bench/cuda_kernels.py --emulated      on the CPU through the emulator, tiny sizes: shows that it runs, times mean nothing

`floor ms` is bytes / the bandwidth of a large device-to-device copy, measured first; `of floor` is how close the kernel comes to it. Sizes
are those of an 8B Llama on 8192 tokens. Times are medians of launches timed one by one with events, after other data filled the caches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from framework.kernels import library as kernels
from framework.kernels.adamw import adamw_
from framework.kernels.cast import cast_
from framework.kernels.cross_entropy import cross_entropy_
from framework.kernels.embedding import embedding
from framework.kernels.nf4 import nf4_dequantize
from framework.kernels.quantize import dequantize, dequantize_sum_quantize, quantize
from framework.kernels.rms_norm import add_rms_norm, rms_norm
from framework.kernels.rope import rope
from framework.kernels.shard import ShardCopies, adam_range
from framework.kernels.sparse_attention import block_pattern, sparse_attention
from framework.kernels.square_sum import square_sum
from framework.kernels.swiglu import swiglu
from framework.kernels.top_k import top_k

BF16 = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Case:
    """`ours` and `torchs` do the same work; `moved_bytes` is the least that has to be read and written for it."""

    name: str
    moved_bytes: int
    ours: Callable[[], object]
    torchs: Callable[[], object] | None


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    megabytes: float
    floor_ms: float
    ours_ms: float
    torch_ms: float | None


class Timer:
    """Milliseconds of a call on `device`."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self.other_data = torch.zeros(2**28 if device.type == "cuda" else 1, dtype=torch.int8, device=device)

    def __call__(self, call: Callable[[], object]) -> float:
        times = []
        for turn in range(self.repeats + 2):
            self.other_data.zero_()  # evicts the L2 cache
            if self.device.type == "cuda":
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                call()
                stop.record()
                stop.synchronize()
                elapsed = start.elapsed_time(stop)
            else:
                begun = time.perf_counter()
                call()
                elapsed = (time.perf_counter() - begun) * 1e3
            if turn >= 2:
                times.append(elapsed)
        return sorted(times)[len(times) // 2]


def backward_of(outputs: torch.Tensor | tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    """The backward pass alone, again and again."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = tuple(torch.randn_like(output) for output in outputs)
    return lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True)


def cases(device: torch.device, small: bool) -> list[Case]:
    made = flat_cases(device, 3000 if small else 2**27)
    made += layer_cases(device, *((16, 256, 512, 1000) if small else (8192, 4096, 14336, 128256)))
    return made + attention_cases(device, 64 if small else 4096)


def flat_cases(device: torch.device, numel: int) -> list[Case]:
    def randn(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(numel, device=device, dtype=dtype)

    betas = 0.9, 0.95
    master, m, v, grad = randn(), torch.zeros(numel, device=device), torch.zeros(numel, device=device), randn(BF16)
    copies, factor = ShardCopies(data=torch.empty_like(grad)), torch.ones(1, device=device)
    ranges = [adam_range(0, numel, lr=1e-3, weight_decay=0.1, step=1, betas=betas)]
    parameter = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=betas, fused=True)

    def torchs_step() -> None:
        parameter.grad = grad.float()
        optimizer.step()
        copies.data.copy_(parameter.detach())

    q, scales = quantize(grad)
    parts = torch.stack((q, q, q, q)), torch.stack((scales, scales, scales, scales))
    wide, narrow = torch.empty(numel, device=device), torch.empty_like(grad)
    nibbles, absmax = torch.zeros(numel // 2, dtype=torch.uint8, device=device), torch.ones(-(-numel // 64), device=device)
    return [
        Case(
            name="AdamW, bf16 gradient in, bf16 copy out",
            moved_bytes=28 * numel,
            ours=lambda: adamw_(master, m, v, grad, ranges, betas=betas, eps=1e-8, grad_factor=factor, copies=copies),
            torchs=torchs_step,
        ),
        Case(
            name="sum of squares, bf16",
            moved_bytes=2 * numel,
            ours=lambda: square_sum(grad),
            torchs=lambda: torch.linalg.vector_norm(grad, dtype=torch.float32),
        ),
        Case(name="cast bf16 to fp32", moved_bytes=6 * numel, ours=lambda: cast_(wide, grad), torchs=lambda: wide.copy_(grad)),
        Case(name="quantise bf16 to int8", moved_bytes=3 * numel, ours=lambda: quantize(grad, out=(q, scales)), torchs=None),
        Case(name="dequantise int8 to bf16", moved_bytes=3 * numel, ours=lambda: dequantize(q, scales, numel, out=narrow), torchs=None),
        Case(name="sum of 4 int8 parts to int8", moved_bytes=5 * numel, ours=lambda: dequantize_sum_quantize(*parts, numel), torchs=None),
        Case(name="nf4 to bf16", moved_bytes=5 * numel // 2, ours=lambda: nf4_dequantize(nibbles, absmax, numel, out=narrow), torchs=None),
    ]


def layer_cases(device: torch.device, tokens: int, width: int, inner: int, vocabulary: int) -> list[Case]:
    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=BF16).requires_grad_()

    x, residual, weight, gate, up = leaf(tokens, width), leaf(tokens, width), leaf(width), leaf(tokens, inner), leaf(tokens, inner)
    n, n_inner, head_dim = tokens * width, tokens * inner, 128 if width % 128 == 0 else 64
    heads = leaf(1, tokens, width // head_dim, head_dim).detach()
    angles = torch.randn(tokens, head_dim // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    wide_cos, wide_sin = (torch.cat((table, table), -1)[:, None].to(BF16) for table in (cos, sin))
    logits = torch.randn(tokens // 2, vocabulary, device=device, dtype=BF16)
    labels, ids = (torch.randint(0, vocabulary, (size,), device=device) for size in (tokens // 2, tokens))
    table = leaf(vocabulary, width)

    def torchs_rope() -> torch.Tensor:
        first, second = heads.chunk(2, -1)
        return heads * wide_cos + torch.cat((-second, first), -1) * wide_sin

    def torchs_cross_entropy() -> torch.Tensor:
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(leaf.float(), labels, reduction="sum"), leaf)[0]

    def torchs_sum_and_norm() -> torch.Tensor:
        return F.rms_norm(x + residual, (width,), weight, 1e-5)

    norm, torchs_norm = rms_norm(x, weight, 1e-5), F.rms_norm(x, (width,), weight, 1e-5)
    product, torchs_product = swiglu(gate, up), F.silu(gate) * up
    rows, torchs_rows = embedding(ids, table), F.embedding(ids, table)
    return [
        Case(
            name="RMSNorm forward",
            moved_bytes=4 * n,
            ours=lambda: rms_norm(x, weight, 1e-5),
            torchs=lambda: F.rms_norm(x, (width,), weight, 1e-5),
        ),
        Case(
            name="RMSNorm backward",
            moved_bytes=6 * n,
            ours=backward_of(norm, (x, weight)),
            torchs=backward_of(torchs_norm, (x, weight)),
        ),
        Case(
            name="add + RMSNorm forward",
            moved_bytes=8 * n,
            ours=lambda: add_rms_norm(x, residual, weight, 1e-5),
            torchs=torchs_sum_and_norm,
        ),
        Case(name="rotary positions", moved_bytes=4 * n, ours=lambda: rope(heads, cos, sin), torchs=torchs_rope),
        Case(name="SwiGLU forward", moved_bytes=6 * n_inner, ours=lambda: swiglu(gate, up), torchs=lambda: F.silu(gate) * up),
        Case(
            name="SwiGLU backward",
            moved_bytes=10 * n_inner,
            ours=backward_of(product, (gate, up)),
            torchs=backward_of(torchs_product, (gate, up)),
        ),
        Case(
            name="cross-entropy with gradient",
            moved_bytes=6 * logits.numel(),
            ours=lambda: cross_entropy_(logits, labels),
            torchs=torchs_cross_entropy,
        ),
        Case(
            name="embedding backward",
            moved_bytes=2 * n + 2 * table.numel(),
            ours=backward_of(rows, (table,)),
            torchs=backward_of(torchs_rows, (table,)),
        ),
        Case(name="top-k of a tenth", moved_bytes=4 * n_inner, ours=lambda: top_k(gate.detach(), inner // 10), torchs=None),
    ]


def attention_cases(device: torch.device, tokens: int) -> list[Case]:
    q, k, v = (torch.randn(1, 8, tokens, 64, device=device, dtype=BF16).requires_grad_() for _ in range(3))
    pattern = block_pattern(tokens, 64, local_blocks=4, global_blocks=1)
    mask = pattern.mask(tokens, True).to(device)
    ours, torchs = sparse_attention(q, k, v, pattern), F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    n = q.numel()
    return [
        Case(
            name="block-sparse attention forward",
            moved_bytes=8 * n,
            ours=lambda: sparse_attention(q, k, v, pattern),
            torchs=lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        ),
        Case(
            name="block-sparse attention backward",
            moved_bytes=16 * n,
            ours=backward_of(ours, (q, k, v)),
            torchs=backward_of(torchs, (q, k, v)),
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("--emulated", action="store_true", help="on the CPU, with the emulated library")
    options = parser.parse_args()
    device = torch.device("cpu" if options.emulated else "cuda")
    with contextlib.ExitStack() as stack:
        if options.emulated:
            from tests.kernels.emulated import build

            stack.enter_context(kernels.substitute("cpu", kernels.Library("emulated", build("plain"))))
        kernels.choose("compiled")
        timer = Timer(device, 2 if options.emulated else 10)
        bytes_per_ms = copy_bytes_per_ms(device, timer, 2**20 if options.emulated else 2**30)
        rows = [measure(case, timer, bytes_per_ms) for case in cases(device, options.emulated)]
    print(f"copy: {bytes_per_ms / 1e9:.2f} TB/s" + (" (emulated: no number here means anything)" if options.emulated else ""))
    print(f"{'kernel':<40}{'MB':>9}{'floor ms':>10}{'ours ms':>9}{'of floor':>9}{'torch ms':>10}{'torch / ours':>14}")
    for row in rows:
        of_torch = f"{row.torch_ms:>10.3f}{row.torch_ms / row.ours_ms:>13.2f}x" if row.torch_ms else f"{'-':>10}{'-':>14}"
        print(f"{row.name:<40}{row.megabytes:>9.0f}{row.floor_ms:>10.3f}{row.ours_ms:>9.3f}{row.floor_ms / row.ours_ms:>8.0%} {of_torch}")
    if options.json:
        options.json.write_text(json.dumps({"copy_bytes_per_ms": bytes_per_ms, "rows": [asdict(row) for row in rows]}, indent=2))
    return 0


def copy_bytes_per_ms(device: torch.device, timer: Timer, numel: int) -> float:
    """Read and written bytes of a large copy."""
    source = torch.zeros(numel, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * numel / timer(lambda: target.copy_(source))


def measure(case: Case, timer: Timer, bytes_per_ms: float) -> Row:
    return Row(
        name=case.name,
        megabytes=case.moved_bytes / 1e6,
        floor_ms=case.moved_bytes / bytes_per_ms,
        ours_ms=timer(case.ours),
        torch_ms=timer(case.torchs) if case.torchs else None,
    )


if __name__ == "__main__":
    sys.exit(main())
