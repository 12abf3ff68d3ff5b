"""Rows that are token ids already.

    {"input_ids": [1, 15043, 29871, 2]}                                       all tokens but the first are trained
    {"input_ids": [1, 15043, 29871, 2], "labels": [-100, -100, 29871, 2]}     those with a label are; not shifted, as in transformers
    {"input_ids": [1, 15043, 29871, 2], "loss_mask": [0, 0, 1, 1]}            those with a 1 (or true) are; `trained` is read alike

A row is one sample. Nothing is put before or behind it: what a separator or a stop token is, whoever made the ids has decided. Whether
they are ids of this tokenizer is looked at where rows are encoded (`plain.py`).

Unusual: padding is refused. It would be trained, or taken for text that the answer follows.
"""

from __future__ import annotations

from framework.config.schema import ColumnsConfig
from framework.data.files import Row, excerpt
from framework.data.turns import Pretokenised, wrong

IGNORED = -100
MASKS = ("loss_mask", "trained")
"""Usual names of the column that says which tokens are trained."""
ATTENTION = "attention_mask"


def read_ids(row: Row, columns: ColumnsConfig) -> Pretokenised:
    """The sample in `row`. Raises UserError that names the row."""
    ids = _numbers(row, columns.input_ids)
    if row.value.get(ATTENTION) is not None and 0 in _numbers(row, ATTENTION):
        raise wrong(row, got=f"`{ATTENTION}` with zeros: a padded sample", expected="samples of their own length, without padding")
    has_labels, has_mask = (row.value.get(column) is not None for column in (columns.labels, columns.loss_mask))
    if has_labels and has_mask:
        raise wrong(row, got=f"`{columns.labels}` and `{columns.loss_mask}`", expected="one of them to say what is trained")
    if has_labels:
        return Pretokenised(ids, _labelled(row, ids, _numbers(row, columns.labels, len(ids)), columns))
    if has_mask:
        mask = _numbers(row, columns.loss_mask, len(ids))
        if not {0, 1}.issuperset(mask):
            raise wrong(row, got=f"`{columns.loss_mask}` = {excerpt(mask)}", expected="0 or 1 for each token")
        return Pretokenised(ids, [bool(value) for value in mask])
    return Pretokenised(ids, [True] * len(ids))


def _labelled(row: Row, ids: list[int], labels: list[int], columns: ColumnsConfig) -> list[bool]:
    for position, (index, label) in enumerate(zip(ids, labels, strict=True), 1):
        if label not in (IGNORED, index):
            got = f"the label {label} for the id {index} at position {position:,}"
            expected = f"`{columns.labels}` that are the ids themselves, or {IGNORED}; they are not shifted"
            raise wrong(row, got=got, expected=expected)
    return [label != IGNORED for label in labels]


def _numbers(row: Row, column: str, length: int | None = None) -> list[int]:
    """What stands in `column`, of which there must be `length`."""
    value = row.value.get(column)
    if not isinstance(value, list) or not all(isinstance(number, int) for number in value):
        raise wrong(row, got=f"`{column}` = {excerpt(value)}", expected="a list of whole numbers")
    if length is not None and len(value) != length:
        raise wrong(row, got=f"{len(value):,} numbers in `{column}` for {length:,} ids", expected="one for each id")
    return value
