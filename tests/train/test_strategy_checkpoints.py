"""Lightning's checkpoints under `ZeroStrategy`: folders that all ranks write, and that any stage and number of ranks goes on from."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.testing import assert_close

from framework.checkpoint import save as saving
from framework.checkpoint.folder import replaced_folder
from framework.checkpoint.load import Checkpoint
from framework.cli.checkpoint import main as checkpoint_command
from framework.config.errors import UserError
from framework.config.schema import PrecisionConfig
from framework.train.lightning_checkpoint import load_weights, read_checkpoint
from framework.train.strategy import ZeroStrategy
from tests.train.lightning_models import QUIET, Mixed, OnMeta, Regressor, loader, plain_fit, weights


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def trainer_of(stage: int, max_epochs: int, callbacks=(), **options) -> Trainer:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    made = {**QUIET, "enable_checkpointing": saves, "callbacks": list(callbacks)}
    return Trainer(accelerator="cpu", devices=1, max_epochs=max_epochs, strategy=ZeroStrategy(stage, **options), **made)


def first_epoch(stage, path, kind=Regressor):
    module = kind()
    trainer = trainer_of(stage, 1)
    trainer.fit(module, loader(world()))
    trainer.save_checkpoint(path)  # after fit, when the module is an ordinary one again
    return weights(module)


def second_epoch(stage, path, kind=Regressor, **options):
    module = kind()
    trainer_of(stage, 2, **options).fit(module, loader(world()), ckpt_path=path)
    return weights(module)


def state(module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- going on -----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted():
    return plain_fit(Regressor())[1]


@pytest.mark.parametrize(("ranks_before", "stage_before", "ranks_after", "stage_after"), [(1, 3, 2, 1), (2, 3, 1, 0), (2, 0, 2, 3)])
def test_p17_training_continues_under_another_stage_and_number_of_ranks(
    ranks_before, stage_before, ranks_after, stage_after, tmp_path, ranks, uninterrupted
):
    path = str(tmp_path / "first.ckpt")
    ranks(ranks_before, first_epoch, stage_before, path)
    for got in ranks(ranks_after, second_epoch, stage_after, path):
        assert_close(got, uninterrupted, rtol=1e-5, atol=1e-6)


def whole_and_in_two(stage, kind, dtype, folder):
    """Three epochs in one go; then the last one again, from the checkpoint of the second."""
    ends = []
    for resumed in (None, f"{folder}/epoch=1.ckpt"):
        module = kind(seed=1 if resumed is None else 9)
        callback = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, enable_version_counter=False)
        trainer = trainer_of(stage, 3, [callback], precision=PrecisionConfig(compute_dtype=dtype))
        trainer.fit(module, loader(world()), loader(world()), ckpt_path=resumed)
        optimizer = trainer.strategy.engine.state_dict().get("optimizer", {})
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        ends.append((state(module), optimizer, rates, trainer.global_step))
    return ends


@pytest.mark.parametrize(
    ("stage", "kind", "dtype"),
    [*((stage, Mixed, "float32") for stage in (0, 1, 2, 3)), (2, Regressor, "bfloat16"), (3, Regressor, "float16")],
)
def test_p16_with_as_many_ranks_training_continues_to_the_bit(stage, kind, dtype, tmp_path, ranks):
    """Mixed: dropout, statistics, frozen layers. All: two param groups, a scheduler."""
    ends = ranks(2, whole_and_in_two, stage, kind, dtype, str(tmp_path))
    for (weights_0, optimizer_0, *rest_0), (weights_1, optimizer_1, *rest_1) in ends:
        assert same(weights_0, weights_1) and rest_0 == rest_1
        assert optimizer_0.keys() == optimizer_1.keys() and all(same(optimizer_0[name], optimizer_1[name]) for name in optimizer_0)
    assert ends[0][0][1], "rank 0 has the optimizer's state"


def test_learning_rates_and_schedulers_are_restored(tmp_path):
    path = str(tmp_path / "first.ckpt")
    first_epoch(1, path)
    trainer = trainer_of(2, 1)
    trainer.fit(Regressor(), loader(), ckpt_path=path)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == pytest.approx([0.01 / 1.8, 0.02 / 1.8])
    assert [group["betas"] for group in trainer.optimizers[0].param_groups] == [(0.9, 0.999)] * 2
    assert trainer.global_step == 8


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


# -- what is in a checkpoint --------------------------------------------------------------------------------------------------------------


def one_epoch_of_mixed(path):
    module = Mixed()
    trainer = trainer_of(3, 1)
    trainer.fit(module, loader(world()))
    trainer.save_checkpoint(path)
    return state(module)


def test_p26_every_tensor_is_saved_and_a_plain_module_loads_it(tmp_path, ranks):
    """Trained and frozen parameters in parts by all ranks, buffers of any type; strict: every name, every shape."""
    path = tmp_path / "first.ckpt"
    trained, _ = ranks(2, one_epoch_of_mixed, str(path))
    module = Mixed(seed=9)
    load_weights(module, path)
    assert same(state(module), trained) and module.seen == 8 and module.norm.num_batches_tracked == 8
    assert same(state(Mixed.load_from_checkpoint(path, seed=7)), trained)
    assert Mixed.load_from_checkpoint(path).hparams == {"seed": 1, "width": 12}
    checkpoint = Checkpoint(path)
    assert checkpoint.frozen == {"codes"} | {f"before.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")}
    assert checkpoint.verify() > 4 * sum(tensor.numel() for tensor in trained.values())
    for file in path.glob("rank_*.safetensors"):
        assert file.stat().st_size < 0.6 * sum(each.stat().st_size for each in path.glob("rank_*.safetensors"))


def test_the_command_shows_and_verifies_a_checkpoint_of_lightning(tmp_path, capsys):
    path = tmp_path / "first.ckpt"
    one_epoch_of_mixed(path)
    assert [checkpoint_command([action, str(path)]) for action in ("show", "ls", "verify")] == [0, 0, 0]
    shown = capsys.readouterr().out
    assert "in 18 tensors, trained" in shown and "220 in 5 tensors, frozen" in shown and "every checksum as it was written" in shown


def test_a_changed_byte_of_a_buffer_is_found(tmp_path):
    path = tmp_path / "first.ckpt"
    one_epoch_of_mixed(path)
    raw = bytearray((path / "extra.safetensors").read_bytes())
    raw[-1] ^= 1
    (path / "extra.safetensors").write_bytes(raw)
    with pytest.raises(UserError, match="changed bytes"):
        load_weights(Mixed(), path)


def test_masters_are_written_once(tmp_path):
    """fp32 weights and two moments: three numbers per parameter, not four; gaps of the layout between them."""
    path = tmp_path / "first.ckpt"
    first_epoch(3, path)
    elements = sum(buffer["total"] for buffer in Checkpoint(path).index["buffers"])
    assert Checkpoint(path).verify() == 4 * (3 * elements + 1)


def test_weights_only_checkpoints_can_be_saved(tmp_path):
    module = Regressor()
    trainer = trainer_of(3, 1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in read_checkpoint(tmp_path / "weights.ckpt")
    elements = sum(buffer["total"] for buffer in Checkpoint(tmp_path / "weights.ckpt").index["buffers"])
    assert Checkpoint(tmp_path / "weights.ckpt").verify() == 4 * (elements + 1)
    loaded = Regressor(seed=9)
    trainer_of(0, 1).validate(loaded, loader(), ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    assert same(state(loaded), state(module))
    with pytest.raises(KeyError, match="contains only the model"):
        second_epoch(3, tmp_path / "weights.ckpt")


def test_weights_that_were_changed_after_training_are_those_that_are_saved(tmp_path):
    module = Regressor()
    trainer = trainer_of(3, 1)
    trainer.fit(module, loader())
    with torch.no_grad():
        module.head.bias.fill_(5.0)
    trainer.save_checkpoint(tmp_path / "changed.ckpt")
    assert same(read_checkpoint(tmp_path / "changed.ckpt")["state_dict"], state(module))


def test_a_layer_that_was_replaced_after_training_is_saved_without_optimizer_state(tmp_path):
    module = Regressor()
    trainer = trainer_of(3, 1)
    trainer.fit(module, loader())
    module.head = torch.nn.Linear(12, 1)
    with pytest.raises(UserError, match="optimizer state of other parameters"):
        trainer.save_checkpoint(tmp_path / "new.ckpt")
    trainer.save_checkpoint(tmp_path / "new.ckpt", weights_only=True)
    assert same(read_checkpoint(tmp_path / "new.ckpt")["state_dict"], state(module))


def test_a_model_that_was_never_trained_can_be_saved(tmp_path):
    module = Mixed()
    trainer = trainer_of(3, 1)
    trainer.validate(module, loader(), verbose=False)
    trainer.save_checkpoint(tmp_path / "validated.ckpt")
    assert same(read_checkpoint(tmp_path / "validated.ckpt")["state_dict"], state(module))


class DropsFrozen(Mixed):
    strict_loading = False

    def on_save_checkpoint(self, checkpoint):
        self.trained = {name for name in checkpoint["state_dict"] if "before" not in name and name != "codes"}
        checkpoint["state_dict"] = {name: tensor for name, tensor in checkpoint["state_dict"].items() if name in self.trained}


def test_a_hook_may_leave_out_what_is_frozen(tmp_path):
    module = DropsFrozen()
    trainer = trainer_of(2, 1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "small.ckpt")
    assert Checkpoint(tmp_path / "small.ckpt").frozen == set()
    loaded = DropsFrozen()
    trainer_of(3, 1).validate(loaded, loader(), ckpt_path=tmp_path / "small.ckpt", verbose=False)
    assert same(state(loaded), state(module)), "the frozen layers are those of the seed"
    with pytest.raises(UserError, match=r"before\.0\.weight"):
        trainer_of(3, 1).validate(Mixed(), loader(), ckpt_path=tmp_path / "small.ckpt", verbose=False)


class DoublesTheHead(Regressor):
    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["head.weight"] = 2 * checkpoint["state_dict"]["head.weight"]


def test_a_hook_may_change_what_is_loaded(tmp_path):
    trained = first_epoch(3, tmp_path / "first.ckpt")
    module = DoublesTheHead(seed=9)
    trainer_of(3, 1).validate(module, loader(), ckpt_path=tmp_path / "first.ckpt", verbose=False)
    assert same(weights(module), trained | {"head.weight": 2 * trained["head.weight"]})


class Remembers(Callback):
    def __init__(self, what) -> None:
        self.what = what

    def state_dict(self):
        return {"what": self.what}

    def load_state_dict(self, state_dict) -> None:
        self.what = state_dict["what"]


def test_states_of_callbacks_come_back(tmp_path):
    before, after = Remembers({1: (torch.arange(3), "x")}), Remembers(None)
    trainer = trainer_of(3, 1, [before])
    trainer.fit(Regressor(), loader())
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    trainer_of(3, 1, [after]).fit(Regressor(), loader(), ckpt_path=tmp_path / "first.ckpt")
    assert after.what.keys() == {1} and after.what[1][1] == "x" and torch.equal(after.what[1][0], torch.arange(3))


def save_with_an_object(path):
    trainer = trainer_of(3, 1, [Remembers(torch.nn.Linear(2, 2))])
    with pytest.raises(UserError) as caught:
        trainer.fit(Regressor(), loader(world()))
        trainer.save_checkpoint(path)
    return str(caught.value)


def test_what_would_have_to_be_pickled_is_refused_by_name_on_all_ranks(tmp_path, ranks):
    for message in ranks(2, save_with_an_object, str(tmp_path / "first.ckpt")):
        assert "checkpoint['callbacks']['Remembers']['what']" in message and "Linear" in message and "state_dict()" in message
    assert list(tmp_path.iterdir()) == []


# -- Trainer and ModelCheckpoint ----------------------------------------------------------------------------------------------------------


def checkpoints_while_training(folder):
    callback = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=1, save_last=True, every_n_epochs=1)
    module = Mixed()
    trainer = trainer_of(3, 3, [callback])
    trainer.fit(module, loader(world()), loader(world()))
    trained = state(module)
    trainer.test(module, loader(world()), ckpt_path="best", verbose=False)
    tested = state(module)
    validated = trainer.validate(module, loader(world()), ckpt_path="last", verbose=False)
    predicted = trainer.predict(module, loader(world()), ckpt_path=callback.best_model_path)
    return sorted(os.listdir(folder)), os.path.basename(callback.best_model_path), trained, tested, validated, torch.cat(predicted)


def test_model_checkpoint_keeps_the_best_and_the_last(tmp_path, ranks):
    (files, best, trained, tested, validated, predicted), (*_, predicted_1) = ranks(2, checkpoints_while_training, str(tmp_path))
    assert files == sorted({best, "last.ckpt"}), "those that were best before are gone, whole"
    assert same(read_checkpoint(tmp_path / "last.ckpt")["state_dict"], trained)
    assert same(read_checkpoint(tmp_path / best)["state_dict"], tested)
    last, best_one = Mixed(), Mixed(seed=9).eval()
    load_weights(last, tmp_path / "last.ckpt")
    assert validated[0] == pytest.approx(trainer_of(0, 1).validate(last, loader(), verbose=False)[0], rel=1e-5)
    load_weights(best_one, tmp_path / best)
    with torch.no_grad():
        expected = best_one(loader().dataset.tensors[0])
    assert_close(torch.stack([predicted, predicted_1], 1).reshape(-1, 1), expected, rtol=1e-5, atol=1e-6)


def test_a_link_to_the_last_checkpoint_is_followed_and_replaced(tmp_path):
    for save_last in ("link", True):
        callback = ModelCheckpoint(tmp_path, "{epoch}", save_last=save_last, enable_version_counter=False)
        trainer_of(3, 2, [callback]).fit(Regressor(), loader())
        assert (tmp_path / "last.ckpt").is_symlink() == (save_last == "link")
        assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 16
    assert sorted(os.listdir(tmp_path)) == ["epoch=1.ckpt", "last.ckpt"]


# -- checkpoints of others ----------------------------------------------------------------------------------------------------------------


def test_weights_of_another_strategy_are_loaded_and_its_optimizer_state_is_refused(tmp_path):
    module = Regressor()
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, **QUIET)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(UserError, match="another strategy"):
        second_epoch(3, tmp_path / "plain.ckpt")
    loaded = Regressor(seed=9)
    trainer_of(3, 1).validate(loaded, loader(), ckpt_path=tmp_path / "plain.ckpt", verbose=False)
    assert same(state(loaded), state(module))


def test_a_file_of_an_earlier_version_is_still_loaded(tmp_path, uninterrupted):
    """Whole tensors under "state_dict", the engine's state as the only one of "optimizer_states"."""
    module = Regressor()
    trainer = trainer_of(3, 1)
    trainer.fit(module, loader())
    file = trainer._checkpoint_connector.dump_checkpoint(weights_only=False) | {"state_dict": module.state_dict()}
    optimizer = trainer.strategy.engine.state_dict()
    del optimizer["model"]
    torch.save(file | {"optimizer_states": [{"format": "zero-engine-1", **optimizer}]}, tmp_path / "old.ckpt")
    assert_close(second_epoch(2, tmp_path / "old.ckpt"), uninterrupted, rtol=1e-5, atol=1e-6)


