"""The ZeRO engine: usable from any torch script, knows nothing of recipes, Lightning or Llama. See README.md of this folder."""

from framework.config.schema import OffloadConfig, PrecisionConfig, ZeroConfig, ZeroModuleConfig
from framework.zero.engine import ZeroEngine
from framework.zero.norm import NonFiniteError, StepStats

__all__ = ["NonFiniteError", "OffloadConfig", "PrecisionConfig", "StepStats", "ZeroConfig", "ZeroEngine", "ZeroModuleConfig"]
