"""Weights of a GGUF file (llama.cpp) behind the interface of `pretrained.Pretrained`, dequantised to fp32 on reading.

Unusual: converters to GGUF reorder the rows of Llama's query and key projections, because llama.cpp turns neighbouring rows as rotary
pairs where Hugging Face turns rows that are half a head apart. `_file_rows` undoes this. Only rows that are asked for are dequantised.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import gguf
import numpy
import torch
from torch import Tensor

from framework.config.errors import Problem, UserError
from framework.config.schema import ModelConfig
from framework.models.architecture import head_dim, parameter_shapes
from framework.models.gguf_format import Contents, TensorInfo, config_from_gguf, read_contents

TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GGUFModel:
    """A GGUF file of the Llama, Qwen2 or Qwen3 architecture."""

    def __init__(self, file: Path) -> None:
        self.tokenizer = ModelConfig(tokenizer=str(file))
        self.generation_config: dict = {}
        contents = read_contents(file)
        self.config = config_from_gguf(contents, str(file))
        self._shapes = {name: torch.Size(shape) for name, shape in parameter_shapes(self.config).items()}
        self._tensors = _match_tensors(contents, self._shapes, str(file))
        self._data = numpy.memmap(file, mode="r", dtype=numpy.uint8)

    def names(self) -> dict[str, torch.Size]:
        return self._shapes

    def read(self, name: str, start: int, stop: int) -> Tensor:
        info = self._tensors[name]
        kind = gguf.GGMLQuantizationType(info.type_number)
        columns = info.shape[-1]
        first, last = start // columns, -(-stop // columns)  # the rows that hold elements start:stop
        rows = _encoded_rows(self._data, info)[self._file_rows(name, first, last)]
        values = gguf.quants.dequantize(rows, kind).reshape(-1)[start - first * columns : stop - first * columns]
        return torch.from_numpy(numpy.array(values, dtype=numpy.float32))

    def _file_rows(self, name: str, first: int, last: int) -> slice | numpy.ndarray:
        """Which rows of the file are rows first:last of the Hugging Face parameter."""
        if self.config.family != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return slice(first, last)
        dim = head_dim(self.config)
        head, row = numpy.divmod(numpy.arange(first, last), dim)
        half, pair = numpy.divmod(row, dim // 2)  # Hugging Face: first halves of all pairs, then second halves
        return head * dim + 2 * pair + half


def _encoded_rows(data: numpy.ndarray, info: TensorInfo) -> numpy.ndarray:
    """A view of the tensor's bytes, [rows, bytes per row]; a vector is one row."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.type_number)]
    row_bytes = info.shape[-1] // block_elements * block_bytes
    rows = prod(info.shape[:-1])
    return data[info.offset : info.offset + rows * row_bytes].reshape(rows, row_bytes)


def _match_tensors(contents: Contents, shapes: dict[str, torch.Size], where: str) -> dict[str, TensorInfo]:
    """P28: each parameter's tensor, none missing, none left over, all with their shapes and within the file."""
    names = {name: _gguf_name(name) for name in shapes}
    missing = [name for name in names.values() if name not in contents.tensors]
    unexpected = sorted(contents.tensors.keys() - set(names.values()))
    problems = []
    for label, found in (("missing", missing), ("unexpected", unexpected)):
        if found:
            got = f"{len(found)} {label} tensors: {', '.join(found[:8])}"
            problems.append(Problem(path=where, got=got, expected=f"the {len(names)} tensors of its architecture"))
    file_bytes = Path(where).stat().st_size
    for name, shape in shapes.items():
        info = contents.tensors.get(names[name])
        if info is None:
            continue
        if info.shape != tuple(shape):
            problems.append(Problem(path=where, got=f"{names[name]} of shape {list(info.shape)}", expected=f"{list(shape)}"))
            continue
        try:
            block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.type_number)]
        except ValueError as error:
            raise UserError(Problem(path=where, got=f"{names[name]}: {error}", expected="a type that the gguf package knows")) from error
        if (end := info.offset + prod(info.shape) // block_elements * block_bytes) > file_bytes:
            got, expected = f"{file_bytes:,} bytes", f"at least {end:,} bytes, where {names[name]} ends: the file is truncated"
            problems.append(Problem(path=where, got=got, expected=expected, fix="download or copy the file again"))
            break
    if problems:
        raise UserError(*problems)
    return {name: contents.tensors[stored] for name, stored in names.items()}


def _gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    module, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module):
        return f"blk.{match[1]}.{BLOCK_NAMES[match[2]]}.{kind}"
    return f"{TOP_NAMES[module]}.{kind}"
