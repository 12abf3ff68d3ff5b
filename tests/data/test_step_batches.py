"""Optimizer steps: every sample once an epoch, the same steps on every rank, sets of samples that ranks and accumulation do not change."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.data.batches import EvalBatches, StepBatches, collate
from framework.data.dataset import Rows, TokenDatasetBuilder
from framework.data.order import permutation

PAD = 999


def numbered(samples: int):
    """Sample n is the tokens [n + 1, ...]: told apart by its first token; between one and three targets."""
    builder = TokenDatasetBuilder()
    for n in range(samples):
        length = 2 + n % 3
        builder.add(np.full(length, n + 1, np.int32), np.arange(length) > 0)
    return builder.build()


def of_lengths(lengths):
    builder = TokenDatasetBuilder()
    for length in lengths:
        builder.add(np.ones(length, np.int32), np.arange(length) > 0)
    return builder.build()


def lengths_of(micro_batch) -> list[int]:
    return (micro_batch["input_ids"] != PAD).sum(1)[: micro_batch["samples"]].tolist()


def who(micro_batch) -> list[int]:
    return micro_batch["input_ids"][: micro_batch["samples"], 0].tolist()


def epoch_of(data, world_size, **options):
    """[rank][step][micro-batch] -> the samples in it."""
    ranks = [StepBatches(data, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    return [[[who(micro) for micro in step] for step in batches] for batches in ranks]


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(1, 60), micro=st.integers(1, 4), accumulate=st.integers(1, 4), world_size=st.integers(1, 5), epoch=st.integers(0, 3)
)
def test_p34_any_data_length_gives_every_rank_the_same_steps_and_every_sample_once(samples, micro, accumulate, world_size, epoch):
    data = numbered(samples)
    shapes, seen = [], []
    for rank in range(world_size):
        batches = StepBatches(data, micro_batch_size=micro, accumulate=accumulate, rank=rank, world_size=world_size, seed=3)
        batches.set_epoch(epoch)
        steps = list(batches)
        assert len(steps) == len(batches) == -(-samples // (micro * accumulate * world_size))
        assert all(len(step) == accumulate for step in steps[:-1]) and 1 <= len(steps[-1]) <= accumulate
        assert all(micro_batch["samples"] <= micro for step in steps for micro_batch in step)
        shapes.append([len(step) for step in steps])
        seen += [sample for step in steps for micro_batch in step for sample in who(micro_batch)]
    assert all(shape == shapes[0] for shape in shapes)
    assert sorted(seen) == list(range(1, samples + 1))


@pytest.mark.parametrize("samples", [64, 61, 57, 5])
def test_p17_p23_the_samples_of_a_step_depend_on_the_global_batch_alone(samples):
    data = numbered(samples)
    splits = [(8, 1, 1), (1, 8, 1), (2, 4, 1), (2, 1, 4), (1, 2, 4), (4, 1, 2)]  # micro, accumulate, ranks
    sets = []
    for micro, accumulate, world_size in splits:
        ranks = epoch_of(data, world_size, micro_batch_size=micro, accumulate=accumulate, seed=1)
        sets.append([sorted(sum((sample for rank in ranks for sample in rank[step]), [])) for step in range(len(ranks[0]))])
    assert all(steps == sets[0] for steps in sets)
    assert len(sets[0]) == -(-samples // 8) and len(sets[0][-1]) == (samples - 1) % 8 + 1


def padding(steps) -> int:
    """Cells without a token in all micro-batches."""
    return sum(int((micro["input_ids"] == PAD).sum()) for step in steps for micro in step)


@pytest.mark.parametrize(("micro", "accumulate", "world_size"), [(4, 4, 1), (2, 2, 4), (4, 2, 2), (3, 5, 2)])
def test_rows_of_a_micro_batch_are_of_similar_length(micro, accumulate, world_size):
    """At every split of a step, no micro-batch holds a sample that is longer than one of another turn before it, and padding is less."""
    lengths = np.random.default_rng(0).integers(2, 100, 237)
    data = of_lengths(lengths)
    place = {"micro_batch_size": micro, "accumulate": accumulate, "world_size": world_size, "seed": 1, "pad_id": PAD}
    ranks = [list(StepBatches(data, rank=rank, **place)) for rank in range(world_size)]
    padded, dealt_as_they_come = 0, 0
    order, per_step = permutation(1, "epoch", 0, len(data)), micro * accumulate * world_size
    for number, step in enumerate(zip(*ranks, strict=True)):
        turns = [[length for rank in turn for length in lengths_of(rank)] for turn in zip(*step, strict=True)]
        assert all(min(turn) >= max(later) for turn, later in pairwise(turns))
        padded += padding(step)
        chosen, slots = order[number * per_step : (number + 1) * per_step], len(turns) * world_size
        dealt = [lengths[chosen[slot::slots]] for slot in range(slots)]
        dealt_as_they_come += sum(len(slot) * slot.max() - slot.sum() for slot in dealt)
    assert padded < 0.6 * dealt_as_they_come


def test_no_rank_gets_the_longest_micro_batch_of_each_turn():
    data = of_lengths(np.arange(2, 34))
    ranks = [list(StepBatches(data, rank=rank, world_size=4, micro_batch_size=2, accumulate=4, pad_id=PAD)) for rank in range(4)]
    tokens = [sum(micro["input_ids"].numel() for micro in step) for (step,) in ranks]
    assert max(tokens) - min(tokens) == 0


def test_validation_has_rows_of_similar_length_too():
    data = of_lengths([9, 2, 8, 3, 7, 4])
    assert [lengths_of(micro) for micro in EvalBatches(data, micro_batch_size=2, pad_id=PAD)] == [[9, 8], [7, 4], [3, 2]]
    assert [lengths_of(micro) for micro in EvalBatches(data, micro_batch_size=2, pad_id=PAD, max_batches=2)] == [[9, 8], [3, 2]]


def test_p38_each_epoch_is_shuffled_anew_from_the_seed():
    def order(seed, epoch, shuffle=True):
        batches = StepBatches(numbered(50), micro_batch_size=1, accumulate=1, seed=seed, shuffle=shuffle)
        batches.set_epoch(epoch)
        return [who(step[0])[0] for step in batches]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(0, 0)), tuple(order(0, 1)), tuple(order(1, 0)), tuple(range(1, 51))}) == 4
    assert order(0, 1, shuffle=False) == list(range(1, 51))


def test_the_order_never_changes_with_a_new_version():
    """Resuming inside an epoch relies on it. The numbers are PCG64's, sorted."""
    from framework.data.order import permutation

    words = np.random.PCG64(np.random.SeedSequence([7, 0, 2])).random_raw(10)
    assert permutation(7, "epoch", 2, 10).tolist() == sorted(range(10), key=lambda i: words[i])


