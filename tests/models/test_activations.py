"""What blocks keep for backward: the measured bytes are those that autograd really saves, and a budget is kept to exactly."""

from __future__ import annotations

import pytest
import torch

from framework import torch_private
from framework.config.schema import LlamaConfig, PeftConfig
from framework.models.activations import ActivationBytes, BlockBytes, activation_bytes, every_nth, saved_bytes
from framework.models.llama import Llama
from framework.models.lora import add_adapter

ARCH = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, qk_norm=True,
    family="qwen3", head_dim=8, max_position_embeddings=64,
)  # fmt: skip
ROWS, TOKENS = 2, 24
PACKS = [[10, 14], [24]]


def make(kind: str, **options) -> Llama:
    torch.manual_seed(0)
    model = Llama(ARCH, **options)
    if kind == "adapters":
        add_adapter(model, PeftConfig(method="lora", rank=2))
    if kind == "adapters on codes":
        add_adapter(model, PeftConfig(method="lora", rank=2, dora=True, base="int8"))
    if kind == "upper blocks":
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("way", [None, "apart", "mask"])
@pytest.mark.parametrize("kind", ["all", "adapters", "adapters on codes", "upper blocks"])
def test_measured_bytes_are_those_that_autograd_saves(kind: str, way: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make(kind), torch.randint(0, 64, (ROWS, TOKENS))
    expected = activation_bytes(model, ROWS, TOKENS, torch.float32, "cpu", way)
    monkeypatch.setattr("framework.models.documents.attention_way", lambda *_, **__: way)
    with saved_bytes() as saved:
        out = model.model(ids, None, None, PACKS if way else None)
    for held in (ids, *model.parameters()):
        saved.pop(torch_private.storage_id(held), None)
    assert out.requires_grad and sum(saved.values()) == expected.peak((), offloads=False)


def test_recomputed_blocks_keep_their_input_alone_and_the_rest_store() -> None:
    ids = torch.randint(0, 64, (ROWS, TOKENS))
    for n, chosen in ((False, ()), (True, (0, 1, 2)), (2, (0, 2)), (3, (0,))):
        assert every_nth(3, n) == chosen
        model = make("all", activation_checkpointing=chosen)
        measured = activation_bytes(model, ROWS, TOKENS, torch.float32, "cpu", None)
        with saved_bytes() as saved:
            out = model.model(ids, None, None)
        for held in (ids, *model.parameters()):
            saved.pop(torch_private.storage_id(held), None)
        tables = 0 if len(chosen) < 3 else measured.shared  # held by what recomputes, where no block saves them
        kept = sum(block.input if index in chosen else block.stored for index, block in enumerate(measured.blocks))
        assert out.requires_grad and sum(saved.values()) + tables == kept + measured.shared


def test_a_budget_recomputes_the_fewest_first_blocks() -> None:
    measured = ActivationBytes(blocks=(BlockBytes(inside=90, input=10, saves_input=True),) * 4, shared=5)
    assert measured.peak((), offloads=False) == 405
    assert measured.peak((0,), offloads=False) == 315  # one input, three blocks
    assert measured.peak((0, 1, 2, 3), offloads=False) == 135  # four inputs, and what one block needs again
    assert measured.peak((0, 1, 2, 3), offloads=True) == 115  # one input in use, one fetched, and what one block needs again
    assert measured.on_host((0, 1, 2, 3)) == 40
    assert measured.fewest(405, offloads=False) == ()
    assert measured.fewest(404, offloads=False) == (0,)
    assert measured.fewest(225, offloads=False) == (0, 1)
    assert measured.fewest(135, offloads=False) == (0, 1, 2)
    assert measured.fewest(134, offloads=False) is None
    assert measured.fewest(115, offloads=True) == (0, 1, 2) and measured.fewest(114, offloads=True) is None


def test_blocks_that_save_nothing_are_not_recomputed() -> None:
    measured = activation_bytes(make("upper blocks"), ROWS, TOKENS, torch.float32, "cpu", None)
    assert [block.stored > 0 for block in measured.blocks] == [False, True, True]
    assert measured.fewest(measured.peak((), offloads=False) - 1, offloads=False) == (1,)
