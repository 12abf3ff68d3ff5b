"""`ZeroStrategy` trains a user's LightningModule with the numbers of Lightning's own single-process Trainer."""

from __future__ import annotations

import copy
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch.testing import assert_close

from framework.config.schema import PrecisionConfig, ZeroConfig
from framework.train.strategy import ZeroStrategy
from framework.zero import NonFiniteError
from tests.train.lightning_models import QUIET, OnMeta, Recorder, Regressor, loader, plain_fit, weights, zero_fit

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def plain():
    """`plain(accumulate)`: (losses, weights) of Lightning's own training. 8 batches an epoch, so 3 leaves a window of 2."""
    results = {}

    def fit(accumulate: int):
        if accumulate not in results:
            results[accumulate] = plain_fit(Regressor(), accumulate_grad_batches=accumulate)
        return results[accumulate]

    return fit


def assert_same(got, expected) -> None:
    assert_close(got[0], expected[0], rtol=1e-6, atol=1e-7)
    assert_close(got[1], expected[1], rtol=1e-5, atol=1e-6)


# -- losses and weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_trains_as_a_plain_trainer_does(stage, accumulate, plain):
    assert_same(zero_fit(Regressor(), ZeroStrategy(stage), accumulate_grad_batches=accumulate), plain(accumulate))


def fit_on_rank(stage, accumulate):
    module = Regressor(seed=1 + dist.get_rank())  # rank 0's initial weights hold
    return zero_fit(module, ZeroStrategy(stage), world_size=dist.get_world_size(), accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_as_a_plain_trainer_does_on_the_same_global_batches(stage, accumulate, plain, ranks):
    """Lightning gives each rank its half of every batch; every rank ends with the whole trained weights."""
    (losses_0, weights_0), (losses_1, weights_1) = ranks(2, fit_on_rank, stage, accumulate)
    mean = [(a + b) / 2 for a, b in zip(losses_0, losses_1, strict=True)]
    assert_same((mean, weights_0), plain(accumulate))
    assert_close(weights_1, weights_0, rtol=0, atol=0)


def fit_reports_stats(stage):
    strategy = ZeroStrategy(stage)
    losses, _ = zero_fit(Regressor(), strategy, world_size=dist.get_world_size(), accumulate_grad_batches=3)
    return losses, float(strategy.last_stats.loss), float(strategy.last_stats.grad_norm)


def test_last_stats_hold_the_loss_of_the_whole_step(ranks):
    (losses_0, *stats_0), (losses_1, *stats_1) = ranks(2, fit_reports_stats, 2)
    assert stats_0 == stats_1
    assert stats_0[0] == pytest.approx((sum(losses_0[-2:]) + sum(losses_1[-2:])) / 2, rel=1e-6)
    assert stats_0[1] > 0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam])
def test_other_elementwise_optimizers_train_as_in_a_plain_trainer(kind):
    class Other(Regressor):
        def configure_optimizers(self):
            return kind(self.parameters(), lr=0.01)

    assert_same(zero_fit(Other(), ZeroStrategy(3)), plain_fit(Other()))


def test_parameters_that_the_optimizer_does_not_have_stay_as_they_are():
    class HeadOnly(Regressor):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.head.parameters(), lr=0.01)

    before = weights(HeadOnly())
    got = zero_fit(HeadOnly(), ZeroStrategy(3))
    assert_same(got, plain_fit(HeadOnly()))
    assert_close(got[1]["embed.weight"], before["embed.weight"], rtol=0, atol=0)


def test_gradient_clipping_of_the_trainer_is_done_by_the_engine():
    expected = plain_fit(Regressor(), gradient_clip_val=0.05)
    assert_same(zero_fit(Regressor(), ZeroStrategy(3), gradient_clip_val=0.05), expected)
    assert_same(zero_fit(Regressor(), ZeroStrategy(3, grad_clip=0.05)), expected)


def test_a_clipping_hook_of_the_module_is_honoured():
    class ClipsLater(Regressor):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            if self.global_step >= 4:
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    assert_same(zero_fit(ClipsLater(), ZeroStrategy(2)), plain_fit(ClipsLater()))


