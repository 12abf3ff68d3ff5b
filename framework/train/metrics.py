"""metrics.csv: the numbers of a run, one row per logged step, always written.

    step,epoch,loss,lr,grad_norm,tokens,tokens_per_second,seconds,loss_scale,val_loss,val_perplexity
    10,0.25,2.3456,2e-05,1.04,40960,8123.4,5.1,,,
    10,0.25,,,,40960,,5.9,,2.2871,9.8463

`tokens` counts all trained tokens so far, `seconds` the time since training began. A validation has a row of its own. With several
sources of validation data there are two more columns for each, `val_loss/NAME` and `val_perplexity/NAME`.

Unusual: each row is one write of one whole line, so a run that is killed leaves at most one torn line at the end; readers and the next
writer drop it.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from framework.train.source_loss import perplexity


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """Fields that a row does not have are None (an empty cell)."""

    step: int
    epoch: float
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    loss_scale: float | None = None
    """fp16: that of the step."""
    val_loss: float | None = None
    val_perplexity: float | None = None
    val_loss_of: Mapping[str, float] = field(default_factory=dict)
    """Of each source, where there are several."""


COLUMNS = tuple(column.name for column in fields(MetricsRow) if column.name != "val_loss_of")
OF_SOURCE, PERPLEXITY_OF_SOURCE = "val_loss/", "val_perplexity/"
INTEGERS = ("step", "tokens")


class MetricsFile:
    """Appends rows to `path`; a file that exists is continued. `sources`: of the validation data, where there are several."""

    def __init__(self, path: Path, sources: Sequence[str] = ()) -> None:
        self.sources = tuple(sources) if len(sources) > 1 else ()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        text = Path(path).read_bytes()
        whole = text.rfind(b"\n") + 1
        os.ftruncate(self._descriptor, whole)
        if whole == 0:
            of_sources = [prefix + name for name in self.sources for prefix in (OF_SOURCE, PERPLEXITY_OF_SOURCE)]
            header = io.StringIO()
            csv.writer(header, lineterminator="\n").writerow([*COLUMNS, *of_sources])  # quotes a name with a comma
            self._write(header.getvalue())

    def append(self, row: MetricsRow) -> None:
        """Write one row; it is in the file when this returns."""
        values = [getattr(row, name) for name in COLUMNS]
        for loss in map(row.val_loss_of.get, self.sources):
            values += [loss, None if loss is None else perplexity(loss)]
        self._write(",".join("" if value is None else repr(value) for value in values) + "\n")

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, line: str) -> None:
        os.write(self._descriptor, line.encode())


def read_metrics(path: Path) -> list[MetricsRow]:
    """All whole rows of a metrics.csv."""
    text = Path(path).read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [_row(cells) for cells in csv.DictReader(lines)]


def continue_metrics(old: Path, new: Path, step: int, sources: Sequence[str] = ()) -> None:
    """Begin `new` with the rows of `old` up to optimizer step `step`; nothing where there is no `old`."""
    rows = [row for row in read_metrics(old) if row.step <= step] if Path(old).exists() else []
    file = MetricsFile(new, sources)
    for row in rows:
        file.append(row)
    file.close()


def series(rows: list[MetricsRow], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one column, without its empty cells."""
    points = [(row.step, value) for row in rows if (value := getattr(row, name)) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _row(cells: Mapping[str, str]) -> MetricsRow:
    of_sources = {name.removeprefix(OF_SOURCE): float(cell) for name, cell in cells.items() if name.startswith(OF_SOURCE) and cell}
    return MetricsRow(**{name: _value(name, cells.get(name, "")) for name in COLUMNS}, val_loss_of=of_sources)


def _value(name: str, cell: str) -> int | float | None:
    if cell == "":
        return None
    return int(cell) if name in INTEGERS else float(cell)
