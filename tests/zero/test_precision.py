"""How masters are kept changes bytes and no bit, and what is rounded away without them is what is said to be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from framework.checkpoint.load import Checkpoint, load_optimizer
from framework.checkpoint.save import save
from framework.kernels import library
from framework.zero import OffloadConfig, PrecisionConfig, ZeroConfig, ZeroEngine
from framework.zero.lion import Lion
from tests.zero import zoo
from tests.zero.test_memory import Model, planned

FULL, REMAINDER, NONE = (PrecisionConfig(compute_dtype="bfloat16", master_weights=kind) for kind in ("full", "remainder", "none"))
IN_HOST_MEMORY = {
    "device": OffloadConfig(),
    "optimizer": OffloadConfig(optimizer="cpu"),
    "half": OffloadConfig(optimizer="cpu", fraction=0.5),
    "all": OffloadConfig(optimizer="cpu", params="cpu"),
}
PLACES = [(0, "device"), (1, "device"), (2, "optimizer"), (2, "half"), (3, "device"), (3, "optimizer"), (3, "all")]
OPTIMIZERS = {
    "adamw": zoo.adamw,
    "lion": lambda model: Lion(model.parameters(), lr=1e-3, weight_decay=0.1),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}
needs_kernels = pytest.mark.skipif(library.missing("cpu") is not None, reason=f"no compiled kernels: {library.missing('cpu')}")


def make(precision: PrecisionConfig, stage: int, offload: str = "device", optimizer: str = "adamw", name: str = "Plain", read=None):
    """Half of the weights are halves of a bf16 step, which a cast would round to even."""
    model = zoo.make(name, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.where(torch.rand(parameter.shape) < 0.5, (parameter * 512).round() / 512, parameter))
    made = OPTIMIZERS[optimizer](model)
    return ZeroEngine(model, ZeroConfig(stage=stage), precision, IN_HOST_MEMORY[offload], optimizer=made, grad_clip=0.5, read=read)


def train(engine: ZeroEngine, steps: slice = slice(0, 4)) -> dict:
    return {**zoo.train(engine, zoo.micro_batches(6, 4)[steps]), **engine.state_dict()}


def make_and_train(*place) -> dict:
    return train(make(*place))


def assert_same(found: dict, expected: dict) -> None:
    """Losses, norms, masters and optimizer state, bit for bit."""
    assert found["loss"] == expected["loss"] and found["norm"] == expected["norm"]
    for name, tensor in expected["model"].items():
        assert tensor.dtype is torch.float32 and torch.equal(found["model"][name], tensor), name
    for name, state in expected["optimizer"].items():
        assert all(torch.equal(found["optimizer"][name][key], value) for key, value in state.items()), name


# ---- the remainder
@needs_kernels
@pytest.mark.parametrize(("stage", "offload"), PLACES)
def test_p44_a_master_kept_as_remainder_trains_the_same_bits_as_one_in_fp32(ranks, stage: int, offload: str) -> None:
    for name in ("Plain", "Unused"):
        full, remainder = (ranks(2, make_and_train, kind, stage, offload, "adamw", name)[0] for kind in (FULL, REMAINDER))
        assert_same(remainder, full)


@needs_kernels
@pytest.mark.parametrize("optimizer", ["lion", "sgd"])
def test_so_it_does_with_other_optimizers_of_ours(ranks, optimizer: str) -> None:
    full, remainder = (ranks(2, make_and_train, kind, 3, "device", optimizer)[0] for kind in (FULL, REMAINDER))
    assert_same(remainder, full)


def test_without_compiled_kernels_the_reference_updates_it(ranks) -> None:
    full, remainder = (ranks(2, by_the_reference, kind)[0] for kind in (FULL, REMAINDER))
    assert remainder["loss"] == pytest.approx(full["loss"], rel=1e-6)
    for name, tensor in full["model"].items():
        torch.testing.assert_close(remainder["model"][name], tensor, rtol=1e-5, atol=1e-6)


def by_the_reference(precision: PrecisionConfig) -> dict:
    before = library.mode()
    library.choose("reference")
    try:
        return train(make(precision, 3))
    finally:
        library.choose(before)


# ---- no masters
@needs_kernels
@pytest.mark.parametrize(("stage", "offload"), PLACES)
def test_p21_without_masters_training_is_the_same_for_every_stage_and_place(ranks, stage: int, offload: str) -> None:
    assert_same(ranks(2, make_and_train, NONE, stage, offload)[0], ranks(2, make_and_train, NONE, 0)[0])


def test_without_masters_small_updates_are_lost_and_with_them_they_add_up() -> None:
    def after(precision: PrecisionConfig) -> torch.Tensor:
        model = torch.nn.Linear(8, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        engine = ZeroEngine(model, ZeroConfig(), precision, optimizer=torch.optim.SGD(model.parameters(), lr=2**-10))
        for _ in range(16):
            engine.backward(engine.module(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
            engine.step()
        ((_, weight),) = engine.full_tensors()
        return weight

    assert torch.equal(after(NONE), torch.ones(1, 8))
    assert torch.equal(after(FULL), torch.full((1, 8), 1 - 2**-6)) and torch.equal(after(REMAINDER), after(FULL))


# ---- gradients
@pytest.mark.parametrize("precision", [FULL, REMAINDER, NONE, PrecisionConfig(compute_dtype="float16")], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_micro_batches_add_up_in_fp32(stage: int, precision: PrecisionConfig) -> None:
    """256 times 2^-9 after 1: in bf16, 1 + 2^-9 is 1."""
    model = torch.nn.Linear(1, 1, bias=False)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), precision, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    scale = 1.0 if engine.scaler is None else float(engine.scaler.scale)
    for number in range(257):
        x = torch.full((1, 1), 1.0 if number == 0 else 2**-9, dtype=engine.compute_dtype)
        engine.backward(engine.module(x).sum(), tokens=number == 0, last=number == 256)
    assert float(engine.trained[0].grad[0]) / scale == 1.5
    assert float(engine.step().grad_norm) == 1.5


# ---- checkpoints
def save_after_3(precision: PrecisionConfig, folder: Path) -> dict:
    engine = make(precision, 3)
    train(engine, slice(0, 3))
    save(engine, folder, run={})
    return train(engine, slice(3, 6))


def resume(precision: PrecisionConfig, stage: int, offload: str, folder: Path) -> dict:
    checkpoint = Checkpoint(folder)
    engine = make(precision, stage, offload, read=checkpoint.reader(None))
    load_optimizer(engine, checkpoint)
    return train(engine, slice(3, 6))


@needs_kernels
def test_p16_p17_whatever_has_saved_masters_any_precision_goes_on_from_them(ranks, tmp_path) -> None:
    folders = {kind.master_weights: tmp_path / kind.master_weights for kind in (FULL, REMAINDER, NONE)}
    expected = {kind.master_weights: ranks(2, save_after_3, kind, folders[kind.master_weights])[0] for kind in (FULL, REMAINDER, NONE)}
    for stage, offload in ((3, "device"), (3, "all"), (2, "optimizer")):
        for saved, loading in ((REMAINDER, REMAINDER), (REMAINDER, FULL), (FULL, REMAINDER), (NONE, NONE)):
            found = ranks(2, resume, loading, stage, offload, folders[saved.master_weights])[0]
            assert_same(found, expected[saved.master_weights])
    in_fp32 = Checkpoint(folders["remainder"]).whole("head.weight")
    assert in_fp32.dtype is torch.float32 and torch.equal(Checkpoint(folders["full"]).whole("head.weight"), in_fp32)


def test_optimizer_state_that_passes_through_torchs_state_dict_stays_fp32() -> None:
    engine = make(REMAINDER, 3)
    train(engine, slice(0, 2))
    moments = [state["exp_avg"].clone() for state in engine.optimizer.state.values()]
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    train(engine, slice(0, 0))
    for state, moment in zip(engine.optimizer.state.values(), moments, strict=True):
        assert state["exp_avg"].dtype is torch.float32 and torch.equal(state["exp_avg"], moment)


# ---- bytes
def measure(precision: PrecisionConfig, stage: int, offload: str) -> dict:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), precision, IN_HOST_MEMORY[offload], optimizer=optimizer)
    for _ in range(2):
        engine.backward(engine.module(torch.arange(12).view(3, 4)), 12)
        engine.step()
    engine.flush()
    kept = sum(engine.memory.by_kind.get(k, 0) + engine.host_memory.by_kind.get(k, 0) for k in ("params", "master", "optimizer"))
    parameters = sum(buffer.shard_numel for buffer in engine.buffers)
    return {"peak": engine.memory.peak, "host": engine.host_memory.current, "formula": planned(engine), "per_parameter": kept / parameters}


@needs_kernels
@pytest.mark.parametrize(("stage", "offload"), [(0, "device"), (3, "device"), (2, "optimizer"), (2, "half"), (3, "all")])
@pytest.mark.parametrize(("precision", "bytes_per_parameter"), [(FULL, 14), (REMAINDER, 12), (NONE, 10)])
def test_bytes_are_those_of_the_formula(ranks, stage: int, offload: str, precision: PrecisionConfig, bytes_per_parameter: int) -> None:
    for result in ranks(2, measure, precision, stage, offload):
        assert result["peak"] == result["formula"].total
        assert result["host"] == result["formula"].host
        if stage == 3:
            assert result["per_parameter"] == pytest.approx(bytes_per_parameter, rel=0.02)


# ---- refusals
@pytest.mark.parametrize(
    ("precision", "offload", "message"),
    [
        (PrecisionConfig(compute_dtype="float16", master_weights="remainder"), OffloadConfig(), "is for bfloat16, got"),
        (REMAINDER, OffloadConfig(params="cpu"), "needs all optimizer state there, too"),
        (NONE, OffloadConfig(params="cpu", optimizer="cpu", fraction=0.5), "needs all optimizer state there, too"),
    ],
)
def test_what_cannot_be_is_refused(precision: PrecisionConfig, offload: OffloadConfig, message: str) -> None:
    model = zoo.make("Plain", torch.float32)
    with pytest.raises(ValueError, match=message):
        ZeroEngine(model, ZeroConfig(stage=3), precision, offload, optimizer=zoo.adamw(model))


def test_optimizers_of_torchs_own_need_masters_in_fp32() -> None:
    model = zoo.make("Plain", torch.float32)
    with pytest.raises(ValueError, match="take AdamW, Lion or SGD"):
        ZeroEngine(model, ZeroConfig(), REMAINDER, optimizer=torch.optim.RMSprop(model.parameters()))
