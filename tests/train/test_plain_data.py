"""What Lightning puts into a checkpoint comes back from JSON and tensors with the types that it had, or is refused by name."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.data import AttributeDict
from omegaconf import OmegaConf
from torch.optim import lr_scheduler

from framework.config.errors import UserError
from framework.train.plain_data import pack, unpack


def and_back(state):
    packed, tensors, problems = pack(state, "state")
    assert problems == []
    return unpack(json.loads(json.dumps(packed)), tensors.__getitem__)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.sampled_from(["!tuple", "!dict"]) | st.integers() | st.tuples(st.integers(), st.text())
PLAIN = st.recursive(
    LEAVES | st.sets(st.integers(), max_size=1),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=10,
)


@settings(max_examples=50)
@given(PLAIN)
def test_plain_data_come_back_with_their_types(state):
    found = and_back(state)
    assert found == state and repr(found) == repr(state)  # 1 is not True, (1,) is not [1]


def test_further_types_come_back():
    state = [Counter({2: 1}), OrderedDict(b=1, a=2), AttributeDict(x=1), Path("a/b"), torch.bfloat16, torch.Size([2, 3]), frozenset({1})]
    found = and_back(state)
    assert found == state and [type(item) for item in found] == [type(item) for item in state]
    configured = and_back(OmegaConf.create({"width": 3, "twice": "${width}", "list": [1, {"a": None}]}))
    assert OmegaConf.is_config(configured) and configured.twice == 3 and configured.list[1].a is None
    assert and_back(type(configured)) is type(configured)
    assert math.isnan(and_back([math.nan])[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_tensors_come_back(dtype):
    tensors = [torch.ones((), dtype=dtype), torch.arange(6).view(2, 3).t().to(dtype), torch.empty(0, dtype=dtype)]
    for found, expected in zip(and_back(tensors), tensors, strict=True):
        assert found.dtype is dtype and torch.equal(found, expected)


def test_generators_of_python_and_numpy_come_back():
    state = and_back({"python": random.getstate(), "numpy": np.random.get_state(), "scalar": np.float32(0.1)})
    expected = random.random(), np.random.rand()
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    assert (random.random(), np.random.rand()) == expected
    assert type(state["scalar"]) is np.float32 and state["scalar"] == np.float32(0.1)


def schedulers(optimizer):
    cosine, linear = lr_scheduler.CosineAnnealingLR(optimizer, 10), lr_scheduler.LinearLR(optimizer)
    return [
        lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
        lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
        lr_scheduler.ReduceLROnPlateau(optimizer),
        lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
        lr_scheduler.SequentialLR(optimizer, [linear, cosine], [3]),
    ]


def test_schedulers_of_torch_go_on_as_they_would_have():
    def made():
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        return optimizer, schedulers(optimizer)

    for index in range(5):
        (optimizer, all_before), (_, all_after) = made(), made()
        before, after = all_before[index], all_after[index]
        advance = (lambda scheduler: scheduler.step(1.0)) if isinstance(before, lr_scheduler.ReduceLROnPlateau) else type(before).step
        optimizer.step()
        advance(before)
        after.load_state_dict(and_back(before.state_dict()))
        assert after.state_dict() == before.state_dict(), type(before).__name__


def test_whatever_is_not_plain_is_named_with_its_place():
    cycle: list = []
    cycle.append(cycle)
    state = {"a": [1, {"net": torch.nn.Linear(1, 1)}], "f": len, "meta": torch.ones(1, device="meta"), "c": cycle, ("k", object): 1}
    _, _, problems = pack(state, "checkpoint")
    assert [problem.path for problem in problems] == [
        "checkpoint['a'][1]['net']",
        "checkpoint['f']",
        "checkpoint['meta']",
        "checkpoint['c'][0]",
        "a key of checkpoint[1]",
    ]
    assert "state_dict()" in problems[0].fix


def test_a_type_of_a_later_version_is_refused():
    with pytest.raises(UserError, match="!later"):
        unpack([{"!later": 1}], dict().__getitem__)
