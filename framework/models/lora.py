"""Low-rank adapters: a frozen linear layer W learns a small update, W + s B A (LoRA, arXiv:2106.09685).

    add_adapter(model, PeftConfig(method="lora", rank=16))     every other parameter is frozen
    read = AdapterReader(pretrained, config, seed).read            W from the file, A random, B zero: training starts at the model itself

s is alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732). With DoRA (arXiv:2402.09353) the rows of the sum are scaled to a
trained length: m * (W + s B A) / |W + s B A|, m starting at |W|; the length below the bar is taken as a constant, as the paper does.

With `base: nf4` or `int8` (QLoRA) W is what `quantized.py` keeps of it, and the adapter learns on top of that: W above is then the
dequantised matrix, also in DoRA's first lengths. The adapter itself is the same on disk and belongs to the original model.

Unusual: an adapted layer is a `Linear` with more parameters, so that W keeps its name and pretrained weights need no mapping.
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.config.errors import Problem, UserError
from framework.config.names import name_is_meant
from framework.config.schema import LlamaConfig, PeftConfig
from framework.config.suggest import closest
from framework.models.architecture import parameter_shapes
from framework.models.llama import Linear, Llama
from framework.models.pretrained import Pretrained
from framework.models.quantized import QuantizedLinear, QuantizedReader

ALL_LINEAR = "all-linear"
HEAD = "lm_head"
"""Has no adapter: the loss reads its weight without calling it."""


def scaling(config: PeftConfig) -> float:
    """s, the factor on B A."""
    return config.alpha / (math.sqrt(config.rank) if config.rslora else config.rank)


class Adapted(nn.Module):
    """Beside the frozen layer that a class also inherits: x W^T + s dropout(x) A^T B^T + bias, or with DoRA what the module's docstring
    says. Trained are `lora_A` [rank, in], `lora_B` [out, rank] and, for DoRA, `lora_magnitude` [out].

    The layer offers `dense(dtype)`, which is W [out, in], and `product(x)`, which is x W^T.
    """

    def attach(self, config: PeftConfig) -> None:
        """Freeze the layer and give it a new adapter."""
        self.requires_grad_(False)
        self.scaling, self.dropout = scaling(config), config.dropout
        self.lora_A = nn.Parameter(torch.empty(config.rank, self.in_features))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, config.rank))
        if config.dora:
            self.lora_magnitude = nn.Parameter(torch.empty(self.out_features))
        else:
            self.register_parameter("lora_magnitude", None)
        self.reset_adapter()

    def reset_adapter(self) -> None:
        """No update: A random, B zero."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # +-1 / sqrt(in)
        nn.init.zeros_(self.lora_B)
        if self.lora_magnitude is not None:
            with torch.no_grad():
                self.lora_magnitude.copy_(row_norms(self.dense(self.lora_A.dtype)))

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(x, self.dropout, self.training)
        update = self.scaling * F.linear(F.linear(dropped, self.lora_A), self.lora_B)
        y = super().forward(x)
        if self.lora_magnitude is None:
            return y + update
        with torch.no_grad():
            length = row_norms(self.dense(x.dtype) + self.scaling * (self.lora_B @ self.lora_A)).to(x.dtype)
        factor = self.lora_magnitude / length  # of everything but the bias; dropout is on all that is learned
        return y + (factor - 1) * self.product(dropped) + factor * update


class LoraLinear(Adapted, Linear):
    """An adapter on a weight in floating point."""

    def __init__(self, inputs: int, outputs: int, config: PeftConfig, *, bias: bool, std: float) -> None:
        super().__init__(inputs, outputs, bias=bias, std=std)
        self.attach(config)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "lora_A" in self._parameters:  # not yet while the base class is constructed
            self.reset_adapter()

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class QuantizedLoraLinear(Adapted, QuantizedLinear):
    """An adapter on a quantised weight (QLoRA)."""

    def __init__(self, inputs: int, outputs: int, config: PeftConfig, *, bias: bool) -> None:
        super().__init__(inputs, outputs, config, bias=bias)
        self.attach(config)


def row_norms(weight: Tensor) -> Tensor:
    """Euclidean length of each row, in at least fp32: [out, in] -> [out]."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.promote_types(weight.dtype, torch.float32))


def merged_rows(weight: Tensor, lora_a: Tensor, lora_b: Tensor, magnitude: Tensor | None, scale: float) -> Tensor:
    """Rows of the one matrix that does what layer and adapter do together, in fp32 (fp64 for fp64).

    `weight` [rows, in], `lora_a` [rank, in], `lora_b` [rows, rank], `magnitude` [rows] or None.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    merged = weight.to(dtype) + scale * (lora_b.to(dtype) @ lora_a.to(dtype))
    return merged if magnitude is None else merged * (magnitude.to(dtype) / row_norms(merged))[:, None]


