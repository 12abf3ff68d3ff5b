"""What a `LlamaConfig` means, without torch: its legality, its parameters' names and shapes, and its Hugging Face `config.json`.

One decoder serves four Hugging Face architectures; the rules of each (which biases it has, whether its attention may slide) are
written once, in `FAMILIES`. Reading is strict about settings that would change the numbers and that our decoder does not have:
they are refused by name. Other keys are ignored, because the modelling code of these four architectures ignores them, too.

Unusual: rotary settings are spelled differently by transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).
Both are read; both are written, so that either version finds its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from framework.config.errors import Problem, UserError
from framework.config.schema import LlamaConfig, RopeScaling

INIT_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, kw_only=True)
class Family:
    """What one Hugging Face architecture fixes. None: the configuration decides."""

    architecture: str
    attention_bias: bool | None
    attention_output_bias: bool | None
    """None with `attention_bias` None: the same as `attention_bias`."""
    mlp_bias: bool | None
    qk_norm: bool
    slides: bool
    """Whether a sliding window is honoured."""
    defaults: dict[str, object]
    """Values of keys that a `config.json` may leave out."""


COMMON_DEFAULTS = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False, "rope_theta": 10000.0}
FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM", attention_bias=None, attention_output_bias=None, mlp_bias=None, qk_norm=False, slides=False,
        defaults={**COMMON_DEFAULTS, "max_position_embeddings": 2048},
    ),
    "mistral": Family(
        architecture="MistralForCausalLM", attention_bias=False, attention_output_bias=False, mlp_bias=False, qk_norm=False, slides=True,
        defaults={**COMMON_DEFAULTS, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", attention_bias=True, attention_output_bias=False, mlp_bias=False, qk_norm=False, slides=True,
        defaults={**COMMON_DEFAULTS, "max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", attention_bias=None, attention_output_bias=None, mlp_bias=False, qk_norm=True, slides=True,
        defaults={**COMMON_DEFAULTS, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    ),
}  # fmt: skip

# Settings that change the numbers and that our decoder does not have: key -> the values under which they change nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "quantization_config": (None,),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "n_routed_experts": (0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}


def head_dim(config: LlamaConfig) -> int:
    """Width of one attention head."""
    return config.head_dim or config.hidden_size // config.num_attention_heads


def kv_heads(config: LlamaConfig) -> int:
    """Number of key/value heads."""
    return config.num_key_value_heads or config.num_attention_heads


def check_architecture(config: LlamaConfig, where: str = "model.arch") -> list[Problem]:
    """Everything about `config` that no decoder can be built from, or that its family's export could not say."""
    problems = []

    def expect(legal: bool, key: str, expected: str, fix: str = "") -> None:
        if not legal:
            problems.append(Problem(path=f"{where}.{key}", got=repr(getattr(config, key)), expected=expected, fix=fix))

    for key in (*INIT_KEYS, "max_position_embeddings"):
        expect(getattr(config, key) > 0, key, "a positive number")
    heads, groups = config.num_attention_heads, kv_heads(config)
    expect(groups > 0 and heads % groups == 0, "num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    free = config.head_dim is not None and config.family != "llama"  # transformers refuses such a Llama even with a head_dim
    expect(free or config.hidden_size % heads == 0, "hidden_size", f"a multiple of num_attention_heads={heads}")
    expect(head_dim(config) % 2 == 0, "head_dim", "an even number (rotary embedding turns pairs)")
    expect(config.sliding_window is None or config.sliding_window > 0, "sliding_window", "a positive number of tokens, or null")

    name, family = config.family, FAMILIES[config.family]
    others = "|".join(other for other, rules in FAMILIES.items() if rules.slides)
    expect(config.sliding_window is None or family.slides, "sliding_window", f"null for family {name}", f"{where}.family={others}")
    output_bias = config.attention_bias if family.attention_output_bias is None else family.attention_output_bias
    for key, fixed in (
        ("attention_bias", family.attention_bias),
        ("attention_output_bias", output_bias),
        ("mlp_bias", family.mlp_bias),
        ("qk_norm", family.qk_norm),
    ):
        expect(fixed is None or getattr(config, key) == fixed, key, f"{fixed} for family {name}", f"{where}.{key}={str(fixed).lower()}")
    return problems + _check_rope(config, f"{where}.rope_scaling")


def _check_rope(config: LlamaConfig, where: str) -> list[Problem]:
    rope, trained = config.rope_scaling, config.max_position_embeddings
    problems = []
    if rope is None:
        return problems
    if rope.factor < 1:
        problems.append(Problem(path=f"{where}.factor", got=repr(rope.factor), expected="a factor of at least 1"))
    if rope.kind == "llama3" and not rope.low_freq_factor < rope.high_freq_factor:
        got = f"{rope.high_freq_factor} with low_freq_factor={rope.low_freq_factor}"
        problems.append(Problem(path=f"{where}.high_freq_factor", got=got, expected="more than low_freq_factor"))
    if rope.kind == "yarn" and not rope.beta_slow < rope.beta_fast:
        got = f"{rope.beta_fast} with beta_slow={rope.beta_slow}"
        problems.append(Problem(path=f"{where}.beta_fast", got=got, expected="more than beta_slow"))
    original = rope.original_max_position_embeddings
    if rope.kind in ("linear", "dynamic") and original not in (None, trained):
        expected = f"null for {rope.kind} scaling, which starts from max_position_embeddings={trained}"
        problems.append(Problem(path=f"{where}.original_max_position_embeddings", got=repr(original), expected=expected))
    return problems


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape, in module order; a tied `lm_head.weight` is left out."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, head_dim(config)
    queries, keys = config.num_attention_heads * dim, kv_heads(config) * dim
    attention_bias, output_bias = config.attention_bias, config.attention_output_bias
    linears = (  # name, out, in, bias
        ("self_attn.q_proj", queries, hidden, attention_bias),
        ("self_attn.k_proj", keys, hidden, attention_bias),
        ("self_attn.v_proj", keys, hidden, attention_bias),
        ("self_attn.o_proj", hidden, queries, output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        block = f"model.layers.{layer}"
        for name, rows, columns, bias in linears:
            if name == "mlp.gate_proj" and config.qk_norm:
                shapes[f"{block}.self_attn.q_norm.weight"] = (dim,)
                shapes[f"{block}.self_attn.k_norm.weight"] = (dim,)
            shapes[f"{block}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{block}.{name}.bias"] = (rows,)
        shapes[f"{block}.input_layernorm.weight"] = (hidden,)
        shapes[f"{block}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def parameter_count(config: LlamaConfig) -> int:
    """Number of parameters, tied ones counted once."""
    return sum(prod(shape) for shape in parameter_shapes(config).values())


def config_from_hf(data: dict, where: str) -> LlamaConfig:
    """The architecture that a Hugging Face `config.json` describes; `where` is its path, for messages.

    Raises UserError, naming each key, for an architecture or a setting that our decoder does not have.
    """
    family_name = _family_name(data, where)
    family = FAMILIES[family_name]
    missing = [key for key in INIT_KEYS if not isinstance(data.get(key), int)]
    problems = [Problem(path=where, got=f"{key}: {data.get(key)!r}", expected=f"an integer {key}") for key in missing]
    for key, neutral in NEUTRAL.items():
        if key in data and data[key] not in neutral:
            expected = f"{key}: {neutral[0]!r} (our decoder has nothing else)"
            problems.append(Problem(path=where, got=f"{key}: {_short(data[key])}", expected=expected))
    rope_theta, rope_scaling = _read_rope(data, family, where, problems)
    sliding_window = _read_window(data, family_name, where, problems)
    if problems:
        raise UserError(*problems)

    def get(key: str) -> object:
        value = data.get(key)
        return family.defaults.get(key) if value is None else value

    attention_bias = bool(data.get("attention_bias", False)) if family.attention_bias is None else family.attention_bias
    config = LlamaConfig(
        **{key: data[key] for key in INIT_KEYS},
        num_key_value_heads=data["num_key_value_heads"] if "num_key_value_heads" in data else family.defaults.get("num_key_value_heads"),
        head_dim=get("head_dim"),
        max_position_embeddings=get("max_position_embeddings"),
        rms_norm_eps=get("rms_norm_eps"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(get("tie_word_embeddings")),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias if family.attention_output_bias is None else family.attention_output_bias,
        mlp_bias=bool(data.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        sliding_window=sliding_window,
        initializer_range=get("initializer_range"),
        family=family_name,
    )
    if problems := check_architecture(config, where):
        raise UserError(*problems)
    return config


def _family_name(data: dict, where: str) -> str:
    model_type, architectures = data.get("model_type"), data.get("architectures") or []
    by_architecture = {family.architecture: name for name, family in FAMILIES.items()}
    name = model_type or by_architecture.get(architectures[0] if architectures else "")
    if name not in FAMILIES or any(known != FAMILIES[name].architecture for known in architectures):
        expected = "one of " + ", ".join(f"{name} ({family.architecture})" for name, family in FAMILIES.items())
        raise UserError(Problem(path=where, got=f"model_type: {model_type!r}, architectures: {architectures!r}", expected=expected))
    return name


def _read_rope(data: dict, family: Family, where: str, problems: list[Problem]) -> tuple[float, RopeScaling | None]:
    """(rope_theta, scaling). As in transformers 5, `rope_scaling` wins where both spellings are present."""
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or data.get("rope_theta") or family.defaults["rope_theta"]
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return float(theta), None
    path = f"{where} (rope_scaling)"
    known = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}
    known |= {"llama3": {"low_freq_factor", "high_freq_factor"}, "yarn": {"attention_factor", "beta_fast", "beta_slow"}}.get(kind, set())
    unknown = {key: value for key, value in rope.items() if key not in known and value is not None}
    if kind == "yarn" and unknown.get("truncate") is True:
        del unknown["truncate"]
    if unknown.get("partial_rotary_factor") == 1:
        del unknown["partial_rotary_factor"]
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        problems.append(Problem(path=path, got=f"rope_type: {kind!r}", expected="one of default, linear, dynamic, llama3, yarn"))
    elif unknown:
        problems.append(Problem(path=path, got=_short(unknown), expected=f"for {kind} only {', '.join(sorted(known))}"))
    elif not isinstance(rope.get("factor"), (int, float)):
        problems.append(Problem(path=path, got=f"factor: {rope.get('factor')!r}", expected="a number"))
    else:
        numbers = {key: float(rope[key]) for key in known - {"rope_type", "type", "rope_theta"} if rope.get(key) is not None}
        original = None
        if kind in ("llama3", "yarn"):
            original = data.get("original_max_position_embeddings") or numbers.pop("original_max_position_embeddings", None)
        numbers.pop("original_max_position_embeddings", None)
        return float(theta), RopeScaling(kind=kind, original_max_position_embeddings=original and int(original), **numbers)
    return float(theta), None


def _read_window(data: dict, family: str, where: str, problems: list[Problem]) -> int | None:
    """The sliding window, which Qwen switches per layer; ours holds for all layers or for none."""
    layers = data.get("num_hidden_layers", 0)
    kinds = set(data.get("layer_types") or ())
    window = data["sliding_window"] if "sliding_window" in data else FAMILIES[family].defaults.get("sliding_window")
    if family == "llama" or window is None:
        return None
    if family == "mistral":
        if kinds - {"sliding_attention"}:
            problems.append(Problem(path=where, got=f"layer_types: {sorted(kinds)}", expected="sliding_attention in every layer"))
        return window
    if not data.get("use_sliding_window", False):
        return None
    if not kinds:
        first = data.get("max_window_layers", 28)
        kinds = {"sliding_attention" if layer >= first else "full_attention" for layer in range(layers)}
    if len(kinds) > 1:
        got = "use_sliding_window: true in some of the layers (layer_types, max_window_layers)"
        problems.append(Problem(path=where, got=got, expected="one kind of attention in all layers"))
    return window if kinds == {"sliding_attention"} else None


def config_to_hf(config: LlamaConfig, *, dtype: str, token_ids: dict[str, int | list[int] | None]) -> dict:
    """The `config.json` that transformers 4 and 5 both load. `token_ids`: `bos_token_id`, `eos_token_id`, `pad_token_id`."""
    if problems := check_architecture(config):
        raise UserError(*problems)
    family = FAMILIES[config.family]
    data = {
        "architectures": [family.architecture],
        "model_type": config.family,
        **{key: getattr(config, key) for key in INIT_KEYS},
        "num_key_value_heads": kv_heads(config),
        "head_dim": head_dim(config),
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_to_hf(config),
        "rope_parameters": {"rope_theta": config.rope_theta, **(_rope_to_hf(config) or {"rope_type": "default"})},
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_dropout": 0.0,
        "initializer_range": config.initializer_range,
        "use_cache": True,
        **token_ids,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if family.attention_bias is None:
        data["attention_bias"] = config.attention_bias
    if family.mlp_bias is None:
        data["mlp_bias"] = config.mlp_bias
    if family.slides:
        data["sliding_window"] = config.sliding_window
    if config.family in ("qwen2", "qwen3"):
        data["use_sliding_window"] = config.sliding_window is not None
        data["max_window_layers"] = 0 if config.sliding_window else config.num_hidden_layers
    return data


def _rope_to_hf(config: LlamaConfig) -> dict | None:
    rope = config.rope_scaling
    if rope is None:
        return None
    data = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        data["original_max_position_embeddings"] = rope.original_max_position_embeddings or config.max_position_embeddings
    if rope.kind == "llama3":
        data |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        data |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor is not None:
            data["attention_factor"] = rope.attention_factor
    return data


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
