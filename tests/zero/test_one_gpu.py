"""Every stage of the engine on one GPU under NCCL: losses, norms and parameters are those of plain torch on the CPU.

The same runs under gloo on the CPU, so that what runs on the GPU machine is known to work but for the device.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from framework.zero import PrecisionConfig, ZeroConfig, ZeroEngine
from tests.zero import zoo
from tests.zero.test_exactness import CLIP, MICROS, STEPS, assert_equal

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PLACES = [pytest.param(("gloo", "cpu"), id="gloo"), pytest.param(("nccl", "cuda"), id="nccl", marks=ON_GPU)]


@pytest.fixture
def alone(request):
    """A process group of one rank."""
    assert not dist.is_initialized()
    backend, device = request.param
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device(device)
    dist.destroy_process_group()


@pytest.mark.parametrize("alone", PLACES, indirect=True)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_on_one_device_follows_plain_torch_on_the_cpu(alone: torch.device, stage: int):
    for name in ("Plain", "Tied", "LowRank", "Checkpointed"):
        plain = zoo.train_plain(name, zoo.micro_batches(STEPS, MICROS), CLIP)
        assert_equal([train(name, stage, alone)], plain, 1e-9)


def train(name: str, stage: int, device: torch.device) -> dict:
    model = zoo.make(name)
    engine = ZeroEngine(
        model, ZeroConfig(stage=stage), PrecisionConfig(compute_dtype="float64"), optimizer=zoo.adamw(model), grad_clip=CLIP
    )
    assert engine.device.type == device.type
    losses, norms = [], []
    for micros in zoo.micro_batches(STEPS, MICROS):
        for index, ids in enumerate(micros):
            engine.backward(engine.module(ids.to(device)), zoo.count_tokens(ids), last=index == len(micros) - 1)
        stats = engine.step()
        losses.append(float(stats.loss))
        norms.append(float(stats.grad_norm))
    whole = {name: tensor.cpu() for name, tensor in engine.full_tensors() if tensor is not None}
    return {"loss": losses, "norm": norms, "model": whole}
