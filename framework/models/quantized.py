"""Frozen linear layers in 4 or 8 bits (QLoRA, arXiv:2305.14314): the layer, and quantising a pretrained model while it is read.

Every `block` elements of the flattened weight share an fp32 scale; nf4 takes 4 bits an element and int8 8, and the scales 32 / block
more (0.5 with blocks of 64; they are not quantised a second time). Embeddings, norms, biases and the head stay floating point.

    layer.weight_codes    uint8 [out * in / 2 or out * in]    integers that are not trained: an engine shards them like any frozen parameter
    layer.weight_scales   uint8 [4 * blocks]                   fp32, as bytes

Unusual: an element range of codes or scales needs the float elements of its own blocks alone, so `QuantizedReader` makes the same bytes for
every split into ranges, and no rank ever holds the float model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from framework.config.schema import PeftConfig
from framework.kernels.quantized_linear import (
    SCALE_BYTES,
    codes_per_byte,
    dequantize_weight,
    quantize_weight,
    quantized_linear,
    quantized_nbytes,
)

Read = Callable[[str, int, int], Tensor]
CODES, SCALES = "weight_codes", "weight_scales"
ELEMENTS_AT_ONCE = 1 << 22
"""Most float elements that are held while a range is quantised; a multiple of every block."""


class QuantizedLinear(nn.Module):
    """x W^T + bias, W [out, in] as `config` says; nothing of it is trained. W is dequantised for each product and again in its backward.

    Its first weights are zero: quantised ones come from a reader or by `quantize_`.
    """

    def __init__(self, inputs: int, outputs: int, config: PeftConfig, *, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.format, self.block = config.base, config.base_block
        codes, scales = quantized_nbytes(inputs * outputs, self.format, self.block)
        self.weight_codes = nn.Parameter(torch.zeros(codes, dtype=torch.uint8), requires_grad=False)
        self.weight_scales = nn.Parameter(torch.zeros(scales, dtype=torch.uint8), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(outputs), requires_grad=False) if bias else None

    def quantize_(self, weight: Tensor) -> None:
        """Take `weight` [out, in]."""
        for mine, new in zip((self.weight_codes, self.weight_scales), quantize_weight(weight, self.format, self.block), strict=True):
            mine.data.copy_(new)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """W [out, in]: what the layer multiplies with."""
        numel = self.in_features * self.out_features
        weight = dequantize_weight(self.weight_codes, self.weight_scales, numel, self.format, self.block, dtype)
        return weight.view(self.out_features, self.in_features)

    def product(self, x: Tensor) -> Tensor:
        """x W^T, [..., in] -> [..., out]."""
        return quantized_linear(x, self.weight_codes, self.weight_scales, self.out_features, self.in_features, self.format, self.block)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x) if self.bias is None else self.product(x) + self.bias


class QuantizedReader:
    """`read` for layers that are quantised: the codes, the scales, and what comes out of them, of the float weights that `read` gives.

    `shapes`: (out, in) of every quantised layer, by its name.
    """

    def __init__(self, read: Read, shapes: dict[str, tuple[int, int]], config: PeftConfig) -> None:
        self._read, self._shapes, self._format, self._block = read, shapes, config.base, config.base_block

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter `name`."""
        layer, _, kind = name.rpartition(".")
        if kind == CODES:
            per_byte = codes_per_byte(self._format)
            parts = [codes for _, codes, _ in self._quantized(layer, start * per_byte, stop * per_byte)]
            return _cut(parts, start - self._first(start * per_byte) // per_byte, stop - start)
        if kind == SCALES:
            first, last = start // SCALE_BYTES, -(-stop // SCALE_BYTES)
            parts = [scales for *_, scales in self._quantized(layer, first * self._block, last * self._block)]
            return _cut(parts, start - first * SCALE_BYTES, stop - start)
        return self._read(name, start, stop)

    def dequantized(self, layer: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened weight of `layer` as the model will see it, in fp32."""
        parts = [
            dequantize_weight(codes, scales, numel, self._format, self._block, torch.float32)
            for numel, codes, scales in self._quantized(layer, start, stop)
        ]
        return _cut(parts, start - self._first(start), stop - start)

    def _first(self, element: int) -> int:
        """Where the block that holds `element` begins."""
        return element // self._block * self._block

    def _quantized(self, layer: str, start: int, stop: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(elements, codes, scales) of the whole blocks that hold elements [start, stop), so many at a time."""
        outputs, inputs = self._shapes[layer]
        begin, end = self._first(start), min(-(-stop // self._block) * self._block, outputs * inputs)
        for at in range(begin, end, ELEMENTS_AT_ONCE):
            weight = self._read(f"{layer}.weight", at, min(at + ELEMENTS_AT_ONCE, end))
            yield weight.numel(), *quantize_weight(weight, self._format, self._block)


def _cut(parts: list[Tensor], start: int, numel: int) -> Tensor:
    """`numel` elements from `start` on of `parts` put together."""
    return torch.cat(parts)[start : start + numel] if parts else torch.empty(0, dtype=torch.uint8)
