"""Every optimizer that a recipe can name trains on shards as it does unsharded, by our kernels and by torch."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist

from framework.config.schema import OptimizerConfig
from framework.kernels.library import choose, missing
from framework.zero import OffloadConfig, PrecisionConfig, ZeroConfig, ZeroEngine
from framework.zero.lion import Lion
from framework.zero.optimizer_by_name import CLASSES, build_optimizer, state_values
from tests.zero import zoo

NAMES = typing.get_args(typing.get_type_hints(OptimizerConfig)["name"])
STEPS = 4
OURS = ("adamw", "lion", "sgd")
"""What our kernels update."""
OF_WHOLE_MATRICES = ("muon", "adafactor")
"""Which have tests of their own."""
SETTINGS = {
    name: OptimizerConfig(name=name, lr=1e-2, weight_decay=0.1 if name != "rprop" else 0.0)
    for name in NAMES
    if name not in OF_WHOLE_MATRICES
}
SETTINGS |= {"sgd, momentum": OptimizerConfig(name="sgd", lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)}


def groups(model: torch.nn.Module, config: OptimizerConfig) -> list[dict]:
    return [
        {"params": [p for p in model.parameters() if (p.dim() >= 2) is decays], "weight_decay": config.weight_decay if decays else 0.0}
        for decays in (True, False)
    ]


def plain(config: OptimizerConfig, dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = zoo.make("Unused", dtype)
    optimizer = build_optimizer(config, groups(model, config))
    losses = []
    for micros in zoo.micro_batches(STEPS, 2):
        tokens = sum(zoo.count_tokens(ids) for ids in micros)
        loss = sum(model(ids) for ids in micros) / tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def sharded(config: OptimizerConfig, dtype: str, stage: int, kernels: str, offload: OffloadConfig):
    choose(kernels)
    try:
        model = zoo.make("Unused", getattr(torch, dtype))
        optimizer = build_optimizer(config, groups(model, config))
        engine = ZeroEngine(model, ZeroConfig(stage=stage), PrecisionConfig(compute_dtype=dtype), offload, optimizer=optimizer)
        losses = []
        for micros in zoo.micro_batches(STEPS, 2):
            ids = micros[dist.get_rank()]
            engine.backward(engine.module(ids), zoo.count_tokens(ids))
            losses.append(float(engine.step().loss))
        states = {len([v for v in state.values() if v.dim()]) for _, _, state in engine.sharded_optimizer.state_pieces() if state}
        return losses, {name: tensor for name, tensor in engine.full_tensors() if tensor is not None}, states
    finally:
        choose("auto")


@pytest.mark.parametrize("name", SETTINGS)
def test_p44_a_named_optimizer_trains_on_shards_as_on_whole_tensors(ranks, name: str) -> None:
    config, tries = SETTINGS[name], [("float64", "auto", 3, OffloadConfig(), 1e-9)]
    if config.name in OURS:
        tries += [("float32", "auto", 3, OffloadConfig(), 3e-5), ("float32", "auto", 1, OffloadConfig(optimizer="cpu"), 3e-5)]
        tries += [("float32", "reference", 1, OffloadConfig(optimizer="cpu"), 3e-5)]
    for dtype, kernels, stage, offload, tolerance in tries:
        losses, parameters = plain(config, getattr(torch, dtype))
        found, tensors, states = ranks(2, sharded, config, dtype, stage, kernels, offload)[0]
        assert found == pytest.approx(losses, rel=tolerance)
        for parameter, tensor in tensors.items():
            torch.testing.assert_close(tensor, parameters[parameter], rtol=tolerance, atol=tolerance)
        assert states <= {state_values(config)}


def test_the_names_are_those_that_can_be_built() -> None:
    assert set(NAMES) == set(CLASSES)
    assert {name: state_values(config) for name, config in SETTINGS.items() if name in ("adamw", "lion", "sgd", "sgd, momentum")} == {
        "adamw": 2,
        "lion": 1,
        "sgd": 0,
        "sgd, momentum": 1,
    }


def test_lion_is_what_its_paper_says() -> None:
    torch.manual_seed(0)
    weight, moment = torch.randn(9, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = Lion([parameter], lr=0.1, betas=(0.9, 0.99), weight_decay=0.2)
    for _ in range(3):
        gradient = torch.randn(9, dtype=torch.float64)
        parameter.grad = gradient.clone()
        optimizer.step()
        weight = weight - 0.1 * (torch.sign(0.9 * moment + 0.1 * gradient) + 0.2 * weight)
        moment = 0.99 * moment + 0.01 * gradient
    torch.testing.assert_close(parameter.detach(), weight)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], moment)


@pytest.mark.skipif(missing("cpu") is not None, reason=f"no compiled kernels: {missing('cpu')}")
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "sgd, momentum"])
def test_state_that_torch_has_made_goes_on_with_our_kernels(name: str) -> None:
    config, states = SETTINGS[name], []
    for kernels in ("reference", "compiled"):
        choose(kernels)
        try:
            model = zoo.make("Plain", torch.float32)
            engine = ZeroEngine(model, ZeroConfig(stage=2), optimizer=build_optimizer(config, groups(model, config)))
            assert engine.sharded_optimizer.writes_shards is (kernels == "compiled")
            if states:
                engine.load_state_dict(states[0])
            for ids, *_ in zoo.micro_batches(2, 1):
                engine.backward(engine.module(ids), zoo.count_tokens(ids))
                engine.step()
            states.append(engine.state_dict())
        finally:
            choose("auto")
    parameters = _four_plain_steps(config)
    for parameter, tensor in states[1]["model"].items():
        torch.testing.assert_close(tensor, parameters[parameter], rtol=3e-5, atol=3e-5)


def _four_plain_steps(config: OptimizerConfig) -> dict[str, torch.Tensor]:
    model = zoo.make("Plain", torch.float32)
    optimizer = build_optimizer(config, groups(model, config))
    for ids, *_ in [*zoo.micro_batches(2, 1), *zoo.micro_batches(2, 1)]:
        optimizer.zero_grad()
        (model(ids) / zoo.count_tokens(ids)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
