"""Tokenizers: from a Hugging Face folder, or built from the metadata of a GGUF file; and the tokens at which an answer stops.

Unusual: a `tokenizer.json` is taken as it stands. AutoTokenizer of transformers 5 rebuilds the tokenizer of some model types from their
class (Qwen2 among them) and then yields other ids than that file, and than transformers 4. And transformers' GGUF conversion drops
SmolLM's split of numbers into single digits; the pre-tokenizers are therefore written out here, one per value of `tokenizer.ggml.pre`.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from framework.config.errors import Problem, UserError
from framework.config.schema import ModelConfig
from framework.models.gguf_format import read_contents
from framework.models.locate import check_folder_or_file, read_template, resolve
from framework.progress import busy

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type` that mark tokens to be found whole in a text."""

LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerFast:
    """The tokenizer that `model.tokenizer`, or else `model.path`, names, with `model.chat_template` when that is set."""
    setting = "model.tokenizer" if model.tokenizer else "model.path"
    source = model.tokenizer or model.path
    if source is None:
        problem = Problem(path="model.tokenizer", got="null, and no model.path", expected="a folder, file or name with a tokenizer")
        raise UserError(problem)
    tokenizer = tokenizer_from(resolve(source, setting, weights=False), setting)
    if model.chat_template is not None:
        tokenizer.chat_template = read_template(model.chat_template)
    return tokenizer


def tokenizer_from(source: Path, setting: str = "model.tokenizer") -> PreTrainedTokenizerFast:
    """The tokenizer of a Hugging Face folder or a GGUF file."""
    check_folder_or_file(source, setting, weights=False)
    with busy(f"reading the tokenizer of {source.name}"):
        return _from_gguf(source) if source.is_file() else _from_folder(source, setting)


def _from_folder(source: Path, setting: str) -> PreTrainedTokenizerFast:
    try:
        if (source / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(str(source))
        from transformers import AutoTokenizer  # imports torch; converts sentencepiece and other old formats

        tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    except Exception as error:  # transformers, tokenizers and sentencepiece raise their own errors, plain Exception among them
        got = f"{source}, whose tokenizer does not load: {type(error).__name__}: {error}"
        raise UserError(Problem(path=setting, got=got[:400], expected="a whole tokenizer.json")) from error
    if not tokenizer.is_fast:
        raise UserError(Problem(path=setting, got=f"{source} with a slow tokenizer", expected="one with a tokenizer.json"))
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer with its chat template so that transformers 4 and 5 load it with the same ids.

    Version 5 names the generic class `TokenizersBackend`, which version 4 does not know; it still answers to the old name. And the template
    goes inside `tokenizer_config.json`, since a file of its own is overlooked by versions before 4.52. The generic class of version 4 would
    also make `token_type_ids`, which `generate` refuses for these models.
    """
    tokenizer.save_pretrained(str(folder), save_jinja_files=False)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def stop_token_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The ids that end an answer: the tokenizer's eos, and the token that its chat template puts behind an assistant's turn."""
    ids = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    turn_end = turn_end_id(tokenizer)
    return ids if turn_end is None or turn_end in ids else [*ids, turn_end]


def turn_end_id(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The first special token that the chat template puts behind an assistant's text; None without a template or without such a token."""
    if not tokenizer.chat_template:
        return None
    answer = "\u2402answer\u2403"  # a text that no template contains
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    behind = tokenizer(text.rpartition(answer)[2], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((index for index in behind if index in special), None)


def _from_gguf(file: Path) -> PreTrainedTokenizerFast:
    data = read_contents(file).metadata
    kind, pre = data.get("tokenizer.ggml.model"), data.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        got = f"tokenizer.ggml.model: {kind!r}, tokenizer.ggml.pre: {pre!r}"
        expected = f"gpt2 with one of {', '.join(PRE_TOKENIZERS)}"
        raise UserError(Problem(path=str(file), got=got, expected=expected, fix="model.tokenizer=FOLDER (the model's Hugging Face folder)"))
    if missing := [key for key in ("tokens", "token_type", "merges") if f"tokenizer.ggml.{key}" not in data]:
        raise UserError(Problem(path=str(file), got=f"no tokenizer.ggml.{missing[0]}", expected="a file with a whole tokenizer"))
    tokens, types = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in data["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    added = [(token, type_) for token, type_ in zip(tokens, types, strict=True) if type_ in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=type_ == CONTROL) for token, type_ in added])

    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: data.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    add_bos = data.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")  # the default of llama.cpp
    if add_bos and ids["bos_token"] is not None:
        bos = tokens[ids["bos_token"]]
        first = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids["bos_token"])])
        tokenizer.post_processor = processors.Sequence([tokenizer.post_processor, first])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=data.get(f"{data['general.architecture']}.context_length"),
        **{name: tokens[index] for name, index in ids.items() if index is not None},
    )
    fast.chat_template = data.get("tokenizer.chat_template")
    return fast


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _byte_level(use_regex=False)])


PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)]),
    "gpt-2": lambda: _byte_level(use_regex=True),
    "llama-bpe": lambda: _split(LLAMA3_SPLIT),
    "qwen2": lambda: _split(QWEN2_SPLIT),
}