def test_a_run_of_given_length_ends_inside_its_last_epoch():
    batches = StepBatches(numbered(10), micro_batch_size=2, accumulate=1, total_steps=7)
    lengths = []
    for epoch in range(3):
        batches.set_epoch(epoch)
        assert len(list(batches)) == len(batches)
        lengths.append(len(batches))
    assert lengths == [5, 2, 0]


def test_ranks_of_a_short_last_step_differ_by_at_most_one_sample():
    ranks = epoch_of(numbered(5), world_size=4, micro_batch_size=4, accumulate=1)
    assert sorted(len(rank[0][0]) for rank in ranks) == [1, 1, 1, 2]


def test_a_rank_without_samples_gets_a_padding_token_that_trains_nothing():
    (step,) = StepBatches(numbered(1), micro_batch_size=2, accumulate=2, rank=1, world_size=2, pad_id=9)
    (micro,) = step
    assert micro["input_ids"].tolist() == [[9]] and micro["labels"].tolist() == [[-100]]
    assert (micro["trained_tokens"], micro["samples"]) == (0, 0)


def test_labels_are_shifted_and_rows_are_padded_on_the_right():
    ids, trained = np.array([11, 12, 13, 14, 21, 22], np.int32), np.array([False, False, True, True, False, True])
    micro = collate(Rows(ids, trained, np.array([4, 2])), pad_id=22)
    assert micro["input_ids"].tolist() == [[11, 12, 13, 14], [21, 22, 22, 22]]
    assert micro["labels"].tolist() == [[-100, 13, 14, -100], [22, -100, -100, -100]]
    assert micro["input_ids"].dtype == micro["labels"].dtype == torch.int64
    assert micro["trained_tokens"] == 3 == int((micro["labels"] != -100).sum()) and micro["samples"] == 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [1, 3, 50])
