"""The decoder against `transformers`: logits, gradients, decoding; and what the engine needs of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from framework.config.errors import UserError
from framework.config.schema import LlamaConfig
from framework.models.architecture import config_from_hf, parameter_count, parameter_shapes
from framework.models.llama import KVCache, Llama
from tests.models.families import FAMILIES, VOCABULARY, config_json, oracle, some_ids

TINY = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.1,
)


def ours(family: str) -> Llama:
    """Our decoder with the weights of the `transformers` model."""
    model = Llama(config_from_hf(config_json(family), "config.json"))
    model.load_state_dict(oracle(family).state_dict())
    return model


def tiny(config: LlamaConfig = TINY, dtype: torch.dtype = torch.float32, **options) -> Llama:
    torch.manual_seed(0)
    return Llama(config, **options).to(dtype)


def shifted(ids: torch.Tensor) -> torch.Tensor:
    """Labels: the next token of each position, the last one and an unequal number of first ones untrained."""
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    for row in range(len(ids)):
        labels[row, : 3 * row] = -100
    return labels


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str):
    ids = some_ids()
    with torch.no_grad():
        torch.testing.assert_close(ours(family)(ids), oracle(family)(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen3"])
def test_gradients_equal_transformers(family: str):
    ids, theirs, mine = some_ids(), oracle(family), ours(family)
    labels = shifted(ids)
    logits = theirs(ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    loss = mine(ids, labels)
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-6)
    names = [name for name, _ in theirs.named_parameters()]
    expected_grads = dict(zip(names, torch.autograd.grad(expected, list(theirs.parameters())), strict=True))
    loss.backward()
    for name, parameter in mine.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected_grads[name], atol=2e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_names_and_shapes_are_known_without_torch(family: str):
    model = ours(family)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == parameter_shapes(model.config)
    assert list(parameter_shapes(model.config)) == [name for name, _ in model.named_parameters()]
    assert parameter_count(model.config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["llama2", "mistral", "qwen3", "rope yarn"])
def test_cached_decoding_equals_recomputation(family: str):
    model, ids = ours(family), some_ids(rows=1, length=20)
    with torch.no_grad():
        whole, cache = model(ids), KVCache(model.config, 20)
        pieces = [model(ids[:, begin:end], cache=cache) for begin, end in ((0, 9), (9, 10), (10, 15), (15, 16), (16, 20))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_logits_to_keep_are_the_last_ones():
    model, ids = tiny(), some_ids()
    with torch.no_grad():
        torch.testing.assert_close(model(ids, logits_to_keep=2), model(ids)[:, -2:])


def test_pads_on_the_right_change_nothing():
    model, ids = tiny(dtype=torch.float64), some_ids()
    labels = shifted(ids)
    padded_ids = torch.nn.functional.pad(ids, (0, 9), value=0)
    padded_labels = torch.nn.functional.pad(labels, (0, 9), value=-100)
    torch.testing.assert_close(model(padded_ids, padded_labels), model(ids, labels), rtol=1e-12, atol=0)


def test_positions_can_be_given():
    model, ids = tiny(replace(TINY, sliding_window=None)), some_ids()
    with torch.no_grad():
        torch.testing.assert_close(model(ids, position_ids=torch.arange(33).expand(2, -1)), model(ids))
        assert not torch.allclose(model(ids, position_ids=2 * torch.arange(33)), model(ids))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_p21_sum_of_losses_does_not_depend_on_the_micro_batch(dtype: torch.dtype, tolerance: float):
    ids = some_ids(rows=8)
    labels = shifted(ids)
    whole, parts = tiny(dtype=dtype), tiny(dtype=dtype)
    loss = whole(ids, labels)
    loss.backward()
    total = 0
    for row in range(8):
        part = parts(ids[row : row + 1], labels[row : row + 1], trained_tokens=int((labels[row] != -100).sum()))
        part.backward()
        total = total + part.detach()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.detach(), total, rtol=tolerance, atol=0)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert (one.grad - other.grad).norm() <= tolerance * 10 * one.grad.norm()


def test_p20_no_trained_token_gives_zero_and_zero_gradients_everywhere():
    model, ids = tiny(), some_ids()
    loss = model(ids, torch.full_like(ids, -100), trained_tokens=0)
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_wrong_count_of_trained_tokens_is_refused():
    ids = some_ids()
    with pytest.raises(ValueError, match="trained_tokens=3, but labels hold 64"):
        tiny()(ids, torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100), trained_tokens=3)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options", [{"activation_checkpointing": True}, {"compile_blocks": True}, {"activation_checkpointing": True, "compile_blocks": True}]
)
def test_checkpointing_and_compiling_do_not_change_gradients(tied: bool, options: dict, strict_compile: None):
    config = replace(TINY, tie_word_embeddings=tied)
    plain, other, ids = tiny(config, torch.float64), tiny(config, torch.float64, **options), some_ids()
    for model in (plain, other):
        model(ids, shifted(ids)).backward()
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-10, atol=1e-12)


def test_all_blocks_and_lengths_share_two_graphs(strict_compile: None):
    """One for the first length, one for every other: 30 blocks times 100 lengths would never end compiling."""
    torch._dynamo.utils.counters.clear()
    plain, compiled = tiny(), tiny(compile_blocks=True)
    for length in (33, 20, 17, 40):
        ids = some_ids(length=length)
        torch.testing.assert_close(compiled(ids, shifted(ids)), plain(ids, shifted(ids)), rtol=1e-6, atol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_compiling_leaves_hooks_of_blocks_outside(strict_compile: None):
    """The engine gathers a block's parameters in its hooks: they must run in every forward and in every recomputation."""
    model, ids, calls = tiny(activation_checkpointing=True, compile_blocks=True), some_ids(), []
    for index, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(lambda module, inputs, index=index: calls.append(index))
    loss = model(ids, shifted(ids))
    assert calls == [0, 1]
    loss.backward()
    assert calls == [0, 1, 1, 0]


def test_builds_on_the_meta_device_and_runs_there():
    with torch.device("meta"):
        model = Llama(TINY, activation_checkpointing=True)
        ids = torch.empty(2, 16, dtype=torch.int64)
        model(ids, ids, trained_tokens=30).backward()
    assert all(p.grad is not None and p.is_meta for p in model.parameters())
    assert not list(model.buffers())


def test_tied_embeddings_are_one_parameter():
    model = tiny(replace(TINY, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_every_owner_of_parameters_initialises_itself_from_the_seed():
    """The engine fills shards by calling `reset_parameters` on one module after another, each after a seed of its own."""
    config = replace(TINY, attention_bias=True, attention_output_bias=True, initializer_range=0.05)
    with torch.device("meta"):
        model = Llama(config)
    model = model.to_empty(device="cpu")
    owners = [module for module in model.modules() if list(module.parameters(recurse=False))]
    for module in owners:
        torch.manual_seed(3)
        module.reset_parameters()
    up, other = (block.mlp.up_proj.weight for block in model.model.layers)
    torch.testing.assert_close(up, other)
    assert abs(up.std().item() - 0.05) < 0.005
    assert not model.model.layers[0].self_attn.q_proj.bias.any()
    assert (model.model.norm.weight == 1).all()


def test_an_impossible_architecture_is_refused_with_every_reason():
    with pytest.raises(UserError) as error:
        Llama(replace(TINY, num_key_value_heads=3, sliding_window=8, qk_norm=True))
    assert [problem.path for problem in error.value.problems] == [
        "model.arch.num_key_value_heads",
        "model.arch.sliding_window",
        "model.arch.qk_norm",
    ]
