"""What the emulator itself finds, and that results do not depend on the order in which it runs threads."""

from __future__ import annotations

import ctypes

import pytest
import torch

from framework.kernels.adamw import adamw_
from framework.kernels.cross_entropy import cross_entropy_
from framework.kernels.embedding import embedding
from framework.kernels.quantize import dequantize_sum_quantize, quantize
from framework.kernels.rms_norm import add_rms_norm
from framework.kernels.rope import rope
from framework.kernels.shard import ShardCopies, adam_range
from framework.kernels.sparse_attention import block_pattern, sparse_attention
from framework.kernels.square_sum import square_sum
from framework.kernels.swiglu import swiglu
from framework.kernels.top_k import top_k
from tests.kernels.emulated import report, schedule
from tests.kernels.tolerance import randn

REPORTS = {
    "divergent_barrier": "divergent __syncthreads",
    "barrier_never_reached": "deadlock",
    "lane_outside_its_mask": "not in its own mask",
    "mask_with_absent_lanes": "deadlock",
    "too_much_shared": "more shared memory",
    "impossible_launch": "no device can do",
}


@pytest.mark.parametrize("fault", REPORTS)
def test_a_broken_rule_is_reported_and_fails_the_launch(emulated_library, fault: str):
    handle = ctypes.CDLL(str(emulated_library.path))
    assert handle.run_planted_fault(fault.encode()) in (9, 719)
    assert REPORTS[fault] in report(emulated_library.path)
    assert handle.run_planted_fault(b"nothing_wrong") == 0 and report(emulated_library.path) == ""


def test_a_report_names_the_lines_at_which_threads_wait(emulated_library):
    ctypes.CDLL(str(emulated_library.path)).run_planted_fault(b"barrier_never_reached")
    found = report(emulated_library.path)
    assert "32 thread(s) wait at" in found and "planted_faults.cu:" in found


@pytest.mark.parametrize("fault", ["missing_syncthreads", "missing_syncwarp", "uninitialised_shared"])
def test_poisoned_shared_memory_makes_wrong_values(emulated_library, fault: str):
    """In at least one schedule: each of them shows one side of a race."""
    handle = ctypes.CDLL(str(emulated_library.path))
    seen = set()
    for order in ("forwards", "backwards", "random"):
        schedule(emulated_library.path, order)
        seen.add(handle.run_planted_fault(fault.encode()))
    schedule(emulated_library.path, "forwards")
    assert 1 in seen or fault == "missing_syncwarp"  # a shuffle makes all lanes meet here: only the thread sanitizer sees that one


def everything() -> list[torch.Tensor]:
    """Results of every kernel with more than one thread's work in a sum."""
    dtype, n = torch.bfloat16, 3000
    results = []
    master, m, v = randn(n), torch.zeros(n), torch.zeros(n)
    copies = ShardCopies(data=torch.zeros(n, dtype=dtype), quantized=torch.zeros(n, dtype=torch.int8), scales=torch.zeros(47))
    ranges = [adam_range(3, n, lr=0.1, weight_decay=0.1, step=1, betas=(0.9, 0.99))]
    adamw_(master, m, v, randn(n, dtype=dtype, seed=1), ranges, betas=(0.9, 0.99), eps=1e-8, copies=copies)
    results += [master, m, v, copies.data, copies.quantized, copies.scales, square_sum(master)]
    error = randn(n, seed=2, scale=0.01)
    q, scales = quantize(master, error=error)
    results += [q, scales, error, *dequantize_sum_quantize(torch.stack((q, q)), torch.stack((scales, scales)), n, sum_dtype=dtype)]
    leaves = [randn(5, 1100, dtype=dtype, seed=seed).requires_grad_() for seed in range(2)] + [randn(1100, dtype=dtype).requires_grad_()]
    y, total = add_rms_norm(*leaves, 1e-5)
    z = swiglu(y, total)
    results += [y, z, *torch.autograd.grad(z.sum() + top_k(y, 100).sum(), leaves)]
    logits = randn(3, 1000, dtype=dtype)
    results += [cross_entropy_(logits, torch.tensor([1, -100, 999])), logits, rope(randn(1, 3, 2, 32), randn(3, 16), randn(3, 16))]
    table = randn(4, 40, dtype=dtype).requires_grad_()
    results += torch.autograd.grad(embedding(torch.arange(300) % 3, table).square().sum(), table)
    q, k, v = (randn(1, heads, 70, 16, dtype=dtype).requires_grad_() for heads in (2, 1, 1))
    out = sparse_attention(q, k, v, block_pattern(70, 32, local_blocks=2))
    return results + [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]


def test_every_schedule_gives_the_same_bits(device, request):
    if device.type == "cuda":
        pytest.skip("a GPU chooses its own order")
    path = request.getfixturevalue("emulated_library").path
    expected = everything()
    for order, seed in (("backwards", 0), ("random", 1), ("random", 2)):
        schedule(path, order, seed)
        try:
            got = everything()
        finally:
            schedule(path, "forwards")
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
