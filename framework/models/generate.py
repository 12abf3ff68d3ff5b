"""Answers from a model: greedy or sampled, one sequence at a time, with a cache of keys and values.

`load_for_generation` fills a model with opened weights; `generate` continues a text or answers a conversation through the tokenizer's own
chat template, so that the prompt has the ids of training (P8).

Unusual: streaming cannot decode token by token, since a character may be spread over several; text is handed out once it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from framework.config.errors import Problem, UserError
from framework.models.llama import KVCache, Llama
from framework.models.pretrained import Pretrained, load_weights, token_ids_of
from framework.models.tokenizer import load_tokenizer, stop_token_ids

INCOMPLETE = "\ufffd"
"""What a decoder gives for bytes that are not yet a character."""

Message = dict[str, str]


def load_for_generation(
    pretrained: Pretrained, *, autocast: str = "none", show: bool = True
) -> tuple[Llama, PreTrainedTokenizerFast, list[int]]:
    """(model, tokenizer, stop ids). bf16 on the GPU when there is one, fp32 on the CPU. `autocast`: as in `PrecisionConfig`, the data type
    of forward under torch's autocast, with parameters in fp32."""
    tokenizer = load_tokenizer(pretrained.tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" and autocast == "none" else torch.float32
    with torch.device("meta"):
        model = Llama(pretrained.config)
    model = model.to(dtype).to_empty(device=device).eval()
    model.tie_weights()
    load_weights(model, pretrained, show=show)
    if autocast != "none":
        model.forward = torch.autocast(device, getattr(torch, autocast))(model.forward)
    return model, tokenizer, inference_stop_ids(tokenizer, pretrained.generation_config)


def inference_stop_ids(tokenizer: PreTrainedTokenizerFast, generation_config: Mapping[str, Any]) -> list[int]:
    """The ids that end an answer of a pretrained model: those that it names, and its tokenizer's."""
    return list(dict.fromkeys([*token_ids_of(generation_config.get("eos_token_id")), *stop_token_ids(tokenizer)]))


def generate(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    messages_or_text: Sequence[Message] | str,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] | None = None,
    on_text: Callable[[str], None] | None = None,
) -> str:
    """The text that follows `messages_or_text`: an answer to a list of `{"role", "content"}`, or the continuation of a string.

    `model` is a `Llama` (or called like one). temperature 0 is greedy; above, tokens are drawn from the most likely ones that together
    reach `top_p`, reproducibly by `seed`. Ends before a token of `stop_ids` (None: the tokenizer's), after `max_new_tokens`, or at the
    model's longest sequence. `on_text` gets each piece of text as soon as it is whole. Raises UserError when the prompt is too long.
    """
    prompt = prompt_ids(tokenizer, messages_or_text)
    stops = set(stop_token_ids(tokenizer) if stop_ids is None else stop_ids)
    ids, shown = [], ""
    for token in generate_ids(model, prompt, max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, stop_ids=stops):
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if on_text is not None and not text.endswith(INCOMPLETE):
            on_text(text[len(shown) :])
            shown = text
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if on_text is not None and text != shown:
        on_text(text[len(shown) :])
    return text


def prompt_ids(tokenizer: PreTrainedTokenizerFast, messages_or_text: Sequence[Message] | str) -> list[int]:
    """Ids of a prompt: a text with the tokenizer's own BOS, or a conversation through its chat template, ready for the answer."""
    if isinstance(messages_or_text, str):
        return tokenizer(messages_or_text)["input_ids"]
    if not tokenizer.chat_template:
        expected = "a chat template, to answer a conversation"
        raise UserError(Problem(path="tokenizer", got="no chat template", expected=expected, fix="--raw to continue a text"))
    return tokenizer.apply_chat_template(list(messages_or_text), add_generation_prompt=True, tokenize=True, return_dict=False)


@torch.no_grad()
def generate_ids(
    model: torch.nn.Module,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] | set[int] = (),
) -> Iterator[int]:
    """Yield the ids that follow `prompt`, one by one, as `generate` describes."""
    longest = model.config.max_position_embeddings
    if not prompt or len(prompt) >= longest:
        expected = f"1 to {longest - 1:,} tokens: the model reads at most {longest:,}"
        raise UserError(Problem(path="prompt", got=f"{len(prompt):,} tokens", expected=expected))
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    max_new_tokens = min(max_new_tokens, longest - len(prompt))
    cache = KVCache(model.config, len(prompt) + max_new_tokens)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(max_new_tokens):
        logits = model(tokens, cache=cache, logits_to_keep=1)[0, -1]
        token = choose(logits, temperature, top_p, generator)
        if token in stop_ids:
            return
        yield token
        tokens = torch.tensor([[token]], device=device)


def choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token id from `logits` [V]. Nucleus sampling (arXiv:1904.09751): the fewest tokens that together reach `top_p`."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, ids = (logits.float() / temperature).softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities  # what more likely tokens reach without this one
    probabilities[before >= top_p] = 0  # the first always stays
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
