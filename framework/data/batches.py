"""Optimizer steps of one rank: which samples of a step it takes, and the padded tensors of its micro-batches.

    global step k of an epoch = samples order[k * global_batch : (k + 1) * global_batch], the last step whatever is left
    its samples, longest first, fill the slots (micro-batch 0 of rank 0, of rank 1, ..., micro-batch 1 of the last rank, ... of rank 0, ...)

Rows of a micro-batch are of similar length, so little of it is padding; micro-batches that ranks compute at the same time are, too, so
no rank waits for long; and every second turn goes back over the ranks, so that none has the longest of each.

So the samples of a step depend on (seed, epoch, global batch) alone, each is used exactly once an epoch (but for sources with weights,
`mix.py`), and every rank runs the same number of steps and of micro-batches in each, for any number of samples: none waits for a
collective that another never enters. A slot without a sample gets one padding token and no target, which adds nothing to loss or token
count.

Unusual: no torch DataLoader and no process or thread beside training. A batch costs a fraction of a millisecond
(`scripts/bench/data.py`), and Lightning takes any sized iterable. Lightning calls `set_epoch` on a loader's `sampler`, which is therefore
the loader itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from framework.data.dataset import Rows, TokenDataset
from framework.data.mix import Mix
from framework.data.order import permutation

MicroBatch = dict[str, Any]
IGNORED = -100  # the label of a position without a target; torch's cross_entropy ignores it


class StepBatches:
    """Yields one list of micro-batches per optimizer step. `len` is the number of steps of the current epoch."""

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        micro_batch_size: int,
        accumulate: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        pad_id: int = 0,
        total_steps: int | None = None,
        first_step: int = 0,
        mix: Mix | None = None,
        pinned: bool = False,
    ) -> None:
        """`total_steps` of the whole run end the last epoch early; None: every epoch is whole. `first_step` steps have been done before.
        `mix`: in which proportions an epoch has which of the samples; None: each once. `pinned`: for a GPU, which else would have to
        finish its step before it takes the next batch."""
        assert len(dataset) > 0 and 0 <= rank < world_size and micro_batch_size > 0 and accumulate > 0
        self.dataset, self.pad_id = dataset, pad_id
        self.micro_batch_size, self.accumulate, self.rank, self.world_size = micro_batch_size, accumulate, rank, world_size
        self.seed, self.shuffle, self.total_steps, self.mix, self.pinned = seed, shuffle, total_steps, mix, pinned
        self.global_batch_size = micro_batch_size * accumulate * world_size
        self.samples_per_epoch = len(dataset) if mix is None else mix.samples_per_epoch
        self.steps_per_epoch = -(-self.samples_per_epoch // self.global_batch_size)
        self._first_epoch, self._skipped = divmod(first_step, self.steps_per_epoch)
        self.epoch = self._first_epoch

    @property
    def sampler(self) -> StepBatches:
        return self

    def set_epoch(self, epoch: int) -> None:
        """`epoch` counts from the first one of this run."""
        self.epoch = self._first_epoch + epoch

    def __len__(self) -> int:
        if self.total_steps is None:
            return self.steps_per_epoch
        return min(self.steps_per_epoch, max(0, self.total_steps - self.epoch * self.steps_per_epoch))

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        order = self._order()
        for step in range(self._skipped if self.epoch == self._first_epoch else 0, len(self)):
            chosen = order[step * self.global_batch_size : (step + 1) * self.global_batch_size]
            yield [self._micro_batch(indices) for indices in self._dealt(chosen)]

    def _order(self) -> np.ndarray:
        """[samples_per_epoch] int64: the samples of the current epoch."""
        if self.mix is not None:
            return self.mix.order(self.dataset.lengths, self.seed, self.epoch, shuffle=self.shuffle)
        samples = len(self.dataset)
        return permutation(self.seed, "epoch", self.epoch, samples, empty=self.dataset.empty) if self.shuffle else np.arange(samples)

    def _dealt(self, chosen: np.ndarray) -> list[np.ndarray]:
        """This rank's part of a step's samples, one array per micro-batch."""
        chosen = longest_first(chosen, self.dataset)
        micro_batches = -(-len(chosen) // (self.micro_batch_size * self.world_size))
        slots = np.array_split(chosen, micro_batches * self.world_size)
        turns = [slots[number * self.world_size : (number + 1) * self.world_size] for number in range(micro_batches)]
        return [turn[-1 - self.rank if number % 2 else self.rank] for number, turn in enumerate(turns)]

    def _micro_batch(self, indices: np.ndarray) -> MicroBatch:
        return collate(self.dataset.rows(indices), self.pad_id, pinned=self.pinned)


class EvalBatches:
    """Yields this rank's micro-batches of a validation set, as many on every rank, each sample exactly once.

    A micro-batch has samples of one source, named by its `source`, the same on all ranks at a time; the longest samples of a source first.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        pad_id: int = 0,
        max_batches: int | None = None,
        source_of: np.ndarray | None = None,
        source_names: Sequence[str] = ("validation",),
    ) -> None:
        """`max_batches` of each source over all ranks, so that the same samples are seen by any number of them; None: all.
        `source_of` [samples]: the place of each one's source in `source_names`; None: all are of the first."""
        assert len(dataset) > 0 and 0 <= rank < world_size and micro_batch_size > 0
        self.dataset, self.pad_id, self.source_names = dataset, pad_id, tuple(source_names)
        source_of = np.zeros(len(dataset), dtype=np.int64) if source_of is None else source_of
        most, samples_per_turn = None if max_batches is None else max_batches * micro_batch_size, micro_batch_size * world_size
        self.samples: list[int] = []
        """Of each source, over all ranks."""
        self._turns: list[tuple[int, np.ndarray]] = []  # (source, this rank's samples of it), the same sources on every rank
        for source in range(len(self.source_names)):
            chosen = longest_first(np.flatnonzero(source_of == source)[:most], dataset)
            self.samples.append(len(chosen))
            for start in range(0, len(chosen), samples_per_turn):
                self._turns.append((source, chosen[start : start + samples_per_turn][rank::world_size]))
        self.given_up = False
        """The current pass was not finished: its results are those of some samples only."""

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[MicroBatch]:
        self.given_up = False
        for source, indices in self._turns:
            if self.given_up:
                return
            yield collate(self.dataset.rows(indices), self.pad_id) | {"source": source}

    def give_up(self) -> None:
        """End the current pass; call it on all ranks after the same batch."""
        self.given_up = True


