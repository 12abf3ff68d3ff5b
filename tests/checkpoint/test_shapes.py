"""Checkpoints under shard groups: written once by whatever ranks share a shard, read under any other shape to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from framework.checkpoint.folder import step_folder
from framework.checkpoint.load import Checkpoint, load_optimizer
from framework.checkpoint.save import save
from framework.zero import ZeroConfig, ZeroEngine, ZeroModuleConfig
from tests.checkpoint.test_save_load import from_module, same, train
from tests.zero import zoo

SHAPES = {
    "hsdp1": ZeroConfig(stage=1, shard_size=2),
    "hsdp3": ZeroConfig(stage=3, shard_size=2),
    "world2": ZeroConfig(stage=2, shard_size=2, shard_optimizer="world"),
    "world3": ZeroConfig(stage=3, shard_size=2, shard_optimizer="world"),
    "secondary": ZeroConfig(stage=3, secondary_shard_size=2),
    "modules": ZeroConfig(stage=3, modules=[ZeroModuleConfig(pattern="embed", stage=2), ZeroModuleConfig(pattern="blocks.1", stage=0)]),
    "kept": ZeroConfig(stage=3, keep_gathered_bytes=10_000),
}
PLAIN = ZeroConfig(stage=3)


def engine_of(zero: ZeroConfig, read=None) -> ZeroEngine:
    torch.manual_seed(0)
    module = zoo.Plain()
    return ZeroEngine(module, zero, optimizer=torch.optim.AdamW(module.parameters(), lr=0.01), read=read)


def save_under(folder: Path, shapes: list[ZeroConfig]) -> list[tuple]:
    """One checkpoint for each shape: (state, losses of the steps that follow)."""
    found = []
    for number, zero in enumerate(shapes):
        engine = engine_of(zero)
        train(engine, 0, 2)
        save(engine, step_folder(folder / str(number), 2), run={})
        found.append((engine.state_dict(), train(engine, 2, 4)))
    return found


def load_under(folder: Path, pairs: list[tuple[int, ZeroConfig]]) -> list[tuple]:
    found = []
    for number, zero in pairs:
        checkpoint = Checkpoint(step_folder(folder / str(number), 2))
        engine = engine_of(zero, read=checkpoint.reader(from_module("plain")))
        load_optimizer(engine, checkpoint)
        found.append((engine.state_dict(), train(engine, 2, 4)))
    return found


def test_p16_p17_every_shape_is_written_once_and_read_under_every_other_to_the_bit(ranks, tmp_path: Path) -> None:
    names = [*SHAPES, "plain"]
    shapes = [*SHAPES.values(), PLAIN]
    saved = ranks(4, save_under, tmp_path, shapes, timeout=240)[0]
    for number, name in enumerate(names):
        checkpoint = Checkpoint(step_folder(tmp_path / str(number), 2))
        elements = sum(buffer["total"] for buffer in checkpoint.index["buffers"])
        assert checkpoint.verify() == 3 * 4 * elements, f"{name}: master and two moments, nothing twice"
    across = [(number, shapes[number - 1]) for number in range(len(shapes))]  # each under the next one's shape, in a ring
    for size, pairs in ((4, across), (2, across[1:3]), (1, [(number, PLAIN) for number in range(len(shapes))])):
        if size == 2:
            pairs = [(number, zero) for number, zero in pairs if zero.secondary_shard_size is None]
        for (number, _), (state, losses) in zip(pairs, ranks(size, load_under, tmp_path, pairs, timeout=240)[0], strict=True):
            assert same(state, saved[number][0]), (names[number], size)
            assert losses == pytest.approx(saved[number][1], rel=1e-5)
