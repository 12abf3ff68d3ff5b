"""Precisions under Lightning: autocast is that of Lightning's own `bf16-mixed`, and a module that is given back has nothing left of any."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from framework.config.schema import PrecisionConfig
from framework.train.strategy import ZeroStrategy
from tests.train.lightning_models import Regressor, plain_fit, zero_fit


@pytest.mark.parametrize("stage", [0, 3])
def test_autocast_trains_as_lightnings_mixed_precision_does(stage: int) -> None:
    strategy = ZeroStrategy(stage, precision=PrecisionConfig(autocast="bfloat16"))
    losses, weights = zero_fit(Regressor(), strategy)
    expected_losses, expected_weights = plain_fit(Regressor(), precision="bf16-mixed")
    in_fp32, _ = plain_fit(Regressor())
    assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    assert_close(weights, expected_weights, rtol=1e-4, atol=1e-5)
    assert losses != pytest.approx(in_fp32, rel=1e-5)


def test_a_module_that_was_given_back_casts_nothing_any_more() -> None:
    module = Regressor()
    precision = PrecisionConfig(compute_dtype="bfloat16", fp32_modules=["norm", "head"], master_weights="remainder")
    zero_fit(module, ZeroStrategy(3, precision=precision))
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert not module.head._forward_pre_hooks and not module.head._forward_hooks
    seen = []
    module.head.register_forward_hook(lambda _, args, out: seen.append(args[0].dtype))
    module.bfloat16()(torch.ones(2, 8, dtype=torch.bfloat16))
    assert seen == [torch.bfloat16]