class ManualRegressor(Regressor):
    """Two backward calls of halves and a step, by hand; the halves run through a layer that is no block."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            hidden = self.embed(x)
            for block in self.blocks:
                hidden = block(hidden)
            loss = F.mse_loss(self.head(hidden), y) / 2
            self.manual_backward(loss)
            total += loss.detach()
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        scheduler.step()
        return total


@pytest.mark.parametrize("stage", STAGES)
def test_manual_optimization_of_a_user_works(stage):
    assert_same(zero_fit(ManualRegressor(), ZeroStrategy(stage)), plain_fit(ManualRegressor()))


def test_bfloat16_is_asked_for_through_the_strategy_and_follows_fp32(plain):
    strategy = ZeroStrategy(3, precision=PrecisionConfig(compute_dtype="bfloat16"))
    losses, _ = zero_fit(Regressor(), strategy)
    assert strategy.engine.compute_dtype is torch.bfloat16
    assert_close(losses, plain(1)[0], rtol=0.1, atol=0.02)


def test_deterministic_and_detect_anomaly_change_nothing(plain):
    try:
        assert_same(zero_fit(Regressor(), ZeroStrategy(3), deterministic=True, detect_anomaly=True), plain(1))
    finally:
        torch.use_deterministic_algorithms(False)


def test_shuffled_data_come_in_the_order_of_a_plain_trainer():
    class Shuffled(Regressor):
        def train_dataloader(self):
            return torch.utils.data.DataLoader(loader().dataset, batch_size=4, shuffle=True)

    def fit(**options):
        recorder, module = Recorder(), Shuffled()
        Trainer(accelerator="cpu", devices=1, max_epochs=2, callbacks=[recorder], **options, **QUIET).fit(module)
        return recorder.losses

    assert_close(fit(strategy=ZeroStrategy(1)), fit(), rtol=1e-6, atol=1e-7)


# -- the module before, between and after runs ---------------------------------------------------------------------------------------


def test_after_fit_the_module_is_an_ordinary_one_again(plain):
    module = Regressor()
    zero_fit(module, ZeroStrategy(3))
    again = copy.deepcopy(module)
    assert "training_step" not in vars(module)
    assert not module._forward_pre_hooks and not module._forward_hooks
    x = loader().dataset.tensors[0]
    assert_close(again(x), module(x))
    assert_close(weights(module), plain(1)[1], rtol=1e-5, atol=1e-6)


def test_fit_validate_test_and_predict_follow_one_another():
    def run(**options):
        module = Regressor()
        trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, **options, **QUIET)
        (before,) = trainer.validate(module, loader(), verbose=False)
        trainer.fit(module, loader(), loader())
        (after,) = trainer.validate(module, loader(), verbose=False)
        (test,) = trainer.test(module, loader(), verbose=False)
        predicted = trainer.predict(module, torch.utils.data.DataLoader(loader().dataset.tensors[0], batch_size=8))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader())
        return [before["val_loss"], after["val_loss"], test["val_loss"]], torch.cat(predicted), weights(module)

    expected = run()
    for gather in (True, False):
        losses, predicted, trained = run(strategy=ZeroStrategy(1, gather_after_fit=gather))
        assert_close(losses, expected[0], rtol=1e-5, atol=1e-6)
        assert_close(predicted, expected[1], rtol=1e-5, atol=1e-5)
        assert_close(trained, expected[2], rtol=1e-5, atol=1e-6)


def keep_shards(stage):
    strategy, module = ZeroStrategy(stage, gather_after_fit=False), Regressor()
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=2, strategy=strategy, **QUIET)
    trainer.fit(module, loader(dist.get_world_size()))
    (result,) = trainer.validate(module, loader(dist.get_world_size()), verbose=False)
    stored = strategy.engine.memory.by_kind["gathered"], all(bool(parameter.isnan().all()) for parameter in module.parameters())
    tensors = {name: tensor for name, tensor in strategy.engine.full_tensors() if tensor is not None}
    return stored, tensors, result["val_loss"]


def test_weights_may_stay_in_shards_after_fit(ranks, plain):
    """Then only the engine gives them out, on rank 0; evaluation runs on the shards."""
    (stored_0, whole, val_loss_0), (stored_1, nothing, val_loss_1) = ranks(2, keep_shards, 3)
    assert stored_0 == stored_1 == (0, True)  # no gathered bytes, and no parameter reads as anything
    assert_close(whole, plain(1)[1], rtol=1e-5, atol=1e-6)
    assert nothing == {}
    assert val_loss_0 == val_loss_1


def test_a_model_on_the_meta_device_starts_from_the_strategys_seed_and_trains():
    first, second, other = OnMeta(), OnMeta(), OnMeta()
    zero_fit(first, ZeroStrategy(3, meta_init=True, seed=5))
    zero_fit(second, ZeroStrategy(0, meta_init=True, seed=5))
    zero_fit(other, ZeroStrategy(0, meta_init=True, seed=6))
    assert first.was_meta and first.second.weight is first.first.weight
    assert_close(weights(first), weights(second))
    assert not torch.equal(first.first.weight, other.first.weight)


@pytest.mark.parametrize("meta_init", [True, False])
def test_initial_weights_come_from_a_reader_once(meta_init):
    module = OnMeta()
    options = {"read": lambda name, start, stop: torch.arange(start, stop) / 100, "meta_init": meta_init}
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy=ZeroStrategy(3, **options), **QUIET)
    trainer.validate(module, loader(), verbose=False)
    assert_close(module.first.weight.detach(), torch.arange(64).view(8, 8) / 100)
    trainer.fit(module, loader())
    trained = weights(module)
    trainer.validate(module, loader(), verbose=False)
    assert not torch.equal(trained["first.weight"], torch.arange(64).view(8, 8) / 100)
    assert_close(weights(module), trained, rtol=0, atol=0)


def test_configure_model_is_built_for_real_unless_the_meta_device_is_asked_for():
    module = OnMeta()
    torch.manual_seed(3)
    zero_fit(module, ZeroStrategy(3))
    torch.manual_seed(3)
    expected = OnMeta()
    plain_fit(expected)
    assert not module.was_meta
    assert_close(weights(module), weights(expected), rtol=1e-5, atol=1e-6)


def test_parameters_can_be_read_during_a_run_where_they_are_gathered():
    class Reads(Regressor):
        def on_train_epoch_end(self):
            with self.trainer.strategy.gathered():
                norms.append(sum(float(parameter.norm()) for parameter in self.parameters()))

        def on_validation_epoch_end(self):
            self.on_train_epoch_end()

    norms, module = [], Reads()
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy=ZeroStrategy(3), **QUIET)
    trainer.fit(module, loader())
    trainer.validate(module, loader(), verbose=False)
    assert norms == [pytest.approx(sum(float(value.norm()) for value in weights(module).values()), rel=1e-5)] * 2


# -- failures and process groups -----------------------------------------------------------------------------------------------------


def test_an_exception_leaves_a_readable_module_that_trains_again(plain):
    class Fails(Regressor):
        broken = True

        def training_step(self, batch, batch_idx):
            if self.broken and batch_idx == 2:
                raise KeyError("a mistake in training_step")
            return super().training_step(batch, batch_idx)

    module = Fails()
    with pytest.raises(KeyError, match="a mistake in training_step"):
        zero_fit(module, ZeroStrategy(3))
    assert all(torch.isfinite(value).all() for value in weights(module).values())
    module.broken = False
    module.load_state_dict(Regressor().state_dict())
    assert_same(zero_fit(module, ZeroStrategy(3)), plain(1))


def test_p48_a_loss_that_is_not_finite_stops_the_run_before_the_parameters_are_touched():
    class Explodes(Regressor):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (float("nan") if self.global_step == 3 else 1.0)

    module = Explodes()
    with pytest.raises(NonFiniteError, match="step 4"):
        zero_fit(module, ZeroStrategy(3))
    assert all(torch.isfinite(value).all() for value in weights(module).values())


def strategy_that_closes(stage):
    """A rank that fails takes its own connections down, and no one else's."""
    world = dist.group.WORLD

    class Fails(Regressor):
        def training_step(self, batch, batch_idx):
            raise KeyError("on every rank")

    strategy = ZeroStrategy(stage)
    try:
        zero_fit(Fails(), strategy, world_size=2)
    except KeyError:
        return dist.group.WORLD is world
    return "no exception"


def test_an_exception_leaves_the_users_process_group_alone(ranks):
    assert ranks(2, strategy_that_closes, 3) == [True, True]


def group_survives(stage):
    world = dist.group.WORLD
    zero_fit(Regressor(), ZeroStrategy(stage), world_size=dist.get_world_size())
    return dist.group.WORLD is world and dist.is_initialized()


def test_a_process_group_of_the_users_is_used_and_left_alone(ranks):
    assert ranks(2, group_survives, 1) == [True, True]


def join_and_close(port):
    dist.destroy_process_group()
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    strategy = ZeroStrategy(zero=ZeroConfig(stage=2), timeout_seconds=60)
    zero_fit(Regressor(), strategy, max_epochs=1, world_size=2)
    during = dist.get_world_size()
    strategy.close()
    return during, dist.is_initialized()


def test_its_own_process_group_is_made_from_the_launchers_variables_and_ended_by_close(ranks):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    assert ranks(2, join_and_close, port) == [(2, False), (2, False)]


def test_one_process_needs_no_process_group():
    zero_fit(Regressor(), ZeroStrategy(3), max_epochs=1)
    assert not dist.is_initialized()
