"""Our torch optimizers without an engine: what torch's do with a closure, and with parameters that do not lie in order."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from framework.zero.eight_bit import AdamW8bit, Lion8bit
from framework.zero.lion import Lion
from framework.zero.muon import Muon
from framework.zero.whole_step import WholeStep

MAKERS = {"lion": Lion, "adamw_8bit": AdamW8bit, "lion_8bit": Lion8bit, "muon": Muon, "muon's adamw": partial(Muon, orthogonal=False)}


def trained(make: type[WholeStep], *, ordered: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values, *grads = torch.randn(4, 64, 96, generator=generator)
    parameter = nn.Parameter(values.clone() if ordered else values.T.contiguous().T)
    assert parameter.is_contiguous() is ordered
    optimizer = make([parameter], lr=0.01, weight_decay=0.1)
    for grad in grads:
        parameter.grad = grad
        optimizer.step()
    assert not torch.equal(parameter, values)
    return parameter.detach()


@pytest.mark.parametrize("name", MAKERS)
def test_a_parameter_trains_however_it_lies_in_memory(name: str) -> None:
    assert torch.equal(trained(MAKERS[name], ordered=False), trained(MAKERS[name], ordered=True))


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "muon"])
def test_an_empty_parameter_is_passed_over(name: str) -> None:
    empty = nn.Parameter(torch.empty(0, 8))
    empty.grad = torch.empty(0, 8)
    MAKERS[name]([empty]).step()


@pytest.mark.parametrize("name", MAKERS)
def test_a_closure_makes_the_gradients_and_its_loss_is_returned(name: str) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))

    def closure() -> float:
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    assert MAKERS[name]([parameter]).step(closure) == 4.0
    assert parameter.grad is not None and not torch.equal(parameter, torch.ones(2, 2))
