"""Compiling as tests can afford it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def strict_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile` that traces, fails on a graph break, and runs what it traced without generating code."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, compile=torch.compile: compile(function, backend="eager", fullgraph=True))
