"""Flat arrays of samples: chunks of text without loss, and saving so that no reader ever sees half a data set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.data.dataset import TokenDataset, TokenDatasetBuilder, chunk


def test_chunks_as_drawn_in_the_docstring():
    chunks = chunk([np.array([1, 2, 3], np.int32), np.array([4, 5, 6], np.int32)], chunk_tokens=3)
    assert [chunks[i].input_ids.tolist() for i in range(len(chunks))] == [[1, 2, 3], [3, 4, 5], [5, 6]]
    assert [chunks[i].trained.tolist() for i in range(len(chunks))] == [[False, True, True], [False, True, True], [False, True]]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(2, 9))
def test_p4_chunks_join_to_the_stream_and_every_token_but_the_first_is_a_target_once(lengths, chunk_tokens):
    stream = np.arange(sum(lengths) + 1, dtype=np.int32)
    documents = np.split(stream, np.cumsum([2, *lengths])[:-1])
    chunks = chunk(documents, chunk_tokens)
    samples = [chunks[i] for i in range(len(chunks))]
    assert all(2 <= len(sample) <= chunk_tokens for sample in samples)
    assert all(len(sample) == chunk_tokens for sample in samples[:-1])
    assert np.array_equal(np.concatenate([samples[0].input_ids, *(sample.input_ids[1:] for sample in samples[1:])]), stream)
    assert np.array_equal(chunks.ids[chunks.trained], stream[1:])


def test_p4_documents_cut_by_themselves_share_no_chunk():
    documents = [np.array(ids, np.int32) for ids in ([1, 2, 3, 4], [5, 6], [7, 8, 9])]
    chunks = chunk(documents, chunk_tokens=3, joined=False)
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


def test_what_is_saved_is_loaded_from_disk_and_an_unfinished_folder_is_refused(tmp_path):
    small().save(tmp_path / "data")
    loaded = TokenDataset.load(tmp_path / "data")
    assert isinstance(loaded.ids, np.memmap)
    assert [loaded[i].input_ids.tolist() for i in range(2)] == [[1, 2, 3], [4, 5]] and loaded.trained_tokens == 2
    (tmp_path / "data" / "ready").unlink()
    with pytest.raises(FileNotFoundError, match="no finished data set"):
        TokenDataset.load(tmp_path / "data")
