"""Every stage of the engine on one GPU under NCCL: losses, norms and parameters are those of plain torch on the CPU.

The same runs under gloo on the CPU, so that what runs on the GPU machine is known to work but for the device.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from framework.kernels import library
from framework.zero import NonFiniteError, OffloadConfig, PrecisionConfig, ZeroConfig, ZeroEngine
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


@pytest.mark.parametrize("alone", PLACES, indirect=True)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_fp32_the_compiled_kernels_make_the_steps(alone: torch.device, stage: int):
    if reason := library.missing(alone.type):
        pytest.skip(f"no compiled kernels: {reason}")
    for name in ("Plain", "Unused"):
        plain = zoo.train_plain(name, zoo.micro_batches(STEPS, MICROS), CLIP, torch.float32)
        assert_equal([train(name, stage, alone, "float32")], plain, 5e-5)


@pytest.mark.parametrize("alone", PLACES, indirect=True)
@pytest.mark.parametrize(("optimizer", "params"), [("cpu", "cpu"), ("nvme", "none"), ("nvme", "nvme"), ("cpu", "nvme")])
def test_offloaded_state_follows_plain_torch_on_the_cpu(alone: torch.device, tmp_path, optimizer: str, params: str):
    if reason := library.missing("cpu"):
        pytest.skip(f"no compiled kernels: {reason}")
    offload = OffloadConfig(optimizer=optimizer, params=params, nvme_path=str(tmp_path))
    plain = zoo.train_plain("Plain", zoo.micro_batches(STEPS, MICROS), CLIP, torch.float32)
    assert_equal([train("Plain", 3, alone, "float32", offload)], plain, 5e-5)


@pytest.mark.parametrize("alone", PLACES, indirect=True)
def test_a_master_kept_as_remainder_trains_the_same_bits(alone: torch.device):
    if reason := library.missing(alone.type):
        pytest.skip(f"no compiled kernels: {reason}")
    full, remainder = (train("Plain", 3, alone, "bfloat16", master_weights=kept) for kept in ("full", "remainder"))
    assert full["loss"] == remainder["loss"]
    assert all(torch.equal(tensor, remainder["model"][name]) for name, tensor in full["model"].items())


@pytest.mark.parametrize("alone", PLACES, indirect=True)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_a_step_that_is_not_finite_changes_nothing_and_does_not_count(alone: torch.device, clip: float | None, bad: str):
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=zoo.adamw(model), grad_clip=clip)
    (ids,) = zoo.micro_batches(1, 1)[0]
    for scale in (1.0, float(bad)):
        before = None if scale == 1.0 else engine.state_dict()
        try:
            engine.backward(engine.module(ids.to(alone)) * scale, zoo.count_tokens(ids))
            engine.step()
            engine.check_last_step()
        except NonFiniteError:
            engine.reset()
    after = engine.state_dict()
    assert before["step"] == after["step"] == 1
    for name, tensor in before["model"].items():
        assert torch.equal(tensor, after["model"][name])
        for key, value in before["optimizer"][name].items():
            assert torch.equal(value, after["optimizer"][name][key]), (name, key)


def train(
    name: str, stage: int, device: torch.device, dtype: str = "float64", offload: OffloadConfig | None = None, **options: str
) -> dict:
    model = zoo.make(name, torch.float64 if dtype == "float64" else torch.float32)
    precision = PrecisionConfig(compute_dtype=dtype, **options)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), precision, offload, optimizer=zoo.adamw(model), grad_clip=CLIP)
    assert engine.device.type == device.type and engine.sharded_optimizer.writes_shards == (dtype != "float64")
    trained = zoo.train(engine, zoo.micro_batches(STEPS, MICROS))
    whole = {name: tensor.cpu() for name, tensor in engine.full_tensors() if tensor is not None}
    return {**trained, "model": whole}
