"""The CPU library's layer functions by their ABI, for every dtype and instruction set, against torch in fp64.

`half_ulp` is what rounding the exact result to the tensor's dtype may cost; what a test adds to it is the fp32 arithmetic.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from framework.kernels.library import KernelError, dtype_code
from tests.kernels.shards import DTYPES

EPS = 1e-5


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values one element further into their storage: not aligned."""
    whole = torch.empty(x.numel() + 1, dtype=x.dtype)
    whole[1:] = x.flatten()
    return whole[1:].view(x.shape)


def make(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return shifted((torch.randn(shape) * scale).to(dtype))


def near(found: torch.Tensor, exact: torch.Tensor, extra: torch.Tensor | float) -> None:
    finfo = torch.finfo(found.dtype)
    half_ulp = 0.5 * finfo.eps * exact.abs() + (finfo.smallest_normal * finfo.eps if found.dtype == torch.float16 else 1e-37)
    wrong = ~((found.double() - exact).abs() <= half_ulp + extra)
    assert not wrong.any(), (found[wrong][:3], exact[wrong][:3])


def call(library, function: str, *args) -> None:
    library.call(function, *(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args), None)


ROWS = [(1, 1), (3, 5), (2, 64), (7, 129), (5, 4097), (64, 576)]


# ---- RMSNorm
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_forward(isa, cpu_library, dtype, with_residual):
    for rows, cols in ROWS:
        x, residual, weight = make(rows, cols, dtype=dtype), make(rows, cols, dtype=dtype), make(cols, dtype=dtype)
        y, total, rstd = torch.empty_like(x), torch.empty_like(x), torch.empty(rows)
        summed = (x.float() + residual.float()).to(dtype) if with_residual else x
        extra = (residual, weight, y, total) if with_residual else (None, weight, y, None)
        call(cpu_library, "fw_rms_norm_forward", x, *extra, rstd, rows, cols, EPS, dtype_code(dtype))
        exact_rstd = (summed.double().square().mean(-1) + EPS).rsqrt()
        near(rstd, exact_rstd, 2e-6 * exact_rstd)
        exact = summed.double() * exact_rstd[:, None] * weight.double()
        near(y, exact, 2e-6 * exact.abs())
        if with_residual:
            assert torch.equal(total, summed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_sum", [False, True])
def test_rms_norm_backward(isa, cpu_library, dtype, with_sum):
    for rows, cols in ROWS:
        x, dy, dsum, weight = (make(*shape, dtype=dtype) for shape in ((rows, cols), (rows, cols), (rows, cols), (cols,)))
        exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
        F.rms_norm(exact_x, (cols,), exact_weight, EPS).backward(dy.double())
        exact_dx = exact_x.grad + (dsum.double() if with_sum else 0)
        rstd = (x.double().square().mean(-1) + EPS).rsqrt().float()
        results = []
        for n_partial in (1, 4, rows + 3):
            dx, dweight, partial = torch.empty_like(x), torch.empty(cols), torch.full((n_partial, cols), float("nan"))
            last = (rstd, dx, dweight, partial, n_partial, rows, cols, dtype_code(dtype))
            call(cpu_library, "fw_rms_norm_backward", dy, dsum if with_sum else None, x, weight, *last)
            size = (dy.double() * weight.double()).abs().amax(-1, keepdim=True) * rstd[:, None].double() + dsum.double().abs()
            near(dx, exact_dx, 4e-6 * size)
            assert ((dweight.double() - exact_weight.grad).norm() <= 1e-5 * exact_weight.grad.norm() + 1e-6).item()
            results.append(dx)
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_rms_norm_backward_may_write_over_dy(isa, cpu_library):
    x, dy, weight, rstd = torch.randn(5, 70), torch.randn(5, 70), torch.randn(70), torch.rand(5)
    dx, dweight, partial = torch.empty_like(x), torch.empty(70), torch.empty(2, 70)
    for out in (dx, dy):
        call(cpu_library, "fw_rms_norm_backward", dy, None, x, weight, rstd, out, dweight, partial, 2, 5, 70, 0)
    assert torch.equal(dx, dy)


# ---- rotary embedding
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batched_tables", [False, True])
def test_rope_turns_and_turns_back(isa, cpu_library, dtype, batched_tables):
    for batch, tokens, heads, head_dim in ((1, 1, 1, 2), (2, 3, 2, 6), (2, 5, 3, 64), (2, 33, 9, 128)):
        x = make(batch, tokens, heads, head_dim, dtype=dtype)
        angles = torch.rand((batch, tokens, head_dim // 2) if batched_tables else (tokens, head_dim // 2)) * 6
        cos, sin = shifted(angles.cos()), shifted(angles.sin())
        stride = tokens * head_dim // 2 if batched_tables else 0
        y = torch.empty_like(x)
        sizes = (batch, tokens, heads, head_dim, stride)
        call(cpu_library, "fw_rope", x, cos, sin, y, *sizes, 0, dtype_code(dtype))
        first, second = x.double().chunk(2, -1)
        c, s = (table.double().unsqueeze(-2) for table in (cos, sin))
        exact = torch.cat((first * c - second * s, second * c + first * s), -1)
        length = (first.square() + second.square()).sqrt().repeat(1, 1, 1, 2)
        near(y, exact, 3e-7 * length)
        back = x.clone()
        call(cpu_library, "fw_rope", back, cos, sin, back, *sizes, 0, dtype_code(dtype))  # in place
        assert torch.equal(back, y)
        call(cpu_library, "fw_rope", back, cos, sin, back, *sizes, 1, dtype_code(dtype))
        near(back, x.double(), 2 * torch.finfo(dtype).eps * length)


# ---- SwiGLU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_forward_and_backward(isa, cpu_library, dtype):
    for numel in (0, 1, 7, 16, 100, 40_001):
        gate, up, dy = (make(numel, dtype=dtype, scale=scale) for scale in (4.0, 1.0, 1.0))
        y, dgate, dup = (torch.empty_like(gate) for _ in range(3))
        call(cpu_library, "fw_swiglu_forward", gate, up, y, numel, dtype_code(dtype))
        exact_gate, exact_up = gate.double().requires_grad_(), up.double().requires_grad_()
        exact = F.silu(exact_gate) * exact_up
        exact.backward(dy.double())
        near(y, exact.detach(), 1e-6 * exact.detach().abs())
        call(cpu_library, "fw_swiglu_backward", dy, gate, up, dgate, dup, numel, dtype_code(dtype))
        near(dup, exact_up.grad, 1e-6 * exact_up.grad.abs())
        near(dgate, exact_gate.grad, 1e-6 * (dy.double() * up.double()).abs() * (1 + gate.double().abs()))
        if numel:  # over its inputs, as documented
            call(cpu_library, "fw_swiglu_backward", dy, gate, up, gate, up, numel, dtype_code(dtype))
            assert torch.equal(gate, dgate) and torch.equal(up, dup)


def test_swiglu_far_from_zero_and_at_nan(isa, cpu_library):
    gate = torch.tensor([-1e30, -200.0, -90.0, -88.0, 0.0, 88.0, 200.0, 1e30, float("nan"), float("inf")])
    up, y = torch.ones(10), torch.empty(10)
    call(cpu_library, "fw_swiglu_forward", gate, up, y, 10, 0)
    torch.testing.assert_close(y, F.silu(gate.double()).float(), rtol=1e-6, atol=1e-34, equal_nan=True)


def test_the_exponential_is_within_two_ulp(isa, cpu_library):
    """Seen through the loss of two logits: its gradient is e^x / (1 + e^x)."""
    x = torch.linspace(-80, 0, 20_001)
    logits, loss = torch.stack((torch.zeros_like(x), x), 1).contiguous(), torch.empty(len(x))
    exact = torch.softmax(logits.double(), 1)[:, 1]
    call(cpu_library, "fw_cross_entropy", logits, torch.zeros(len(x), dtype=torch.int64), loss, len(x), 2, 2, 1.0, 1, 0)
    assert ((logits[:, 1].double() - exact).abs() <= 4 * 2**-23 * exact).all()


# ---- cross-entropy
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy_and_its_gradient(isa, cpu_library, dtype):
    for rows, vocab, stride in ((1, 1, 1), (3, 5, 8), (4, 1000, 1000), (2, 4099, 4200), (70, 259, 259)):
        whole = make(rows, stride, dtype=dtype, scale=5.0)
        before = whole.clone()
        labels = torch.randint(vocab, (rows,))
        labels[rows // 2 :: 3] = -100
        logits = whole[:, :vocab].double().requires_grad_()
        exact = F.cross_entropy(logits, labels, reduction="none")
        exact.sum().backward()
        loss = torch.empty(rows)
        sizes = (rows, vocab, stride)
        call(cpu_library, "fw_cross_entropy", whole, labels, loss, *sizes, 0.5, 0, dtype_code(dtype))
        near(loss, exact.detach(), 2e-6 * exact.detach().clamp_min(1))
        assert torch.equal(whole, before)
        call(cpu_library, "fw_cross_entropy", whole, labels, loss, *sizes, 0.5, 1, dtype_code(dtype))
        near(whole[:, :vocab], 0.5 * logits.grad, 2e-6)
        assert torch.equal(whole[:, vocab:], before[:, vocab:])
        assert (loss[labels == -100] == 0).all() and (whole[labels == -100, :vocab] == 0).all()


def test_cross_entropy_of_hard_rows(isa, cpu_library):
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[1e4, -1e4, 0.0], [-inf, 0.0, 1.0], [-inf, -inf, 3.0], [nan, 0.0, 0.0], [0.0, 1.0, 2.0], [-3e38, -3e38, -3e38]])
    labels, loss, grad = torch.tensor([0, 1, 2, 1, 7, 0]), torch.empty(6), logits.clone()
    call(cpu_library, "fw_cross_entropy", grad, labels, loss, 6, 3, 3, 1.0, 1, 0)
    expected = F.cross_entropy(logits[[0, 1, 2, 5]], labels[[0, 1, 2, 5]], reduction="none")
    torch.testing.assert_close(loss[[0, 1, 2, 5]], expected, rtol=1e-6, atol=1e-6)
    assert loss[3].isnan() and loss[4].isnan() and grad[3].isnan().any() and grad[4].isnan().all()
    assert grad[[0, 1, 2, 5]].isfinite().all() and grad[2].tolist() == [0, 0, 0]


def test_cross_entropy_does_not_depend_on_where_the_largest_logit_is(isa, cpu_library):
    vocab = 10_000
    for at in (0, 2047, 2048, vocab - 1):
        logits, loss = torch.zeros(1, vocab), torch.empty(1)
        logits[0, at] = 50.0
        exact = F.cross_entropy(logits.double(), torch.tensor([5]))
        call(cpu_library, "fw_cross_entropy", logits, torch.tensor([5]), loss, 1, vocab, vocab, 1.0, 0, 0)
        assert loss.item() == pytest.approx(exact.item(), rel=1e-6)


# ---- threads, empty, refusals
def test_the_same_bits_for_any_number_of_threads(isa, cpu_library):
    before, results = torch.get_num_threads(), []
    torch.manual_seed(0)
    x, dy, weight, rstd = torch.randn(300, 200), torch.randn(300, 200), torch.randn(200), torch.rand(300)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        dx, dweight, partial = torch.empty_like(x), torch.empty(200), torch.empty(8, 200)
        call(cpu_library, "fw_rms_norm_backward", dy, None, x, weight, rstd, dx, dweight, partial, 8, 300, 200, 0)
        results.append((dx, dweight))
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_no_rows_are_no_work(isa, cpu_library):
    empty, weight, dweight = torch.empty(0, 4), torch.ones(4), torch.full((4,), 7.0)
    call(cpu_library, "fw_rms_norm_forward", empty, None, weight, empty, None, empty, 0, 4, EPS, 0)
    call(cpu_library, "fw_rms_norm_backward", empty, None, empty, weight, empty, empty, dweight, torch.empty(1, 4), 1, 0, 4, 0)
    assert (dweight == 0).all()
    call(cpu_library, "fw_rope", empty, empty, empty, empty, 0, 5, 2, 4, 0, 0, 0)
    call(cpu_library, "fw_cross_entropy", empty, empty, empty, 0, 4, 4, 1.0, 1, 0)


def test_impossible_sizes_and_dtypes_are_refused(cpu_library):
    x = torch.zeros(8)
    for function, args in (
        ("fw_rms_norm_forward", (x, x, x, x, None, x, 1, 8, EPS, 0)),  # residual without sum
        ("fw_rms_norm_forward", (x, None, x, x, None, x, 1, 8, EPS, 3)),
        ("fw_rope", (x, x, x, x, 1, 1, 1, 7, 0, 0, 0)),
        ("fw_swiglu_forward", (x, x, x, -1, 0)),
        ("fw_cross_entropy", (x, x, x, 1, 8, 7, 1.0, 0, 0)),
    ):
        with pytest.raises(KernelError, match="it refuses these arguments"):
            call(cpu_library, function, *args)