class Runs:
    def __reduce__(self):
        return os.mkdir, ("it-ran",)


def test_a_pickle_is_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.5.0", "x": Runs()}, tmp_path / "evil.ckpt")
    with pytest.raises(UserError, match="weights_only"):
        trainer_of(3, 1).fit(Regressor(), loader(), ckpt_path=tmp_path / "evil.ckpt", weights_only=False)
    assert not (tmp_path / "it-ran").exists()


# -- what goes wrong ----------------------------------------------------------------------------------------------------------------------


def save_on_a_full_disk(path):
    module = Regressor()
    trainer = trainer_of(3, 1)
    trainer.fit(module, loader(world()))
    trainer.save_checkpoint(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # no file may grow beyond
    try:
        with pytest.raises(UserError) as caught:
            trainer.save_checkpoint(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return str(caught.value), state(module)


def test_a_full_disk_of_one_rank_leaves_the_earlier_checkpoint(tmp_path, ranks):
    path = tmp_path / "last.ckpt"
    for message, expected in ranks(2, save_on_a_full_disk, str(path)):
        assert "rank 1: [Errno 27] File too large" in message
        assert same(read_checkpoint(path)["state_dict"], expected)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_ctrl_c_during_a_save_leaves_a_whole_checkpoint_and_nothing_is_written_any_more(tmp_path, monkeypatch):
    path, write_rank = tmp_path / "last.ckpt", saving._write_rank
    module = Regressor()
    trainer = trainer_of(3, 1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        return write_rank(*arguments)

    monkeypatch.setattr(saving, "_write_rank", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.save_checkpoint(path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert same(read_checkpoint(path)["state_dict"], state(module)) and Checkpoint(path).verify()


def test_a_crash_while_a_checkpoint_is_replaced_loses_nothing(tmp_path, uninterrupted):
    path = tmp_path / "last.ckpt"
    first_epoch(3, path)
    path.rename(replaced_folder(path))  # the first of the two steps in which a new folder takes the name
    assert_close(second_epoch(3, path), uninterrupted, rtol=1e-5, atol=1e-6)
    first_epoch(3, path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    replaced_folder(path).mkdir()  # the crash came after the second one
    first_epoch(3, path)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mine.txt").touch()
    with pytest.raises(UserError, match="no checkpoint"):
        first_epoch(3, tmp_path / "results")
    assert (tmp_path / "results" / "mine.txt").exists()
    with pytest.raises(UserError, match="another kind"):
        second_epoch(3, tmp_path / "results")


@pytest.mark.parametrize("path", ["s3://bucket/last.ckpt", Path("nowhere/last.ckpt")])
def test_a_checkpoint_that_cannot_be_there_is_named(path):
    with pytest.raises(UserError, match=r"last\.ckpt"):
        second_epoch(3, path)
