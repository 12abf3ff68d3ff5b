"""The torch optimizer that a recipe names, with those of its settings that this one has."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from framework.config.schema import OptimizerConfig
from framework.zero.eight_bit import AdamW8bit, Lion8bit
from framework.zero.lion import Lion
from framework.zero.muon import Muon

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "lion": Lion,
    "muon": Muon,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
}
IN_8_BITS: dict[str, type[torch.optim.Optimizer]] = {"adamw": AdamW8bit, "lion": Lion8bit}
SETTINGS = ("lr", "betas", "eps", "momentum", "nesterov", "adjust_lr")
OTHERS_BY_THAT_NAME = (("adafactor", "eps"),)
"""Settings that are something else there: torch's defaults hold."""
FUSED = ("adam", "adamw", "sgd")
"""Whose fused kernels of torch's own are used where ours are not: they take the loss scale and skip steps on the device."""


def class_of(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    return (IN_8_BITS if config.moments == "8bit" else CLASSES)[config.name]


def build_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Over `groups`, each of which has its `weight_decay`, and for muon whether it is `orthogonal`."""
    kind = class_of(config)
    has = inspect.signature(kind).parameters
    options = {name: getattr(config, name) for name in SETTINGS if name in has and (config.name, name) not in OTHERS_BY_THAT_NAME}
    if "weight_decay" not in has:
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    return kind(groups, **options, **({"fused": True} if config.name in FUSED and config.moments == "fp32" else {}))


def state_values(config: OptimizerConfig) -> int:
    """How many values of state there are for an element, seen on a small parameter after a step."""
    parameter = torch.nn.Parameter(torch.ones(7))
    optimizer = build_optimizer(config, [{"params": [parameter], "weight_decay": 0.0}])
    parameter.grad = torch.zeros(7)
    optimizer.step()
    values = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() == parameter.numel() for value in values)
