"""Low-rank adapters: a frozen linear layer W learns a small update, W + s B A (LoRA, arXiv:2106.09685).

    add_adapter(model, PeftConfig(method="lora", rank=16))     every other parameter is frozen
    read = AdapterReader(pretrained, config, seed).read            W from the file, A random, B zero: training starts at the model itself

s is alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732). With DoRA (arXiv:2402.09353) the rows of the sum are scaled to a
trained length: m * (W + s B A) / |W + s B A|, m starting at |W|; the length below the bar is taken as a constant, as the paper does.

Unusual: an adapted layer is a `Linear` with more parameters, so that W keeps its name and pretrained weights need no mapping.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.config.errors import Problem, UserError
from framework.config.schema import LlamaConfig, PeftConfig
from framework.models.architecture import parameter_shapes
from framework.models.llama import Linear, Llama
from framework.models.pretrained import Pretrained

ALL_LINEAR = "all-linear"
HEAD = "lm_head"
"""Has no adapter: the loss reads its weight without calling it."""
Read = Callable[[str, int, int], Tensor]


def scaling(config: PeftConfig) -> float:
    """s, the factor on B A."""
    return config.alpha / (math.sqrt(config.rank) if config.rslora else config.rank)


class LoraLinear(Linear):
    """x W^T + s dropout(x) A^T B^T + bias, or with DoRA what the module's docstring says; W [out, in] and bias are frozen, `lora_A`
    [rank, in], `lora_B` [out, rank] and, for DoRA, `lora_magnitude` [out] trained."""

    def __init__(self, inputs: int, outputs: int, config: PeftConfig, *, bias: bool, std: float) -> None:
        super().__init__(inputs, outputs, bias=bias, std=std)
        self.requires_grad_(False)
        self.scaling, self.dropout = scaling(config), config.dropout
        self.lora_A = nn.Parameter(torch.empty(config.rank, inputs))
        self.lora_B = nn.Parameter(torch.empty(outputs, config.rank))
        if config.dora:
            self.lora_magnitude = nn.Parameter(torch.empty(outputs))
        else:
            self.register_parameter("lora_magnitude", None)
        self.reset_adapter()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "lora_A" in self._parameters:  # not yet while the base class is constructed
            self.reset_adapter()

    def reset_adapter(self) -> None:
        """No update: A random, B zero."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # +-1 / sqrt(in)
        nn.init.zeros_(self.lora_B)
        if self.lora_magnitude is not None:
            with torch.no_grad():
                self.lora_magnitude.copy_(row_norms(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(x, self.dropout, self.training)
        update = self.scaling * F.linear(F.linear(dropped, self.lora_A), self.lora_B)
        y = F.linear(x, self.weight, self.bias)
        if self.lora_magnitude is None:
            return y + update
        with torch.no_grad():
            length = row_norms(self.weight + self.scaling * (self.lora_B @ self.lora_A)).to(x.dtype)
        factor = self.lora_magnitude / length  # of everything but the bias; dropout is on all that is learned
        return y + (factor - 1) * F.linear(dropped, self.weight) + factor * update


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
    """Give the layers that `config` means an adapter and freeze everything else; `method: none` changes nothing.

    Raises UserError for a target that is no linear layer of the blocks.
    """
    if config.method == "none":
        return
    model.requires_grad_(False)
    for name in target_names(model.config, config):
        parent, _, attribute = name.rpartition(".")
        old = model.get_submodule(name)
        with torch.device(old.weight.device):
            new = LoraLinear(old.in_features, old.out_features, config, bias=old.bias is not None, std=old.std)
        new.weight, new.bias = old.weight, old.bias
        new.to(old.weight.dtype)
        new.reset_adapter()  # DoRA starts from the weight
        setattr(model.get_submodule(parent), attribute, new)
    model.model.draws_random_numbers = config.dropout > 0


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
        found = names if target == ALL_LINEAR else [name for name in names if _means(target, name)]
        if not found:
            leaves = sorted({name.rpartition(".")[2] for name in names})
            expected = f"{ALL_LINEAR}, a regular expression for whole names like {names[0]}, or one of {', '.join(leaves)}"
            got = f"{target}, which is {'the head' if target == HEAD else 'no linear layer of this model'}"
            raise UserError(Problem(path="peft.targets", got=got, expected=expected, fix=f"peft.targets=[{ALL_LINEAR}]"))
        chosen.update(found)
    return [name for name in names if name in chosen]


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


def _means(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}") or re.fullmatch(target, name) is not None


class Weights(Protocol):
    """What has parameters by name and element range."""

    def read(self, name: str, start: int, stop: int) -> Tensor: ...


class AdapterReader:
    """`read` for the engine: the weights of `pretrained`, with an adapter as `adapter` has it, else as `reset_adapter` begins one.

    The random A depends on (seed, name) alone, so it is the same for every stage and number of ranks.
    """

    def __init__(self, pretrained: Pretrained, config: PeftConfig, seed: int, adapter: Weights | None = None) -> None:
        self._pretrained, self._adapter, self._rank, self._seed = pretrained, adapter, config.rank, seed
        self._layers = linear_layers(pretrained.config)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter `name`."""
        layer, _, kind = name.rpartition(".")
        if not kind.startswith("lora_"):
            return self._pretrained.read(name, start, stop)
        if self._adapter is not None:
            return self._adapter.read(name, start, stop)
        _, inputs = self._layers[layer]
        if kind == "lora_A":
            generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{self._seed}/{name}".encode()).digest()[:7]))
            bound = 1 / math.sqrt(inputs)
            return torch.empty(self._rank * inputs).uniform_(-bound, bound, generator=generator)[start:stop]
        if kind == "lora_B":
            return torch.zeros(stop - start)
        return row_norms(self._pretrained.read(f"{layer}.weight", start * inputs, stop * inputs).view(-1, inputs))