def longest_first(indices: np.ndarray, dataset: TokenDataset) -> np.ndarray:
    """`indices` by falling length; those of equal length stay in their order."""
    return indices[np.argsort(-dataset.lengths_of(indices), kind="stable")]


def collate(rows: Rows, pad_id: int, *, pinned: bool = False) -> MicroBatch:
    """Rows padded on the right to the longest, `pinned` in memory where a GPU is to fetch them; no row at all becomes one padding token.

    input_ids [rows, tokens] int64; labels [rows, tokens] int64, shifted: labels[t] is what position t must predict, -100 for nothing;
    trained_tokens: targets in the micro-batch; samples: rows that are not padding. Packs also have document_lengths: for each row the
    tokens of its documents, which a model has to keep apart. No label crosses from one to the next.
    """
    lengths, ends = rows.lengths.tolist(), np.cumsum(rows.lengths).tolist()
    shape = max(1, len(lengths)), max(lengths, default=1)
    input_ids, labels = (torch.full(shape, value, dtype=torch.int64, pin_memory=pinned) for value in (pad_id, IGNORED))
    inputs, shifted = input_ids.numpy(), labels.numpy()
    ids = rows.ids.astype(np.int64)  # once, not row by row: half the time of a batch
    for row, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        inputs[row, :length] = ids[end - length : end]
    ids[~rows.trained] = IGNORED
    for row, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        shifted[row, : length - 1] = ids[end - length + 1 : end]
    micro_batch = {
        "input_ids": input_ids,
        "labels": labels,
        "trained_tokens": int(np.count_nonzero(rows.trained)),
        "samples": len(lengths),
    }
    if rows.document_lengths:
        micro_batch["document_lengths"] = rows.document_lengths
    return micro_batch
