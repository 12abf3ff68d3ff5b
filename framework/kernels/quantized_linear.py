"""A linear layer whose frozen weight lies in memory as codes of 4 or 8 bits, and is a matrix only while it is multiplied with.

    codes, scales = quantize_weight(weight, "nf4", 64)              both uint8, flat
    y = quantized_linear(x, codes, scales, *weight.shape, "nf4", 64)    x W^T, with a gradient for x

The backward pass dequantises again instead of keeping the matrix: codes and scales are all that is saved. Quantising is `nf4.py` or, for
int8, `quantize.py`.

Unusual: scales are fp32 that are handed on as bytes, so that they can lie among codes in one buffer and no cast of floating-point
parameters rounds them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from framework.kernels.layer_op import layer_op
from framework.kernels.nf4 import nf4_dequantize, nf4_quantize
from framework.kernels.quantize import dequantize, quantize

Format = Literal["nf4", "int8"]
SCALE_BYTES = 4


def codes_per_byte(format: Format) -> int:
    return 2 if format == "nf4" else 1


def quantized_nbytes(numel: int, format: Format, block: int) -> tuple[int, int]:
    """Bytes of codes and of scales for `numel` elements, `block` of which share a scale."""
    return -(-numel // codes_per_byte(format)), SCALE_BYTES * -(-numel // block)


def quantize_weight(weight: Tensor, format: Format, block: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of a tensor taken as flat, uint8 of `quantized_nbytes`."""
    weight = weight.detach().contiguous()
    codes, scales = nf4_quantize(weight, block=block) if format == "nf4" else quantize(weight, bits=8, block=block)
    return codes.view(torch.uint8), scales.view(torch.uint8)


def dequantize_weight(codes: Tensor, scales: Tensor, numel: int, format: Format, block: int, dtype: torch.dtype) -> Tensor:
    """The `numel` elements that were quantised, in `dtype`: each code times its scale in fp32, rounded once."""
    absolute = scales.view(torch.float32)
    if format == "nf4":
        return nf4_dequantize(codes, absolute, numel, block=block, dtype=dtype)
    return dequantize(codes.view(torch.int8), absolute, numel, bits=8, block=block, dtype=dtype)


def quantized_linear(x: Tensor, codes: Tensor, scales: Tensor, outputs: int, inputs: int, format: Format, block: int) -> Tensor:
    """x W^T: [..., inputs] -> [..., outputs]; W [outputs, inputs] dequantised in the dtype of `x`."""
    return _quantized_matmul(x, codes, scales, outputs, inputs, format, block, True)


def _matmul(x: Tensor, codes: Tensor, scales: Tensor, outputs: int, inputs: int, format: Format, block: int, transposed: bool) -> Tensor:
    weight = dequantize_weight(codes, scales, outputs * inputs, format, block, x.dtype).view(outputs, inputs)
    return x @ (weight.T if transposed else weight)


def _setup_context(ctx, inputs: tuple, output: Tensor) -> None:
    _, codes, scales, *ctx.settings, ctx.transposed = inputs
    ctx.save_for_backward(codes, scales)


def _backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _quantized_matmul(dy, *ctx.saved_tensors, *ctx.settings, not ctx.transposed), *[None] * 7


_quantized_matmul = layer_op(
    "quantized_matmul(Tensor x, Tensor codes, Tensor scales, int outputs, int inputs, str format, int block, bool transposed) -> Tensor",
    _matmul,
    lambda x, codes, scales, outputs, inputs, format, block, transposed: x.new_empty(*x.shape[:-1], outputs if transposed else inputs),
    setup_context=_setup_context,
    backward=_backward,
)