def add_adapter(model: Llama, config: PeftConfig) -> None:
    """Give the layers that `config` means an adapter, quantise those that it says, and freeze everything else; `method: none` changes
    nothing.

    Raises UserError for a target that is no linear layer of the blocks.
    """
    if config.method == "none":
        return
    model.requires_grad_(False)
    adapted, quantized = set(target_names(model.config, config)), set(quantized_names(model.config, config))
    for name in linear_layers(model.config):
        if name in adapted or name in quantized:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, _changed(model.get_submodule(name), config, name in adapted, name in quantized))
    model.model.draws_random_numbers = config.dropout > 0


def _changed(old: Linear, config: PeftConfig, adapted: bool, quantized: bool) -> nn.Module:
    """The layer in the place of `old`."""
    bias = old.bias is not None
    with torch.device(old.weight.device):
        if quantized:
            new = (QuantizedLoraLinear if adapted else QuantizedLinear)(old.in_features, old.out_features, config, bias=bias)
            if not old.weight.is_meta:
                new.quantize_(old.weight)
        else:
            new = LoraLinear(old.in_features, old.out_features, config, bias=bias, std=old.std)
            new.weight = old.weight
    new.bias = old.bias
    new.to(old.weight.dtype)
    if adapted:
        new.reset_adapter()  # DoRA starts from the weight
    return new


def linear_layers(architecture: LlamaConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every layer that may have an adapter, in module order."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in parameter_shapes(architecture).items()
        if name.startswith("model.layers.") and name.endswith("_proj.weight")
    }


def target_names(architecture: LlamaConfig, config: PeftConfig) -> list[str]:
    """Full names of the layers that `config.targets` means, in module order. Raises UserError for a target that means none."""
    names = list(linear_layers(architecture))
    chosen: set[str] = set()
    for target in config.targets:
        found = names if target == ALL_LINEAR else [name for name in names if name_is_meant(target, name)]
        if not found:
            leaves = sorted({name.rpartition(".")[2] for name in names})
            expected = f"{ALL_LINEAR}, a regular expression for whole names like {names[0]}, or one of {', '.join(leaves)}"
            got = f"{target}, which is {'the head' if target == HEAD else 'no linear layer of this model'}"
            near = next(iter(closest(target.rpartition(".")[2], leaves)), ALL_LINEAR)
            mended = dict.fromkeys(near if other == target else other for other in config.targets)
            fix = ALL_LINEAR if near == ALL_LINEAR else ",".join(mended)
            raise UserError(Problem(path="peft.targets", got=got, expected=expected, fix=f"peft.targets=[{fix}]"))
        chosen.update(found)
    return [name for name in names if name in chosen]


def quantized_names(architecture: LlamaConfig, config: PeftConfig) -> list[str]:
    """Full names of the layers whose weight is quantised, in module order."""
    if config.method == "none" or config.base == "float":
        return []
    return target_names(architecture, config) if config.quantized_layers == "adapted" else list(linear_layers(architecture))


def adapter_shapes(architecture: LlamaConfig, config: PeftConfig) -> dict[str, tuple[int, ...]]:
    """Every trained parameter, in module order."""
    layers = linear_layers(architecture)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in target_names(architecture, config):
        outputs, inputs = layers[name]
        shapes |= {f"{name}.lora_A": (config.rank, inputs), f"{name}.lora_B": (outputs, config.rank)}
        if config.dora:
            shapes[f"{name}.lora_magnitude"] = (outputs,)
    return shapes


class Weights(Protocol):
    """What has parameters by name and element range."""

    def read(self, name: str, start: int, stop: int) -> Tensor: ...


class AdapterReader:
    """`read` for the engine: the weights of `pretrained`, quantised where `config` says so, with an adapter as `adapter` has it, else as
    `reset_adapter` begins one.

    The random A depends on (seed, name) alone, so it is the same for every stage and number of ranks.
    """

    def __init__(self, pretrained: Pretrained, config: PeftConfig, seed: int, adapter: Weights | None = None) -> None:
        self._adapter, self._rank, self._seed = adapter, config.rank, seed
        self._layers = linear_layers(pretrained.config)
        self._quantized = set(quantized_names(pretrained.config, config))
        self._base = QuantizedReader(pretrained.read, self._layers, config)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter `name`."""
        layer, _, kind = name.rpartition(".")
        if not kind.startswith("lora_"):
            return self._base.read(name, start, stop)
        if self._adapter is not None:
            return self._adapter.read(name, start, stop)
        _, inputs = self._layers[layer]
        if kind == "lora_A":
            generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{self._seed}/{name}".encode()).digest()[:7]))
            bound = 1 / math.sqrt(inputs)
            return torch.empty(self._rank * inputs).uniform_(-bound, bound, generator=generator)[start:stop]
        if kind == "lora_B":
            return torch.zeros(stop - start)
        start, stop = start * inputs, stop * inputs
        quantized = layer in self._quantized
        weight = self._base.dequantized(layer, start, stop) if quantized else self._base.read(f"{layer}.weight", start, stop)
        return row_norms(weight.view(-1, inputs))
