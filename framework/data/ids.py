"""Rows that are token ids already: read, and looked at whether they can be tokens of this model.

    {"input_ids": [1, 15043, 29871, 2]}                                       all tokens but the first are trained
    {"input_ids": [1, 15043, 29871, 2], "labels": [-100, -100, 29871, 2]}     those with a label are; not shifted, as in transformers
    {"input_ids": [1, 15043, 29871, 2], "loss_mask": [0, 0, 1, 1]}            those with a 1 (or true) are; `trained` is read alike

A row is one sample. Nothing is put before or behind it: what a separator or a stop token is, whoever made the ids has decided.

Unusual: padding is refused. It would be trained, or taken for text that the answer follows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from framework.config.errors import Problem, UserError
from framework.config.schema import ColumnsConfig
from framework.data.files import Row, excerpt
from framework.data.template import Encoded
from framework.data.turns import Pretokenised, wrong

IGNORED = -100
MASKS = ("loss_mask", "trained")
"""Usual names of the column that says which tokens are trained."""


def read_ids(row: Row, columns: ColumnsConfig) -> Pretokenised:
    """The sample in `row`. Raises UserError that names the row."""
    ids = _numbers(row, columns.input_ids)
    if 0 in _numbers(row, "attention_mask") if row.value.get("attention_mask") is not None else ():
        raise wrong(row, got="`attention_mask` with zeros: a padded sample", expected="samples of their own length, without padding")
    has_labels, has_mask = (row.value.get(column) is not None for column in (columns.labels, columns.loss_mask))
    if has_labels and has_mask:
        raise wrong(row, got=f"`{columns.labels}` and `{columns.loss_mask}`", expected="one of them to say what is trained")
    if has_labels:
        return Pretokenised(ids, _labelled(row, ids, _numbers(row, columns.labels, len(ids)), columns))
    if has_mask:
        mask = _numbers(row, columns.loss_mask, len(ids))
        if not np.isin(mask, (0, 1)).all():
            raise wrong(row, got=f"`{columns.loss_mask}` = {excerpt(row.value[columns.loss_mask])}", expected="0 or 1 for each token")
        return Pretokenised(ids, mask == 1)
    return Pretokenised(ids, np.ones(len(ids), dtype=bool))


def _labelled(row: Row, ids: np.ndarray, labels: np.ndarray, columns: ColumnsConfig) -> np.ndarray:
    trained = labels != IGNORED
    differ = np.flatnonzero(trained & (labels != ids))
    if len(differ):
        at = differ[0]
        got = f"the label {labels[at]} for the id {ids[at]} at position {at + 1:,}"
        expected = f"`{columns.labels}` that are the ids themselves, or {IGNORED}; the model predicts the next one (they are not shifted)"
        raise wrong(row, got=got, expected=expected)
    return trained


def _numbers(row: Row, column: str, length: int | None = None) -> np.ndarray:
    """[tokens] int64: what stands in `column`, of which there must be `length`."""
    value: Any = row.value.get(column)
    try:
        numbers = np.asarray(value)
    except ValueError:  # lists of different lengths
        numbers = np.empty(0, object)
    if not isinstance(value, list) or numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iub"):
        raise wrong(row, got=f"`{column}` = {excerpt(value)}", expected="a list of whole numbers")
    if length is not None and len(numbers) != length:
        raise wrong(row, got=f"{len(numbers):,} numbers in `{column}` for {length:,} ids", expected="one for each id")
    return numbers.astype(np.int64)


class IdsEncoder:
    """Checks samples that are ids against the vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        self.vocabulary = len(tokenizer)
        self.special_ids = set(tokenizer.all_special_ids)

    def encode(self, rows: list[tuple[str, Pretokenised]]) -> list[Encoded | UserError]:
        return [self._checked(where, row) for where, row in rows]

    def _checked(self, where: str, row: Pretokenised) -> Encoded | UserError:
        unknown = np.flatnonzero((row.ids < 0) | (row.ids >= self.vocabulary))
        if len(unknown):
            got = f"the id {row.ids[unknown[0]]} at position {unknown[0] + 1:,} of {len(row.ids):,}"
            expected = f"ids of this tokenizer, 0 to {self.vocabulary - 1:,}"
            return UserError(Problem(path=where, got=got, expected=expected, fix="model.tokenizer=/the/one/that/made/the/ids"))
        last = int(row.ids[-1])
        stops = (last,) if row.trained[-1] and last in self.special_ids else ()
        return Encoded(row.ids.astype(np.int32), row.trained & (np.arange(len(row.ids)) > 0), stops)
