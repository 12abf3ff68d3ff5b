"""Lightning's checkpoints under `ZeroStrategy`: whole named tensors in one file, which any stage and number of ranks continues from."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.testing import assert_close

from framework.config.errors import UserError
from framework.train.checkpoint_file import AtomicCheckpointIO
from framework.train.strategy import ZeroStrategy
from tests.train.lightning_models import QUIET, OnMeta, Regressor, loader, plain_fit, weights


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def first_epoch(stage, path, kind=Regressor):
    module = kind()
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy=ZeroStrategy(stage), **QUIET)
    trainer.fit(module, loader(world()))
    trainer.save_checkpoint(path)  # after fit, when the module is an ordinary one again
    return weights(module)


def second_epoch(stage, path, kind=Regressor, **options):
    module = kind()
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=2, strategy=ZeroStrategy(stage, **options), **QUIET)
    trainer.fit(module, loader(world()), ckpt_path=path)
    return weights(module)


@pytest.fixture(scope="module")
def uninterrupted():
    return plain_fit(Regressor())[1]


@pytest.mark.parametrize(("ranks_before", "stage_before", "ranks_after", "stage_after"), [(1, 3, 2, 1), (2, 3, 1, 0), (2, 0, 2, 3)])
def test_training_continues_under_another_stage_and_number_of_ranks(
    ranks_before, stage_before, ranks_after, stage_after, tmp_path, ranks, uninterrupted
):
    path = str(tmp_path / "first.ckpt")
    ranks(ranks_before, first_epoch, stage_before, path)
    for got in ranks(ranks_after, second_epoch, stage_after, path):
        assert_close(got, uninterrupted, rtol=1e-5, atol=1e-6)


def test_p26_every_saved_tensor_is_whole_and_a_plain_module_loads_it(tmp_path, ranks):
    path = str(tmp_path / "first.ckpt")
    trained, _ = ranks(2, first_epoch, 3, path)
    module = Regressor(seed=9)
    module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])  # strict: every name, every shape
    assert_close(weights(module), trained, rtol=0, atol=0)
    assert module.seen == 8  # buffers, too
    Regressor.load_from_checkpoint(path)


def test_masters_are_written_once(tmp_path):
    """fp32 weights and two moments: three numbers per parameter, not four."""
    path = str(tmp_path / "first.ckpt")
    first_epoch(3, path)
    parameters = sum(parameter.numel() for parameter in Regressor().parameters())
    saved = torch.load(path, weights_only=True)
    numbers = sum(tensor.numel() for tensor in saved["state_dict"].values())
    states = saved["optimizer_states"][0]
    values = [value for state in states["optimizer"].values() for value in state.values()]
    numbers += sum(value.numel() for value in values if torch.is_tensor(value) and value.dim())
    assert numbers == 3 * parameters + 1
    assert "model" not in states


def test_weights_of_a_checkpoint_load_into_a_model_on_the_meta_device(tmp_path):
    path = str(tmp_path / "first.ckpt")
    first_epoch(0, path, OnMeta)
    expected = second_epoch(0, path, OnMeta)
    assert_close(second_epoch(3, path, OnMeta, meta_init=True), expected, rtol=1e-5, atol=1e-6)


def test_resumed_weights_are_not_read_from_the_pretrained_file_again(tmp_path):
    def read(name, start, stop):
        return torch.full((stop - start,), 0.1)

    path = str(tmp_path / "first.ckpt")
    first_epoch(0, path, OnMeta)
    expected = second_epoch(0, path, OnMeta)
    assert_close(second_epoch(3, path, OnMeta, meta_init=True, read=read), expected, rtol=1e-5, atol=1e-6)


def checkpoints_while_training(folder):
    callback = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=1, save_last=True, every_n_epochs=1)
    module = Regressor()
    options = {**QUIET, "enable_checkpointing": True, "callbacks": [callback]}
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=2, strategy=ZeroStrategy(3), **options)
    trainer.fit(module, loader(world()), loader(world()))
    trained = weights(module)
    trainer.test(module, loader(world()), ckpt_path=callback.best_model_path, verbose=False)
    return sorted(os.listdir(folder)), os.path.basename(callback.best_model_path), trained, weights(module)


def test_model_checkpoint_keeps_the_best_and_the_last(tmp_path, ranks):
    (files, best, trained, tested), _ = ranks(2, checkpoints_while_training, str(tmp_path))
    assert files == sorted({best, "last.ckpt"})
    last = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert_close({name: last[name] for name in trained}, trained, rtol=0, atol=0)
    assert_close(tested, {name: torch.load(tmp_path / best, weights_only=True)["state_dict"][name] for name in trained}, rtol=0, atol=0)


def test_weights_only_checkpoints_can_be_saved(tmp_path):
    module = Regressor()
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy=ZeroStrategy(3), **QUIET)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in saved
    assert_close({name: saved["state_dict"][name] for name in weights(module)}, weights(module))


def test_optimizer_state_of_another_strategy_is_refused(tmp_path):
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, **QUIET)
    trainer.fit(Regressor(), loader())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(UserError, match="another strategy"):
        zero_fit_from(tmp_path / "plain.ckpt")


def zero_fit_from(path):
    Trainer(accelerator="cpu", devices=1, max_epochs=2, strategy=ZeroStrategy(3), **QUIET).fit(Regressor(), loader(), ckpt_path=path)


def test_a_crash_while_writing_leaves_the_file_before(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)

    def torn(checkpoint, file):
        file.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="No space left"):
        AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert AtomicCheckpointIO().load_checkpoint(path) == {"step": 1}


def test_learning_rates_and_schedulers_are_restored(tmp_path):
    path = str(tmp_path / "first.ckpt")
    first_epoch(1, path)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy=ZeroStrategy(2), **QUIET)
    trainer.fit(Regressor(), loader(), ckpt_path=path)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == pytest.approx([0.01 / 1.8, 0.02 / 1.8])
    assert trainer.global_step == 8
