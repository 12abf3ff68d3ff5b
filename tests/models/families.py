"""Tiny randomly initialised `transformers` models of every family: the oracle for logits, names and files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 260
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}


def rope(kind: str, **settings: float) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


LLAMA3_SCALING = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN_SCALING = rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=0.5)
YARN_FACTOR = rope("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.3)

FAMILIES: dict[str, tuple[type, dict]] = {
    "llama2": (transformers.LlamaConfig, {"num_key_value_heads": 6, "rms_norm_eps": 1e-5}),
    "llama3": (transformers.LlamaConfig, {"rope_parameters": {**LLAMA3_SCALING["rope_parameters"], "rope_theta": 500000.0}}),
    "smollm": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama with biases": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 7}),
    "mistral without window": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 12}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2 sliding": (transformers.Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "rope linear": (transformers.LlamaConfig, rope("linear", factor=4.0)),
    "rope dynamic": (transformers.LlamaConfig, {**rope("dynamic", factor=4.0), "max_position_embeddings": 16}),
    "rope yarn": (transformers.LlamaConfig, YARN_SCALING),
    "rope yarn with attention factor": (transformers.LlamaConfig, YARN_FACTOR),
}


@cache
def oracle(family: str) -> transformers.PreTrainedModel:
    """The `transformers` model; norms and biases are random, too, so that each of them matters."""
    kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**SHAPE, **settings}), attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


def config_json(family: str) -> dict:
    """What `save_pretrained` writes as config.json."""
    model = oracle(family)
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def some_ids(rows: int = 2, length: int = 33) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per byte and ChatML, within VOCABULARY ids: <|endoftext|> (eos) ends a document, <|im_end|> a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", clean_up_tokenization_spaces=False)
    fast.chat_template = CHATML
    return fast


def save_oracle(family: str, folder: Path, **options) -> Path:
    oracle(family).save_pretrained(folder, **options)
    return folder
