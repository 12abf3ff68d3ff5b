"""The GGUF file format: metadata, the table of tensors (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), and the architecture
that they describe. No torch.

Unusual: the `gguf` package has a reader, too, but it makes a numpy view of each of a vocabulary's 100,000 strings and takes 5 s for
SmolLM2, on every rank; this one takes 0.1 s. Dequantising, the difficult part, is left to the package.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from framework.config.errors import Problem, UserError
from framework.config.schema import LlamaConfig, RopeScaling
from framework.models.architecture import check_architecture

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT = 32
FAMILIES = ("llama", "qwen2", "qwen3")
NEEDED_KEYS = (
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "context_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies and how it is encoded."""

    shape: tuple[int, ...]
    """Rows first, as in torch (GGUF counts the other way round)."""
    type_number: int
    """A `gguf.GGMLQuantizationType`."""
    offset: int
    """Of its first byte in the file."""


@dataclass(frozen=True)
class Contents:
    """Everything before the tensors' data."""

    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]


def read_contents(file: Path) -> Contents:
    """Metadata and tensor table of `file`. Raises UserError when it is no GGUF file, or truncated within them."""
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(data).contents()
    except (struct.error, ValueError, UnicodeDecodeError, KeyError, MemoryError) as error:
        problem = Problem(path=str(file), got=f"a file that does not parse ({error})", expected="a whole GGUF file, version 2 or 3")
        raise UserError(problem) from error


class _Parser:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def contents(self) -> Contents:
        magic, version = self._unpack("4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version}")
        tensor_count, pair_count = self._unpack("QQ")
        metadata = {}
        for _ in range(pair_count):
            key = self._string()
            metadata[key] = self._value(*self._unpack("I"))
        table = [self._tensor() for _ in range(tensor_count)]
        alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        start = -(-self._position // alignment) * alignment
        tensors = {name: TensorInfo(shape=shape, type_number=number, offset=start + offset) for name, shape, number, offset in table}
        return Contents(metadata, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dimensions,) = self._unpack("I")
        shape = self._unpack(f"{dimensions}Q")
        return name, shape[::-1], *self._unpack("IQ")

    def _value(self, type_number: int) -> object:
        if type_number == STRING:
            return self._string()
        if type_number != ARRAY:
            return self._unpack(SCALARS[type_number])[0]
        item_type, count = self._unpack("IQ")
        if item_type in SCALARS:
            return list(self._unpack(f"{count}{SCALARS[item_type]}"))
        return [self._value(item_type) for _ in range(count)]

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        begin, self._position = self._position, self._position + length
        if self._position > len(self._data):
            raise ValueError("the file ends within a string")
        return self._data[begin : self._position].decode("utf-8")

    def _unpack(self, layout: str) -> tuple:
        values = struct.unpack_from("<" + layout, self._data, self._position)
        self._position += struct.calcsize("<" + layout)
        return values


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
    for digits in range(6, 10):  # 9 tell all fp32 numbers apart
        shortest = float(f"{value:.{digits}g}")
        if struct.pack("f", shortest) == struct.pack("f", value):
            return shortest
    return value


def _rope_scaling(get, where: str) -> RopeScaling | None:
    kind, factor = get("rope.scaling.type", "none"), get("rope.scaling.factor", 1.0)
    if kind == "none" or factor == 1.0:
        return None
    if kind not in ("linear", "yarn"):
        raise UserError(Problem(path=where, got=f"rope.scaling.type: {kind!r}", expected="none, linear or yarn"))
    original = get("rope.scaling.original_context_length") if kind == "yarn" else None
    return RopeScaling(kind=kind, factor=factor, original_max_position_embeddings=original)
