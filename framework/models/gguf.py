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
from framework.config.schema import LlamaConfig, ModelConfig, RopeScaling
from framework.models.architecture import check_architecture, head_dim, parameter_shapes
from framework.models.gguf_format import Contents, TensorInfo, read_contents

FAMILIES = ("llama", "qwen2", "qwen3")
NEEDED_KEYS = (
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "context_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
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


def config_from_gguf(contents: Contents, where: str) -> LlamaConfig:
    """The architecture that the metadata describe. Raises UserError for what our decoder does not have."""
    data, tensors = contents.metadata, contents.tensors
    family = data.get("general.architecture")
    if family not in FAMILIES:
        expected = "one of " + ", ".join(FAMILIES)
        raise UserError(Problem(path=where, got=f"general.architecture: {family!r}", expected=expected))
    if experts := data.get(f"{family}.expert_count"):
        raise UserError(Problem(path=where, got=f"{family}.expert_count: {experts}", expected="a model without experts"))
    if "rope_freqs.weight" in tensors:
        got = "rope_freqs.weight (Llama 3.1 rotary scaling stored as numbers)"
        raise UserError(Problem(path=where, got=got, expected="a model without it", fix="use the model's Hugging Face folder"))
    missing = [f"{family}.{key}" for key in NEEDED_KEYS if f"{family}.{key}" not in data]
    missing += ["token_embd.weight"] if "token_embd.weight" not in tensors else []
    if missing:
        raise UserError(Problem(path=where, got=f"no {', '.join(missing)}", expected="the metadata and tensors of a whole model"))

    def get(key: str, default: object = None) -> object:
        return data.get(f"{family}.{key}", default)

    hidden, heads = get("embedding_length"), get("attention.head_count")
    dim = get("attention.key_length", hidden // heads)
    if get("rope.dimension_count", dim) != dim:
        got = f"{family}.rope.dimension_count: {get('rope.dimension_count')}"
        raise UserError(Problem(path=where, got=got, expected=f"{dim}, the width of a head"))
    config = LlamaConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=get("attention.head_count_kv", heads),
        head_dim=dim,
        max_position_embeddings=get("context_length"),
        rms_norm_eps=_shortest_float(get("attention.layer_norm_rms_epsilon")),
        rope_theta=_shortest_float(get("rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(get, where),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        family=family,
    )
    if problems := check_architecture(config, where):
        raise UserError(*problems)
    return config


def _shortest_float(value: float) -> float:
    """GGUF stores fp32: 1e-5 reads back as 9.999999747378752e-06, which a `config.json` should not say."""
    return float(str(numpy.float32(value)))


def _rope_scaling(get, where: str) -> RopeScaling | None:
    kind, factor = get("rope.scaling.type", "none"), get("rope.scaling.factor", 1.0)
    if kind == "none" or factor == 1.0:
        return None
    if kind not in ("linear", "yarn"):
        raise UserError(Problem(path=where, got=f"rope.scaling.type: {kind!r}", expected="none, linear or yarn"))
    original = get("rope.scaling.original_context_length") if kind == "yarn" else None
    return RopeScaling(kind=kind, factor=factor, original_max_position_embeddings=original)


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
