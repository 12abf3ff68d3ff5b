"""The torch optimizer that a recipe names, with those of its settings that this one has."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from framework.config.schema import OptimizerConfig
from framework.zero.lion import Lion

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "lion": Lion,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
}
SETTINGS = ("lr", "betas", "eps", "momentum", "nesterov")
FUSED = ("adam", "adamw", "sgd")
"""Whose fused kernels of torch's own are used where ours are not: they take the loss scale and skip steps on the device."""


def build_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Over `groups`, each of which has its `weight_decay`."""
    kind = CLASSES[config.name]
    has = inspect.signature(kind).parameters
    options = {name: getattr(config, name) for name in SETTINGS if name in has}
    if "weight_decay" not in has:
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    return kind(groups, **options, **({"fused": True} if config.name in FUSED else {}))


def state_values(config: OptimizerConfig) -> int:
    """How many values of state there are for an element, seen on a small parameter after a step."""
    parameter = torch.nn.Parameter(torch.ones(7))
    optimizer = build_optimizer(config, [{"params": [parameter], "weight_decay": 0.0}])
    parameter.grad = torch.zeros(7)
    optimizer.step()
    values = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() == parameter.numel() for value in values)
