"""Lightning's precision plugin with nothing left in it: data types, backward, clipping and the step belong to the engine.

This is where Lightning's calls of an optimizer step turn into `backward` and `step` of `ZeroEngine`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from framework.config.errors import UserError
from framework.config.schema import PrecisionConfig
from framework.train.options import clip_by_value

MIXED_NAMES = {"bfloat16": "bf16-mixed", "float16": "16-mixed"}
LIGHTNING_NAMES = {"float32": "32-true", "bfloat16": "bf16-true", "float16": "16-true", "float64": "64-true"}


class EnginePrecision(Precision):
    """Floating-point inputs arrive in the compute data type; everything else is passed on to the strategy's engine."""

    def __init__(self, precision: PrecisionConfig) -> None:
        super().__init__()
        self.precision = MIXED_NAMES.get(precision.autocast, LIGHTNING_NAMES[precision.compute_dtype])
        self.dtype: torch.dtype = getattr(torch, precision.compute_dtype)
        self.clip_norm: float | None = None
        """What `clip_gradients` asked for before the coming step."""

    def convert_input(self, data: Any) -> Any:
        if self.dtype is torch.float32:
            return data
        return apply_to_collection(data, Tensor, lambda tensor: tensor.to(self.dtype) if tensor.is_floating_point() else tensor)

    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            raise TypeError(f"manual_backward takes the loss only under ZeroStrategy, got {args} {kwargs}")
        model.trainer.strategy.engine_backward(tensor)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        output = closure()  # training_step and backward; nothing in manual optimization
        self._after_closure(model, optimizer)  # hooks, among them clip_gradients below
        model.trainer.strategy.engine_step(self.clip_norm)
        self.clip_norm = None
        return output

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        if clip_val > 0 and gradient_clip_algorithm == "value":
            raise UserError(clip_by_value())
        self.clip_norm = clip_val if clip_val > 0 else None
