"""State of optimizers that is not simply one value for each element: written under one stage and number of ranks, read under any other to
the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from framework.checkpoint.load import Checkpoint, load_optimizer
from framework.checkpoint.save import save
from framework.zero import ZeroConfig, ZeroEngine
from framework.zero.eight_bit import AdamW8bit, bytes_per_moment
from framework.zero.muon import Muon
from tests.checkpoint.test_save_load import same
from tests.zero.test_memory import Model

ELSEWHERE = ((0, 2), (3, 1), (2, 3), (3, 4))


def of_blocks(model: torch.nn.Module) -> list[dict]:
    hidden = {name: parameter for name, parameter in model.named_parameters() if name.startswith("blocks.") and parameter.dim() == 2}
    others = [parameter for name, parameter in model.named_parameters() if name not in hidden]
    return [{"params": list(hidden.values())}, {"params": others, "orthogonal": False}]


OPTIMIZERS = {
    "muon": lambda model: Muon(of_blocks(model), lr=0.01),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "8bit": lambda model: AdamW8bit(model.parameters(), lr=0.01),
    "fp32": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=0.0),
}


def built(name: str, stage: int, folder: Path | None = None) -> ZeroEngine:
    torch.manual_seed(0)
    model = Model(2)
    checkpoint = None if folder is None else Checkpoint(folder)
    read = None if checkpoint is None else checkpoint.reader(None)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), optimizer=OPTIMIZERS[name](model), read=read)
    if checkpoint is not None:
        load_optimizer(engine, checkpoint)
    return engine


def train(engine: ZeroEngine, first: int, last: int) -> list[float]:
    """The same 12 sentences over whatever ranks there are."""
    losses = []
    for step in range(first, last):
        ids = torch.randint(0, 200, (12, 7), generator=torch.Generator().manual_seed(step))
        engine.backward(engine.module(ids[engine.world.rank :: engine.world.size]), tokens=12 * 7 // engine.world.size)
        losses.append(float(engine.step().loss))
    return losses


def save_and_go_on(folder: Path, name: str, stage: int):
    engine = built(name, stage)
    train(engine, 0, 3)
    save(engine, folder, run={})
    state = engine.state_dict()
    return state, train(engine, 3, 6), engine.state_dict()


def load_and_go_on(folder: Path, name: str, stage: int):
    engine = built(name, stage, folder)
    state = engine.state_dict()
    return state, train(engine, 3, 6), engine.state_dict()


def load_in_one_process(state: dict, name: str) -> dict:
    engine = built(name, 1)
    engine.load_state_dict(state)
    return engine.state_dict()


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (3, 3)])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "fp32"])
def test_p16_p17_state_is_read_under_every_stage_and_number_of_ranks(ranks, tmp_path, name: str, stage: int, world: int) -> None:
    saved, losses, after = ranks(world, save_and_go_on, tmp_path / "step_3", name, stage)[0]
    assert Checkpoint(tmp_path / "step_3").verify() > 0
    loaded, went_on, then = ranks(world, load_and_go_on, tmp_path / "step_3", name, stage)[0]
    assert same(loaded, saved) and went_on == losses and same(then, after)
    for other_stage, other_world in ELSEWHERE[:: 1 if stage == 3 else 2]:
        loaded, went_on, _ = ranks(other_world, load_and_go_on, tmp_path / "step_3", name, other_stage)[0]
        assert same(loaded, saved), (other_stage, other_world)
        assert went_on == pytest.approx(losses, rel=1e-2)
    assert same(ranks(1, load_in_one_process, saved, name)[0], saved)


@pytest.mark.parametrize(("by", "then"), [("8bit", "fp32"), ("fp32", "8bit")])
def test_moments_in_8_bits_and_in_fp32_follow_each_other(ranks, tmp_path, by: str, then: str) -> None:
    saved, losses, _ = ranks(2, save_and_go_on, tmp_path / "step_3", by, 3)[0]
    loaded, went_on, _ = ranks(3, load_and_go_on, tmp_path / "step_3", then, 2)[0]
    for name, state in saved["optimizer"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            error = (loaded["optimizer"][name][key] - state[key]).abs().max() / state[key].abs().max()
            assert error == 0 if then == "fp32" else error < 0.01, (name, key)
    assert went_on == pytest.approx(losses, rel=0.05)


def test_what_only_some_parameters_have_is_not_written_for_the_others(ranks, tmp_path) -> None:
    model = Model(2)
    matrices = [parameter.numel() for parameter in model.parameters() if parameter.dim() == 2]
    elements = sum(parameter.numel() for parameter in model.parameters())
    others = 8 * (elements - sum(matrices))
    for name, expected in (
        ("adafactor", 4 * sum(sum(parameter.shape) for parameter in model.parameters())),
        ("muon", 4 * sum(matrices[1:]) + 8 * matrices[0] + others),
        ("8bit", 2 * sum(map(bytes_per_moment, matrices)) + others),
    ):
        ranks(2, save_and_go_on, tmp_path / name, name, 3)
        written = sum(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors"))
        assert 4 * elements + expected <= written < 4 * elements + 1.1 * expected + 2 * 8192
