"""What the engine owns is honoured or refused with the line to write instead, before training starts; never ignored."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from framework.config.errors import UserError
from framework.config.schema import ZeroConfig
from framework.train.strategy import ZeroStrategy
from tests.train.lightning_models import QUIET, Regressor, loader, zero_fit


def refusal(module, strategy=None, **options) -> str:
    with pytest.raises(UserError) as refused:
        zero_fit(module, strategy or ZeroStrategy(3), **options)
    return str(refused.value)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", "bfloat16"), ("bf16-true", "bfloat16"), ("64-true", "float64"), ("16-mixed", "float16")]
)
def test_precision_of_the_trainer_is_refused_with_what_to_write(precision, dtype):
    message = refusal(Regressor(), precision=precision)
    setting = "autocast" if precision.endswith("mixed") else "compute_dtype"
    assert f'ZeroStrategy(precision=PrecisionConfig({setting}="{dtype}"))' in message


def test_a_precision_plugin_is_refused():
    with pytest.raises(MisconfigurationException, match="precision set through both"):
        Trainer(strategy=ZeroStrategy(3), plugins=[MixedPrecision("bf16-mixed", "cpu")], **QUIET)


def test_clipping_by_value_is_refused():
    assert "'norm'" in refusal(Regressor(), gradient_clip_val=1.0, gradient_clip_algorithm="value")


def test_clipping_set_twice_is_refused():
    message = refusal(Regressor(), ZeroStrategy(3, grad_clip=0.5), gradient_clip_val=1.0)
    assert "1.0 beside ZeroStrategy(grad_clip=0.5)" in message


def test_a_callback_that_averages_parameters_is_refused():
    assert "StochasticWeightAveraging" in refusal(Regressor(), callbacks=[StochasticWeightAveraging(0.1)])


class KeepsALayer(Regressor):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_hyper_parameters_that_no_checkpoint_could_hold_are_refused_before_training():
    message = refusal(KeepsALayer(torch.nn.Linear(1, 1)), callbacks=[ModelCheckpoint("nowhere")], enable_checkpointing=True)
    assert "KeepsALayer.hparams['layer']" in message and "save_hyperparameters(ignore=" in message


def test_a_plugin_that_writes_checkpoints_is_refused():
    assert "got TorchCheckpointIO" in refusal(Regressor(), plugins=[TorchCheckpointIO()])


def test_an_overridden_backward_is_refused():
    class OwnBackward(Regressor):
        def backward(self, loss):
            (2 * loss).backward()

    assert "OwnBackward.backward" in refusal(OwnBackward())


def test_all_problems_are_shown_at_once():
    message = refusal(Regressor(), precision="bf16-mixed", gradient_clip_val=1.0, gradient_clip_algorithm="value")
    assert "precision" in message and "'value'" in message


class Scaled(torch.optim.SGD):
    """A stranger to the strategy."""


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adagrad])
def test_optimizers_that_cannot_run_on_flat_pieces_are_refused(kind):
    class Other(Regressor):
        def configure_optimizers(self):
            return kind(self.parameters())

    message = refusal(Other())
    assert f"torch.optim.{kind.__name__}" in message and "AdamW" in message and "framework.zero.muon.Muon" in message


def test_an_unknown_optimizer_needs_the_users_word_that_it_is_elementwise(monkeypatch):
    class Other(Regressor):
        def configure_optimizers(self):
            return Scaled(self.parameters(), lr=0.01)

    assert "Scaled.elementwise = True" in refusal(Other())
    monkeypatch.setattr(Scaled, "elementwise", True, raising=False)
    zero_fit(Other(), ZeroStrategy(3), max_epochs=1)


@pytest.mark.parametrize("count", [0, 2])
def test_one_optimizer_is_expected(count):
    class Other(Regressor):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.embed, self.head)] if count else None

    assert f"got {count} optimizers" in refusal(Other())


def test_wrong_arguments_of_the_strategy_are_refused():
    with pytest.raises(UserError, match="0, 1, 2 or 3"):
        ZeroStrategy(4)
    with pytest.raises(UserError, match="one of the two"):
        ZeroStrategy(3, zero=ZeroConfig(stage=2))
    assert ZeroStrategy().zero.stage == 3


def sync_batchnorm_on_cpu():
    try:
        zero_fit(Regressor(), ZeroStrategy(3), world_size=dist.get_world_size(), sync_batchnorm=True)
    except UserError as error:
        return str(error)


def test_sync_batchnorm_is_refused_on_cpu_where_torch_has_none(ranks):
    for message in ranks(2, sync_batchnorm_on_cpu):
        assert "sync_batchnorm" in message


def saving_on_exception():
    callback = ModelCheckpoint("nowhere", save_on_exception=True)
    return refusal(Regressor(), world_size=dist.get_world_size(), callbacks=[callback], enable_checkpointing=True)


def test_a_save_on_exception_is_refused_on_several_ranks_as_it_takes_all_of_them(ranks):
    for message in ranks(2, saving_on_exception):
        assert "ModelCheckpoint(save_on_exception=)" in message


def sampler_of_lightning():
    class Counts(Regressor):
        def training_step(self, batch, batch_idx):
            seen.extend(batch[0][:, 0].tolist())
            return super().training_step(batch, batch_idx)

    seen = []
    trainer = Trainer(accelerator="cpu", devices=1, strategy=ZeroStrategy(2), max_epochs=1, **QUIET)
    trainer.fit(Counts(), loader())
    return seen


def test_lightning_gives_each_rank_samples_of_its_own(ranks):
    first, second = ranks(2, sampler_of_lightning)
    everything = loader().dataset.tensors[0][:, 0].tolist()
    assert not set(first) & set(second)
    assert sorted(first + second) == sorted(everything)
