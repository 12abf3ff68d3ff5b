"""Rotary frequencies of each scaling against those of `transformers`."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from framework.models.architecture import config_from_hf
from framework.models.rope import inverse_frequencies_of
from tests.models.families import FAMILIES, config_json, oracle


@pytest.mark.parametrize("length", [10, 40])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.startswith("rope") or family == "llama3"])
def test_frequencies_equal_transformers(family: str, length: int):
    theirs = oracle(family).config
    expected, expected_factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, "cpu", seq_len=length)
    frequencies, factor = inverse_frequencies_of(config_from_hf(config_json(family), "config.json"), length, "cpu")
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)
