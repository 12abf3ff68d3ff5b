"""Packs: every sample in exactly one of them, none over the limit, hardly any padding, the same ones always."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.data.batches import StepBatches, collate
from framework.data.dataset import TokenDataset, TokenDatasetBuilder
from framework.data.handoff import hand_over, take_over
from framework.data.pack import best_fit, pack

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=120)


def dataset(lengths) -> TokenDataset:
    """Sample n is the token n + 1, all of it but the first trained: told apart, and from padding."""
    builder = TokenDatasetBuilder()
    for number, length in enumerate(lengths):
        builder.add(np.full(length, number + 1, np.int32), np.arange(length) > 0)
    return builder.build()


def textbook(lengths, max_tokens: int) -> list[int]:
    """Tokens in each pack by best-fit decreasing as it is usually written down: one sample after the other, all packs looked at."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [at for at, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(max_tokens)
            fitting = [len(rooms) - 1]
        rooms[min(fitting, key=lambda at: rooms[at])] -= length
    return sorted(max_tokens - room for room in rooms)


def test_packs_as_drawn_in_the_docstring():
    packed = pack(dataset([5, 3, 2, 2, 1]), 6)
    assert [packed[i].input_ids.tolist() for i in range(3)] == [[1, 1, 1, 1, 1, 5], [2, 2, 2, 3, 3], [4, 4]]
    assert [packed[i].document_lengths for i in range(3)] == [(5, 1), (3, 2), (2,)]
    assert [packed[i].trained.tolist() for i in (0, 2)] == [[False, True, True, True, True, False], [False, True]]
    assert (packed.documents, packed.total_tokens, packed.trained_tokens, packed.longest) == (5, 13, 8, 5)


@settings(deadline=None, max_examples=200)
@given(lengths=LENGTHS, room=st.integers(0, 40))
def test_packs_hold_every_sample_once_and_are_those_of_the_textbook(lengths, room):
    max_tokens = max(lengths) + room
    data = dataset(lengths)
    packed = pack(data, max_tokens)
    packs = [packed[i] for i in range(len(packed))]
    assert all(len(one) <= max_tokens and sum(one.document_lengths) == len(one) for one in packs)
    held = [number for one in packs for number in np.repeat(one.input_ids[np.cumsum((0, *one.document_lengths))[:-1]], 1).tolist()]
    assert sorted(held) == list(range(1, len(lengths) + 1))
    assert [lengths[number - 1] for number in held] == [length for one in packs for length in one.document_lengths]
    assert sorted(len(one) for one in packs) == textbook(lengths, max_tokens)
    assert packed.trained_tokens == data.trained_tokens


@given(lengths=LENGTHS, room=st.integers(0, 40))
def test_packs_depend_on_the_lengths_alone_and_keep_the_order_of_the_file(lengths, room):
    lengths = np.array(lengths)
    pack_of, packs = best_fit(lengths, lengths.max() + room)
    assert np.array_equal(pack_of, best_fit(lengths.copy(), lengths.max() + room)[0]) and packs == pack_of.max() + 1
    first = [np.flatnonzero(pack_of == number)[0] for number in range(pack_of.max() + 1)]
    assert first == sorted(first)


@pytest.mark.parametrize("max_tokens", [1024, 8192])
def test_lengths_like_those_of_conversations_leave_hardly_any_room(max_tokens):
    lengths = np.random.default_rng(0).lognormal(5.0, 1.0, 100_000).astype(np.int64).clip(2, max_tokens)
    packs = best_fit(lengths, max_tokens)[1]
    assert lengths.sum() / (packs * max_tokens) > 0.999


def test_as_many_packs_as_samples_where_no_two_fit_together():
    assert best_fit(np.array([6, 7, 8]), 10)[0].tolist() == [0, 1, 2]
    assert best_fit(np.array([10]), 10)[0].tolist() == [0]


@given(lengths=LENGTHS)
def test_p14_no_label_crosses_from_one_document_to_the_next(lengths):
    """Document n holds only the token n + 1, so a label that differs from its token would be one of the next document."""
    packed = pack(dataset(lengths), 32)
    micro = collate(packed.rows(np.arange(len(packed))), pad_id=0)
    labelled = micro["labels"] != -100
    assert (micro["labels"] == micro["input_ids"])[labelled].all()
    assert int(labelled.sum()) == micro["trained_tokens"] == sum(length - 1 for length in lengths)


def test_a_micro_batch_of_packs_says_where_documents_lie_and_one_of_samples_does_not():
    packed = pack(dataset([5, 3, 2, 2, 1]), 6)
    micro = collate(packed.rows(np.array([0, 2])), pad_id=9)
    assert micro["input_ids"].tolist() == [[1, 1, 1, 1, 1, 5], [4, 4, 9, 9, 9, 9]]
    assert micro["document_lengths"] == [[5, 1], [2]] and micro["samples"] == 2
    assert "document_lengths" not in collate(dataset([3]).rows(np.array([0])), pad_id=9)


@pytest.mark.parametrize(("micro", "accumulate", "world_size"), [(4, 1, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4)])
def test_p17_the_packs_of_a_step_depend_on_the_global_batch_alone(micro, accumulate, world_size):
    data = dataset(np.random.default_rng(1).integers(1, 30, 90))

    def steps(micro, accumulate, world_size):
        place = {"micro_batch_size": micro, "accumulate": accumulate, "world_size": world_size, "seed": 2}
        ranks = [list(StepBatches(pack(data, 64), rank=rank, **place)) for rank in range(world_size)]
        return [
            sorted(str(lengths) for rank in ranks for one in rank[step] for lengths in one.get("document_lengths", []))
            for step in range(len(ranks[0]))
        ]

    assert steps(micro, accumulate, world_size) == steps(4, 1, 1)


def test_packs_are_handed_over_whole(tmp_path):
    hand_over(pack(dataset([5, 3, 2]), 6), tmp_path / "data")
    loaded = take_over(tmp_path / "data")
    assert [loaded[i].document_lengths for i in range(len(loaded))] == [(5,), (3, 2)] and loaded.documents == 3
