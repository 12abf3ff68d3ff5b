"""Units and flat spaces: who owns which parameter, and that shards of any world size cover each element exactly once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from framework.zero.layout import ALIGN, Layout, Slot, find_units, plan_units
from tests.zero import zoo


def layout_of(sizes: list[int]) -> Layout:
    slots, offset = [], 0
    for index, numel in enumerate(sizes):
        slots.append(Slot(f"p{index}", torch.Size([numel]), offset))
        offset += -(-numel // ALIGN) * ALIGN
    return Layout("unit", True, tuple(slots))


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.integers(1, 9))
def test_shards_cover_every_element_exactly_once(sizes: list[int], world_size: int) -> None:
    layout = layout_of(sizes)
    covered = {slot.name: torch.zeros(slot.numel, dtype=torch.int) for slot in layout.slots}
    for rank in range(world_size):
        begin = rank * layout.shard_numel(world_size)
        for piece in layout.pieces(begin, begin + layout.shard_numel(world_size)):
            covered[piece.slot.name][piece.start : piece.stop] += 1
            assert 0 <= piece.shard_start and piece.shard_stop <= layout.shard_numel(world_size)
            assert begin + piece.shard_start == piece.slot.offset + piece.start
    assert all(bool((count == 1).all()) for count in covered.values())


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.integers(1, 9))
def test_only_the_tail_is_padded_for_the_world_size(sizes: list[int], world_size: int) -> None:
    layout = layout_of(sizes)
    assert layout.shard_numel(world_size) % ALIGN == 0
    assert 0 <= layout.padded(world_size) - layout.total < world_size * ALIGN
    assert [slot.offset % ALIGN for slot in layout.slots] == [0] * len(sizes)


def test_repeated_blocks_are_units_and_the_rest_is_the_roots() -> None:
    model = zoo.make("Plain")
    assert list(find_units(model)) == ["blocks.0", "blocks.1", "blocks.2"]
    root, *blocks = plan_units(model)
    assert [slot.name for layout in root.layouts for slot in layout.slots] == ["embed.weight", "head.weight"]
    assert blocks[1].layouts[0].slots[0].name == "blocks.1.norm.weight"


def test_blocks_inside_blocks_belong_to_the_outermost() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = nn.ModuleDict({"layers": nn.ModuleList([inner, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))])})
    assert list(find_units(model)) == ["layers.0", "layers.1"]


def test_a_list_of_lists_has_what_is_called_for_blocks() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)]) for _ in range(2))})
    assert list(find_units(model)) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    assert not find_units(nn.ModuleList(nn.ParameterList([torch.ones(2)]) for _ in range(2)))


def test_p46_a_tied_parameter_has_one_slot_and_is_owned_by_the_root() -> None:
    root, *_ = plan_units(zoo.make("TiedAcrossBlocks"))
    (slot,) = [slot for layout in root.layouts for slot in layout.slots if slot.aliases]
    assert (slot.name, slot.aliases) == ("blocks.0.up.weight", ("blocks.2.up.weight",))


def test_frozen_and_trained_parameters_lie_in_different_buffers() -> None:
    _, block, *_ = plan_units(zoo.make("LowRank"))
    assert [[slot.name for slot in layout.slots] for layout in block.layouts] == [
        ["blocks.0.down_a", "blocks.0.down_b"],
        [f"blocks.0.{name}" for name in ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")],
    ]


def test_offsets_do_not_depend_on_the_world_size_so_resharding_is_slicing() -> None:
    layout = plan_units(zoo.make("Plain"))[0].layouts[0]
    flat = torch.arange(layout.padded(1))
    shards = [flat[rank * layout.shard_numel(3) : (rank + 1) * layout.shard_numel(3)] for rank in range(3)]
    assert torch.equal(torch.cat(shards)[: layout.total], flat[: layout.total])
