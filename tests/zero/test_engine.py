"""What the engine refuses, how it fails, and that it recovers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from framework import torch_private
from framework.zero import NonFiniteError, ZeroConfig, ZeroEngine
from tests.zero import zoo

README = Path(__file__).parents[2] / "framework" / "zero" / "README.md"


def test_private_torch_apis_behave_as_relied_upon() -> None:
    torch_private.self_test.__wrapped__()


def test_the_plain_script_of_the_readme_trains(ranks) -> None:
    script = re.search(r"```python\n(.*?)```", README.read_text(), re.S).group(1)
    assert len(script.strip().splitlines()) <= 12
    first, last = ranks(2, run_script, script)[0]
    assert last < first


def run_script(script: str) -> tuple[float, float]:
    printed: list[float] = []
    exec(compile(script, "README", "exec"), {"print": lambda *values: printed.append(float(values[-1]))})
    return printed[0], printed[-1]


def step(engine: ZeroEngine, ids: torch.Tensor, scale: float = 1.0):
    engine.backward(engine.module(ids) * scale, zoo.count_tokens(ids))
    return engine.step()


def non_finite_on_one_rank(stage: int) -> tuple[str, list[float], list[float]]:
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), optimizer=zoo.adamw(model))
    (ids,) = zoo.micro_batches(1, 1)[0]
    step(engine, ids)
    before = {name: t for name, t in engine.full_tensors()}
    with pytest.raises(NonFiniteError) as caught:
        step(engine, ids, scale=float("inf") if dist.get_rank() == 1 else 1.0)
    after = {name: t for name, t in engine.full_tensors()}
    unchanged = all(torch.equal(before[name], after[name]) for name in before if before[name] is not None)
    assert unchanged
    return str(caught.value), float(step(engine, ids).loss), engine.steps_done


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_p48_a_non_finite_loss_names_step_rank_and_parameter_and_changes_nothing(ranks, stage: int) -> None:
    for message, loss_after, steps_done in ranks(2, non_finite_on_one_rank, stage):
        assert "step 2: the loss is not finite on rank 1 and the gradient is not finite in " in message
        assert loss_after == loss_after and steps_done == 2


def stop_requested_on_one_rank() -> list[float]:
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=1), optimizer=zoo.adamw(model))
    (ids,) = zoo.micro_batches(1, 1)[0]
    seen = []
    for number in range(3):
        engine.stop_requested = number >= 1 and dist.get_rank() == 1
        seen.append(float(step(engine, ids).stop))
    return seen


def test_a_stop_request_reaches_all_ranks_at_the_same_step(ranks) -> None:
    assert ranks(2, stop_requested_on_one_rank) == [[0.0, 1.0, 1.0]] * 2


def fails_in(where: str, stage: int) -> tuple[float, float]:
    """An exception in forward or backward, then a good step; beside it an engine that never failed."""
    (ids,) = zoo.micro_batches(1, 1)[0]
    losses = []
    for fail in (True, False):
        model = zoo.make("Plain", torch.float32)
        engine = ZeroEngine(model, ZeroConfig(stage=stage), optimizer=zoo.adamw(model))
        step(engine, ids)
        if fail:
            handle = model.blocks[1].down.register_forward_hook(_raising if where == "forward" else _raising_in_backward)
            with pytest.raises(ArithmeticError):
                step(engine, ids)
            handle.remove()
            engine.reset()
        step(engine, ids)
        losses.append(float(step(engine, ids).loss))
    return tuple(losses)


def _raising(*_):
    raise ArithmeticError("in forward")


def _raising_in_backward(module, args, out):
    def fail(grad):
        raise ArithmeticError("in backward")

    out.register_hook(fail)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_failed_step_leaves_the_engine_usable(stage: int, where: str) -> None:
    after_failure, never_failed = fails_in(where, stage)
    assert after_failure == never_failed


def test_reentrant_checkpointing_is_refused() -> None:
    class Reentrant(zoo.Plain):
        def call(self, block, x):
            return checkpoint(block, x, use_reentrant=True)

    model = Reentrant()
    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=zoo.adamw(model))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        step(engine, zoo.micro_batches(1, 1)[0][0])


def evaluates_between_steps(stage: int) -> tuple[list[float], float]:
    model = zoo.make("Checkpointed", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), optimizer=zoo.adamw(model))
    ids, other = zoo.micro_batches(1, 2)[0]
    losses = []
    for _ in range(3):
        with torch.inference_mode():
            evaluated = float(engine.module(ids)) / zoo.count_tokens(ids)
        with torch.no_grad():
            assert float(engine.module(ids)) / zoo.count_tokens(ids) == pytest.approx(evaluated)
        losses.append((evaluated, float(step(engine, ids).loss)))
    return losses, engine.memory.by_kind.get("gathered", 0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_evaluation_between_steps_sees_the_current_weights_and_releases_them(ranks, stage: int) -> None:
    for losses, gathered in ranks(2, evaluates_between_steps, stage):
        assert all(evaluated == pytest.approx(trained, rel=1e-6) for evaluated, trained in losses)
        assert gathered == 0


def test_a_released_parameter_can_be_printed_and_reads_as_nan() -> None:
    model = zoo.make("Plain", torch.float32)
    ZeroEngine(model, ZeroConfig(stage=3), optimizer=zoo.adamw(model))
    weight = model.blocks[0].up.weight
    assert weight.shape == (29, zoo.WIDTH) and "nan" in repr(weight) and bool(weight.sum().isnan())


class ChoosesItsLoss(zoo.Plain):
    """Calls backward itself, and uses the root's parameters afterwards, as a user's `training_step` may."""

    def training_step(self, engine: ZeroEngine, ids: torch.Tensor) -> float:
        loss = self(ids)
        engine.backward(loss, zoo.count_tokens(ids))
        return float(self.embed.weight.detach().sum())


def backward_inside_a_wrapped_method(stage: int) -> tuple[float, int]:
    torch.manual_seed(1)
    model = ChoosesItsLoss()
    engine = ZeroEngine(model, ZeroConfig(stage=stage), optimizer=zoo.adamw(model))
    engine.wrap_method(model, "training_step")
    sums = [model.training_step(engine, ids[0]) for ids in zoo.micro_batches(2, 1) if engine.steps_done == 0 or engine.step()]
    engine.step()
    return sums, engine.memory.by_kind.get("gathered", 0)


@pytest.mark.parametrize("stage", [0, 3])
def test_backward_inside_a_wrapped_method_leaves_the_root_usable_until_it_returns(ranks, stage: int) -> None:
    for sums, gathered in ranks(2, backward_inside_a_wrapped_method, stage):
        assert all(value == value for value in sums) and gathered == 0


def used_after_a_step_without_release() -> tuple[float, float]:
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=zoo.adamw(model))
    (ids,) = zoo.micro_batches(1, 1)[0]
    engine.backward(engine.module(ids), zoo.count_tokens(ids))
    for unit in engine.units:
        unit.gather()
    engine.step()
    with torch.no_grad():
        kept = float(engine.module(ids))
        again = float(engine.module(ids))
    return kept, again


def test_parameters_that_were_present_during_a_step_are_brought_up_to_date(ranks) -> None:
    for world_size in (1, 2):
        kept, again = ranks(world_size, used_after_a_step_without_release)[0]
        assert kept == again


def bytes_per_step(stage: int) -> tuple[int, int]:
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), optimizer=zoo.adamw(model))
    ids, other = zoo.micro_batches(1, 2)[0]
    for _ in range(2):
        sent = engine.bytes_sent
        engine.backward(engine.module(ids), 1, last=False)
        engine.backward(engine.module(other), 1)
        engine.step()
    sums = 8 * (7 + sum(len(buffer.layout.slots) for buffer in engine.trained))
    exact = engine.bytes_sent - sent - sums
    return exact, [4 * buffer.padded for buffer in engine.buffers]


@pytest.mark.parametrize(("stage", "gathers", "reduces"), [(1, 1, 1), (2, 1, 2), (3, 4, 2)])
def test_bytes_sent_equal_the_theory(ranks, stage: int, gathers: int, reduces: int) -> None:
    """Two micro-batches on two ranks; each gather and each reduce sends half of a buffer. At stage 3 the last block stays gathered between
    its forward and its backward, and the root from the first use of a micro-batch to the last."""
    exact, sizes = ranks(2, bytes_per_step, stage)[0]
    saved_by_staying = 0 if stage < 3 else 2 * (sizes[-1] // 2) + 2 * (sizes[0] // 2)
    assert exact == (gathers + reduces) * sum(sizes) // 2 - saved_by_staying


def test_an_optimizer_that_cannot_be_sharded_is_refused() -> None:
    model = zoo.make("Plain", torch.float32)
    with pytest.raises(ValueError, match="LBFGS is not element-wise.*framework.zero.muon.Muon"):
        ZeroEngine(model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="not a parameter of the module"):
        ZeroEngine(zoo.make("Plain"), optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0))


def test_a_step_without_trained_tokens_is_an_error_not_a_nan() -> None:
    model = zoo.make("Plain", torch.float32)
    engine = ZeroEngine(model, optimizer=zoo.adamw(model))
    engine.backward(engine.module(zoo.micro_batches(1, 1)[0][0]) * 0.0, 0)
    with pytest.raises(ValueError, match="no micro-batch of any rank had a trained token"):
        engine.step()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_gpu_follows_the_cpu(stage: int) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        model = zoo.make("Checkpointed", torch.float32).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine = ZeroEngine(model, ZeroConfig(stage=stage), optimizer=optimizer, grad_clip=0.5, device=device)
        losses.append([float(step(engine, ids[0].to(device)).loss) for ids in zoo.micro_batches(4, 1)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
