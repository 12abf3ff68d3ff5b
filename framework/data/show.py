"""One sample as a person reads it: its text with special tokens, and the trained tokens marked; a pack with a line between its documents.

On a terminal trained tokens are green, elsewhere they stand in ⟦brackets⟧, so that a log file shows the same.
"""

from __future__ import annotations

import sys
from itertools import groupby
from typing import Any

import numpy as np

from framework.data.dataset import Sample

GREEN, PLAIN = "\033[32m", "\033[0m"
SHOWN_TOKENS = 400


def render_sample(tokenizer: Any, sample: Sample, *, colour: bool | None = None) -> str:
    """`colour` None: where stdout is a terminal. Of a sample over `SHOWN_TOKENS` tokens, the middle is left out."""
    colour = sys.stdout.isatty() if colour is None else colour
    before, after = (GREEN, PLAIN) if colour else ("⟦", "⟧")
    trained, lengths = int(sample.trained.sum()), sample.document_lengths or (len(sample),)
    what = "one sample" if sample.document_lengths is None else f"one pack of {len(lengths)} samples"
    parts = [f"{what}: {len(sample):,} tokens, {trained:,} of them trained ({before}marked like this{after})\n"]
    document = np.repeat(np.arange(len(lengths)), lengths)
    half = SHOWN_TOKENS // 2
    spans = [slice(0, len(sample))] if len(sample) <= SHOWN_TOKENS else [slice(0, half), slice(len(sample) - half, len(sample))]
    shown = 0
    for number, span in enumerate(spans):
        if number:
            parts.append(f"\n... {len(sample) - SHOWN_TOKENS:,} tokens ...\n")
        tokens = zip(sample.input_ids[span].tolist(), document[span].tolist(), sample.trained[span].tolist(), strict=True)
        for (of, is_trained), run in groupby(tokens, key=lambda token: token[1:]):
            if of != shown:
                parts.append(f"\n---- sample {of + 1} of {len(lengths)}\n")
                shown = of
            text = tokenizer.decode([token[0] for token in run], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            parts.append(f"{before}{text}{after}" if is_trained else text)
    return "".join(parts)
