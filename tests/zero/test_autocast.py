"""Forward under autocast: what plain torch computes under `torch.autocast`, sharded, and nothing left of it afterwards."""

from __future__ import annotations

import pytest
import torch

from framework.config.schema import LlamaConfig
from framework.models.llama import Llama
from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine
from tests.zero import zoo

BF16 = PrecisionConfig(autocast="bfloat16")
STEPS = zoo.micro_batches(4, 4)


def train(precision: PrecisionConfig, stage: int, name: str) -> dict:
    model = zoo.make(name, torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), precision, optimizer=zoo.adamw(model))
    losses = []
    for micros in STEPS:
        for ids in micros[engine.world.rank :: engine.world.size]:
            engine.backward(engine.module(ids), zoo.count_tokens(ids))
            assert not torch.is_autocast_enabled("cpu")
        losses.append(float(engine.step().loss))
    dtypes = {tensor.dtype for _, tensor in engine.full_tensors() if tensor is not None}
    return {"loss": losses, "skipped": engine.skipped_steps, "scaled": engine.scaler is not None, "dtypes": dtypes}


def plain(name: str, dtype: torch.dtype | None) -> list[float]:
    """Without an engine, under autocast to `dtype`."""
    model = zoo.make(name, torch.float32)
    optimizer, losses = zoo.adamw(model), []
    for micros in STEPS:
        optimizer.zero_grad()
        tokens, total = sum(zoo.count_tokens(ids) for ids in micros), 0.0
        for ids in micros:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = model(ids)
            loss.backward()
            total += float(loss.detach())
        for parameter in model.parameters():
            parameter.grad /= tokens
        optimizer.step()
        losses.append(total / tokens)
    return losses


@pytest.mark.parametrize("name", ["Plain", "Checkpointed"])
def test_p44_every_stage_trains_as_plain_torch_does_under_autocast(ranks, name: str) -> None:
    expected = plain(name, torch.bfloat16)
    assert plain(name, None) != pytest.approx(expected, rel=2e-5), "the numbers below would be those without autocast, too"
    for stage in (0, 1, 2, 3):
        found = ranks(2, train, BF16, stage, name)[0]
        assert found["loss"] == pytest.approx(expected, rel=2e-5) and found["dtypes"] == {torch.float32} and not found["scaled"]


def test_p47_in_float16_the_loss_is_scaled(ranks) -> None:
    found = ranks(2, train, PrecisionConfig(autocast="float16"), 3, "Plain")[0]
    assert found["scaled"] and found["skipped"] == 0
    assert found["loss"] == pytest.approx(plain("Plain", torch.float16), rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_our_own_models_compute_what_they_compute_under_torchs_autocast(family: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=29, family=family, qk_norm=family == "qwen3", initializer_range=0.3, **sizes)
    torch.manual_seed(0)
    alone, held = Llama(config), Llama(config)
    held.load_state_dict(alone.state_dict())
    engine = ZeroEngine(held, ZeroConfig(stage=3), BF16, optimizer=torch.optim.SGD(held.parameters(), lr=0.0))
    ids = torch.randint(0, 29, (2, 9))
    with torch.autocast("cpu", torch.bfloat16):
        expected = alone(ids, ids)
    loss = engine.module(ids, ids)
    assert loss.dtype is torch.float32 and float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(alone(ids, ids).detach()) != pytest.approx(float(expected.detach()), rel=1e-5), "in fp32 it is another"
    expected.backward()
    engine.backward(loss)
    norm = torch.stack([parameter.grad.norm() for parameter in alone.parameters()]).norm()
    assert float(engine.step().grad_norm) == pytest.approx(float(norm), rel=1e-3)


def test_an_exception_in_forward_leaves_no_autocast_behind() -> None:
    class Fails(zoo.Plain):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError

    engine = ZeroEngine(Fails(), ZeroConfig(), BF16)
    with pytest.raises(ArithmeticError):
        engine.module(torch.ones(1, 4, dtype=torch.long))
    assert not torch.is_autocast_enabled("cpu")


def test_parameters_in_16_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="is for parameters in float32"):
        ZeroEngine(zoo.make("Plain"), ZeroConfig(), PrecisionConfig(compute_dtype="bfloat16", autocast="bfloat16"))
