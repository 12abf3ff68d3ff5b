"""What a person sees of a sample."""

from __future__ import annotations

import numpy as np

from framework.config.schema import DataConfig
from framework.data.dataset import Sample
from framework.data.prepare import prepare
from framework.data.show import render_sample
from tests.data.templates import chat


def test_a_sample_is_shown_with_special_tokens_and_its_trained_tokens_marked(chatml, write_jsonl):
    prepared = prepare(DataConfig(train=write_jsonl([chat("hello", "hi", "Yes!", "No.")])), chatml, seed=0, show_progress=False)
    shown = render_sample(chatml, prepared.train[0])
    assert shown.endswith(
        "\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦hi<|im_end|>⟧\n"
        "<|im_start|>user\nYes!<|im_end|>\n<|im_start|>assistant\n⟦No.<|im_end|>⟧\n"
    )
    assert shown.startswith(f"one sample: {len(prepared.train[0])} tokens, {prepared.train.trained_tokens} of them trained")
    assert "\033[32mhi<|im_end|>\033[0m" in render_sample(chatml, prepared.train[0], colour=True)


def test_a_pack_is_shown_with_a_line_between_its_samples(chatml, write_jsonl):
    path = write_jsonl([chat("hello", "hi"), chat("hi", "Yes!")])
    pack = prepare(DataConfig(train=path, packing=True), chatml, seed=0, show_progress=False).train[0]
    shown = render_sample(chatml, pack)
    assert shown.startswith(f"one pack of 2 samples: {len(pack)} tokens")
    assert "⟦hi<|im_end|>⟧\n\n---- sample 2 of 2\n<|im_start|>user\nhi<|im_end|>\n" in shown


def test_the_middle_of_a_long_sample_is_left_out(chatml):
    ids = np.array(chatml("hello " * 1000, add_special_tokens=False).input_ids, np.int32)
    shown = render_sample(chatml, Sample(ids, np.arange(len(ids)) > 0))
    assert f"... {len(ids) - 400:,} tokens ..." in shown and len(shown) < 4000
