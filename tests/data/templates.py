"""Chat templates of several families, written by hand for the tiny tokenizer of these tests, and a conversation to put through them."""

from __future__ import annotations

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (  # a BOS of its own, and white space around the text is taken off
    "{{ bos_token }}{% for m in messages %}{{ '<|header|>' + m.role + '<|/header|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
MISTRAL = (  # roles must alternate; no system turn
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = (  # the thinking of every turn but the last is removed, and an empty one is put before a last answer without
    "{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' %}"
    "{% if '</think>' in text and not loop.last %}{% set text = text.split('</think>')[-1].lstrip('\n') %}"
    "{% elif '</think>' not in text and loop.last %}{% set text = '<think>\n\n</think>\n\n' + text %}{% endif %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VICUNA = (  # no special tokens but </s>
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
GLUED = (  # the prompt's last space and the answer's first word make one token
    "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
STOPLESS = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
TOOLS = (  # calls as JSON, all answers of tools in one turn of the user
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<result>' + m.content + '</result>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' ' + c.function.arguments | tojson + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS_TEXT = (  # arguments must be JSON text, and a special token ends each call, before the one that stops the turn
    "{% for t in tools or [] %}{{ t.function.name + '\n' }}{% endfor %}{% for m in messages %}"
    "{{ '<|header|>' + m.role + '<|/header|>' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments + '<|im_end|>' }}{% endfor %}"
    "{{ '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>' }}{% endif %}"
)
HEEDLESS = (  # passes over what is neither user nor assistant, and over a second user turn in a row
    "{% for m in messages %}{% if m.role == 'user' and messages[loop.index0 - 1].role != 'user' or m.role == 'assistant' %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
JOINED = (  # turns of one role that follow each other become one
    "{% for m in messages %}{% if loop.first or loop.previtem.role != m.role %}{{ '<|im_start|>' + m.role + '\n' }}{% endif %}"
    "{{ m.content }}{% if loop.last or loop.nextitem.role != m.role %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|header|>", "<|/header|>", "<|eot|>", "[INST]", "[/INST]"]
BOS_EOS = {
    CHATML: ("<|im_start|>", "<|im_end|>"),
    LLAMA3: ("<s>", "<|eot|>"),
    QWEN3: (None, "<|im_end|>"),
    TOOLS: (None, "<|im_end|>"),
    TOOLS_TEXT: (None, "<|eot|>"),
}
CORPUS = ["the user asks and the assistant answers", "hello hi how are you", "what is a question system", "Hello World. Yes!\n\nNo.\n"] * 4


def chat(*texts: str) -> dict:
    """A `messages` row: user, assistant, user, ... in turn."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}
