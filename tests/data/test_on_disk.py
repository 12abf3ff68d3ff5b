"""What is noted of each sample lies on the disk: the same arrays block by block as at once, and memory that does not grow."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.config.errors import UserError
from framework.data import dataset, flat, on_disk, order, pack
from framework.data.dataset import TokenDataset, TokenDatasetBuilder, chunk
from framework.data.mix import joined
from framework.data.on_disk import Scratch, blocks, places_in_order
from framework.data.order import permutation


def rows_of(lengths, empty=np.empty) -> TokenDataset:
    builder = TokenDatasetBuilder()
    for number, length in enumerate(lengths):
        builder.add(np.arange(number, number + length, dtype=np.int32), np.arange(length) % 3 > 0)
    made = builder.build()
    return TokenDataset(made.ids, made.trained, made.offsets, trained_counts=made.trained_counts, empty=empty)


@pytest.fixture(params=[1, 3, 7])
def small_blocks(request, monkeypatch):
    """As if so many items were a block, so that a few samples are many blocks."""
    for module in (on_disk, order, pack):
        monkeypatch.setattr(module, "BLOCK_ITEMS", request.param)
    assert dataset.blocks is flat.blocks is blocks


def everything_of(lengths, empty) -> list[np.ndarray]:
    """All arrays of all that can be made of the rows."""
    rows = rows_of(lengths, empty)
    kept = rows.keep(np.arange(len(rows)) % 5 > 0)
    both = joined([kept, rows])
    made = [kept, both, pack.pack(both, 16), chunk(rows, 4), chunk(kept, 5, joined=False), pack.pack(chunk(kept, 5, joined=False), 9)]
    arrays = [order.permutation(7, "epoch", 2, len(rows), empty=empty), *pack.best_fit(rows.lengths, 12, empty)]
    for each in made:
        arrays += [each.offsets, each.trained_counts, np.asarray(each.ids), np.asarray(each.trained), np.array(each.longest)]
        arrays += [each.document_offsets] if each.is_packed else []
    return arrays


LENGTHS = np.random.default_rng(0).integers(2, 13, 60)
AT_ONCE = everything_of(LENGTHS, np.empty)


def test_block_by_block_is_what_it_is_at_once(small_blocks, tmp_path, monkeypatch):
    monkeypatch.setattr(on_disk, "SMALL_BYTES", 8)
    found = everything_of(LENGTHS, Scratch(tmp_path))
    assert all(np.array_equal(mine, whole) for mine, whole in zip(found, AT_ONCE, strict=True))
    assert list(tmp_path.iterdir()) == [], "files without a name"


def test_a_large_permutation_is_that_of_a_sort_of_all_words():
    samples = on_disk.BLOCK_ITEMS + 1000
    words = np.random.PCG64(np.random.SeedSequence([3, 0, 1])).random_raw(samples)
    assert np.array_equal(permutation(3, "epoch", 1, samples), np.argsort(words, kind="stable"))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 9))
def test_places_are_those_of_a_stable_sort(keys, items):
    keys = np.array(keys)
    following = np.searchsorted(np.sort(keys), np.arange(6))
    places = np.concatenate([places_in_order(keys[start : start + items], following) for start in range(0, len(keys), items)])
    assert np.argsort(places).tolist() == np.argsort(keys, kind="stable").tolist()


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match="data.cache_dir: got .*No space left on device"):
        Scratch(tmp_path)(1 << 20, np.int64)


PREPARING = """
import sys, resource
import numpy as np
from pathlib import Path
from framework.data.dataset import TokenDataset
from framework.data.flat import AllButFirst, Stored
from framework.data.on_disk import Scratch
from framework.data.order import permutation
from framework.data.pack import pack

def anonymous():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) * 1024

samples, empty = int(sys.argv[1]), Scratch(Path(sys.argv[2]))
offsets, ids, counts = empty(samples + 1, np.int64), empty(8 * samples, np.int32), empty(samples, np.int32)
offsets[:] = np.arange(samples + 1) * 8
rows = TokenDataset(Stored(ids, digest=""), AllButFirst(offsets), offsets, trained_counts=counts, empty=empty)
before = anonymous()
kept = rows.keep(permutation(0, "held out", 0, samples, empty=empty) > samples // 100)
packed = pack(kept, 512)
order = permutation(0, "epoch", 0, len(rows), empty=empty)
packed.rows(order[:64] % len(packed))
print(anonymous() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_samples(tmp_path):
    """Held-out rows, packs and an order of 3,000,000 rows: 20 MiB where arrays in memory would be several hundred."""
    done = subprocess.run([sys.executable, "-c", PREPARING, "3000000", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 32 * 2**20
