"""Flat arrays of samples: chunks of text without loss, and choosing among them without a copy."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.config.errors import UserError
from framework.data.dataset import TokenDataset, TokenDatasetBuilder, chunk
from framework.data.flat import take_alike
from framework.data.handoff import hand_over, take_over
from framework.data.mix import joined
from framework.data.pack import pack


def documents_of(arrays) -> TokenDataset:
    builder = TokenDatasetBuilder()
    for ids in filter(len, arrays):
        builder.add(np.array(ids, np.int32), np.arange(len(ids)) > 0)
    return builder.build()


def test_chunks_as_drawn_in_the_docstring():
    chunks = chunk(documents_of([[1, 2, 3], [4, 5, 6]]), chunk_tokens=3)
    assert [chunks[i].input_ids.tolist() for i in range(len(chunks))] == [[1, 2, 3], [3, 4, 5], [5, 6]]
    assert [chunks[i].trained.tolist() for i in range(len(chunks))] == [[False, True, True], [False, True, True], [False, True]]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(2, 9))
def test_p4_chunks_join_to_the_stream_and_every_token_but_the_first_is_a_target_once(lengths, chunk_tokens):
    stream = np.arange(sum(lengths) + 1, dtype=np.int32)
    documents = np.split(stream, np.cumsum([2, *lengths])[:-1])
    chunks = chunk(documents_of(documents), chunk_tokens)
    samples = [chunks[i] for i in range(len(chunks))]
    assert all(2 <= len(sample) <= chunk_tokens for sample in samples)
    assert all(len(sample) == chunk_tokens for sample in samples[:-1])
    assert np.array_equal(np.concatenate([samples[0].input_ids, *(sample.input_ids[1:] for sample in samples[1:])]), stream)
    assert np.array_equal(np.asarray(chunks.ids)[np.asarray(chunks.trained)], stream[1:])


def test_p4_documents_cut_by_themselves_share_no_chunk():
    chunks = chunk(documents_of([[1, 2, 3, 4], [5, 6], [7], [7, 8, 9]]), chunk_tokens=3, joined=False)
    assert [chunks[i].input_ids.tolist() for i in range(len(chunks))] == [[1, 2, 3], [3, 4], [5, 6], [7, 8, 9]]
    assert [chunks[i].trained.tolist() for i in (0, 1)] == [[False, True, True], [False, True]]


def small() -> TokenDataset:
    builder = TokenDatasetBuilder()
    builder.add(np.array([1, 2, 3], np.int32), np.array([False, True, True]))
    builder.add(np.array([4, 5], np.int32), np.array([False, False]))
    return builder.build()


def test_samples_and_totals():
    data = small()
    assert (len(data), data.total_tokens, data.trained_tokens, data.longest) == (2, 5, 2, 3)
    assert data[0].input_ids.tolist() == [1, 2, 3] and data[1].trained.tolist() == [False, False]
    with pytest.raises(IndexError):
        data[2]


# ---- choosing copies no token
def of_rows(lengths) -> TokenDataset:
    """Tokens 0, 1, 2, ..., in rows of these lengths, trained where the token is even (and not the first of its row)."""
    builder, stream = TokenDatasetBuilder(), np.arange(sum(lengths), dtype=np.int32)
    for row in np.split(stream, np.cumsum(lengths)[:-1]):
        builder.add(row, (row % 2 == 0) & (np.arange(len(row)) > 0))
    return builder.build()


def listed(data: TokenDataset) -> list[tuple[list, list]]:
    return [(data[i].input_ids.tolist(), data[i].trained.tolist()) for i in range(len(data))]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.data())
def test_chosen_rows_are_those_rows_and_choosing_again_chooses_among_them(lengths, draw):
    rows = of_rows(lengths)
    first = draw.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=30))
    second = draw.draw(st.lists(st.integers(0, len(first) - 1), min_size=1, max_size=30))
    chosen = rows.select(np.array(first))
    assert listed(chosen) == [listed(rows)[i] for i in first]
    again = chosen.select(np.array(second))
    assert listed(again) == [listed(chosen)[i] for i in second]
    assert again.trained_tokens == sum(sum(trained) for _, trained in listed(again)) == int(np.asarray(again.trained).sum())
    assert again.lengths.tolist() == [len(ids) for ids, _ in listed(again)] and again.total_tokens == len(np.asarray(again.ids))


@given(st.lists(st.integers(1, 9), min_size=2, max_size=20), st.integers(2, 9), st.booleans(), st.data())
def test_p4_chunks_of_chosen_documents_are_those_of_a_copy_of_them(lengths, chunk_tokens, as_one, draw):
    rows = of_rows(lengths)
    kept = np.array(sorted(draw.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1))))
    copy = TokenDatasetBuilder()
    for index in kept:
        copy.add(rows[int(index)].input_ids, rows[int(index)].trained)
    assert listed(chunk(rows.select(kept), chunk_tokens, joined=as_one)) == listed(chunk(copy.build(), chunk_tokens, joined=as_one))


def test_neighbours_are_one_segment_however_many_rows_they_are():
    rows = of_rows([3] * 1000)
    assert len(rows.select(np.arange(1000)).ids.segments.starts) == 1
    assert len(rows.select(np.delete(np.arange(1000), 500)).ids.segments.starts) == 2


@given(st.lists(st.integers(1, 9), min_size=2, max_size=20), st.data())
def test_many_ranges_are_taken_at_once_from_arrays_of_every_kind(lengths, draw):
    """Also ranges that go over the ends of segments and of chained arrays, and empty ones."""
    rows = of_rows(lengths)
    some = st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=9).map(np.array)
    chosen, other = rows.select(draw.draw(some)), chunk(rows.select(draw.draw(some)), 3)
    both = joined([chosen.select(np.arange(len(chosen))[::-1]), other, rows]) if len(other) else joined([chosen, rows])
    arrays = [both.ids, both.trained]
    bounds = st.lists(st.tuples(*[st.integers(0, both.total_tokens)] * 2).map(sorted), max_size=9)
    asked = np.array(draw.draw(bounds), dtype=np.int64).reshape(-1, 2)
    for array, found in zip(arrays, take_alike(arrays, asked[:, 0], asked[:, 1] - asked[:, 0]), strict=True):
        whole = np.asarray(array)
        assert found.dtype == whole.dtype and found.tolist() == [item for start, stop in asked for item in whole[start:stop].tolist()]
    picked = draw.draw(st.lists(st.integers(0, len(both) - 1), max_size=5))
    assert both.rows(np.array(picked, dtype=np.int64)).ids.tolist() == [token for i in picked for token in both[i].input_ids.tolist()]


def identity(data: TokenDataset) -> str:
    digest = hashlib.sha256()
    data.identify(digest)
    return digest.hexdigest()


def test_data_sets_are_told_apart_by_tokens_masks_order_and_cuts():
    rows, order = of_rows([3, 4, 5, 6]), np.array([1, 0, 3])
    other = TokenDatasetBuilder()
    for ids, trained in listed(rows):
        other.add(np.array(ids) + 1, np.array(trained))
    masked = TokenDatasetBuilder()
    for ids, trained in listed(rows):
        masked.add(np.array(ids), np.array(trained) & False)
    different = [rows, other.build(), masked.build(), rows.select(order), rows.select(order[::-1]), chunk(rows, 4), chunk(rows, 5),
                 chunk(rows, 4, joined=False), joined([rows, rows]), pack(rows, 9), pack(rows, 12)]  # fmt: skip
    assert len({identity(data) for data in different}) == len(different)
    assert identity(of_rows([3, 4, 5, 6]).select(order)) == identity(rows.select(order))


def test_what_one_process_hands_over_another_maps_and_an_unfinished_folder_is_refused(tmp_path):
    rows = of_rows([3000, 2000])
    with pytest.raises(FileNotFoundError):
        take_over(tmp_path / "data")
    hand_over([joined([rows, rows]), rows], tmp_path / "data")
    both, one = take_over(tmp_path / "data")
    assert listed(both) == listed(rows) * 2 and listed(one) == listed(rows)
    with pytest.raises(UserError, match="1.bin, which was removed while the run started"):
        (tmp_path / "data" / "1.bin").unlink()
        take_over(tmp_path / "data")
    assert isinstance(one.ids.array, np.memmap) and one.ids.array is both.ids.parts[0].array, "one map, however often it is used"