def test_p19_validation_sees_each_sample_once_on_ranks_of_equal_length(world_size, micro):
    data = numbered(17)
    ranks = [list(EvalBatches(data, micro_batch_size=micro, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {-(-17 // (micro * world_size))}
    assert sorted(sample for batches in ranks for batch in batches for sample in who(batch)) == list(range(1, 18))
    assert sum(batch["trained_tokens"] for batches in ranks for batch in batches) == data.trained_tokens


@pytest.mark.parametrize(("world_size", "micro"), [(1, 1), (2, 3), (3, 2), (4, 8)])
def test_p19_a_micro_batch_of_validation_has_one_source_the_same_on_every_rank(world_size, micro):
    data, source_of = numbered(17), np.array([0] * 10 + [2] * 7)
    named = {"source_of": source_of, "source_names": ("a", "b", "c")}
    ranks = [list(EvalBatches(data, micro_batch_size=micro, rank=rank, world_size=world_size, **named)) for rank in range(world_size)]
    assert all([batch["source"] for batch in batches] == [batch["source"] for batch in ranks[0]] for batches in ranks)
    seen = [(sample, batch["source"]) for batches in ranks for batch in batches for sample in who(batch)]
    assert sorted(seen) == [(n + 1, source_of[n]) for n in range(17)]
    limited = EvalBatches(data, micro_batch_size=2, max_batches=2, rank=0, world_size=world_size, **named)
    assert limited.samples == [4, 0, 4], "of each source"


def test_validation_may_be_limited_to_some_batches():
    limited = EvalBatches(numbered(17), micro_batch_size=2, max_batches=3)
    assert len(list(limited)) == len(limited) == 3


def test_lightning_takes_the_steps_as_they_are_and_counts_the_epochs(tmp_path):
    import lightning

    class Recorder(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight, self.seen = torch.nn.Parameter(torch.zeros(())), []

        def training_step(self, step, _):
            self.seen.append((self.current_epoch, [who(micro) for micro in step]))
            return self.weight * 1.0

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def loader():
        return StepBatches(numbered(7), micro_batch_size=1, accumulate=2, seed=5, total_steps=6)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", max_steps=6, max_epochs=-1, default_root_dir=tmp_path, **quiet)
    module = Recorder()
    trainer.fit(module, loader())
    expected = []
    for epoch in (0, 1):
        batches = loader()
        batches.set_epoch(epoch)
        expected += [(epoch, [who(micro) for micro in step]) for step in batches]
    assert module.seen == expected and len(expected) == 6


def test_p19_a_limited_validation_sees_the_same_samples_on_any_number_of_ranks():
    def tokens(world_size: int) -> int:
        ranks = [EvalBatches(numbered(17), micro_batch_size=2, max_batches=3, rank=r, world_size=world_size) for r in range(world_size)]
        assert len({len(rank) for rank in ranks}) == 1
        return sum(micro["samples"] for rank in ranks for micro in rank)

    assert [tokens(world_size) for world_size in (1, 2, 3, 4)] == [6, 6, 6, 6]
