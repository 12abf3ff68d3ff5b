"""metrics.csv survives what a run does not, and plot.png shows it."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest

from framework.train.callbacks.plot import plot_metrics
from framework.train.metrics import MetricsFile, MetricsRow, continue_metrics, read_metrics, series

ROOT = Path(__file__).resolve().parents[2]
TRAIN = MetricsRow(step=10, epoch=0.25, loss=2.5, lr=2e-05, grad_norm=1.0, tokens=4096, tokens_per_second=812.5, seconds=5.0)
VALIDATION = MetricsRow(step=10, epoch=0.25, tokens=4096, seconds=6.5, val_loss=2.25, val_perplexity=9.5)


def write(path: Path, *rows: MetricsRow) -> None:
    metrics = MetricsFile(path)
    for row in rows:
        metrics.append(row)
    metrics.close()


def test_the_columns_of_the_file(tmp_path):
    write(tmp_path / "m.csv", TRAIN, VALIDATION)
    assert (tmp_path / "m.csv").read_text() == (
        "step,epoch,loss,lr,grad_norm,tokens,tokens_per_second,seconds,loss_scale,val_loss,val_perplexity\n"
        "10,0.25,2.5,2e-05,1.0,4096,812.5,5.0,,,\n"
        "10,0.25,,,,4096,,6.5,,2.25,9.5\n"
    )


def test_rows_come_back_as_they_were_written(tmp_path):
    write(tmp_path / "m.csv", TRAIN, VALIDATION)
    rows = read_metrics(tmp_path / "m.csv")
    assert rows == [TRAIN, VALIDATION]
    assert series(rows, "val_loss") == ([10], [2.25])


def test_several_sources_of_validation_data_have_two_columns_each(tmp_path):
    row = dataclasses.replace(VALIDATION, val_loss_of={"a,b": 1.5, "chats": 0.0})
    metrics = MetricsFile(tmp_path / "m.csv", ["chats", "a,b"])
    metrics.append(TRAIN)
    metrics.append(row)
    metrics.close()
    header, training, validation = (tmp_path / "m.csv").read_text().splitlines()
    assert header.endswith(',val_loss,val_perplexity,val_loss/chats,val_perplexity/chats,"val_loss/a,b","val_perplexity/a,b"')
    assert training.endswith(",5.0,,,,,,,") and validation.endswith(f",2.25,9.5,0.0,1.0,1.5,{math.exp(1.5)!r}")
    assert read_metrics(tmp_path / "m.csv") == [TRAIN, row]
    continue_metrics(tmp_path / "m.csv", tmp_path / "next.csv", 10, ["chats", "a,b"])
    assert (tmp_path / "next.csv").read_text() == (tmp_path / "m.csv").read_text()


def test_a_loss_that_is_no_number_comes_back_too(tmp_path):
    write(tmp_path / "m.csv", MetricsRow(step=1, epoch=0.0, loss=math.nan, grad_norm=math.inf))
    (row,) = read_metrics(tmp_path / "m.csv")
    assert math.isnan(row.loss) and row.grad_norm == math.inf


def test_a_killed_writer_loses_no_row_that_it_had_appended(tmp_path):
    program = (
        "import os, signal\nfrom pathlib import Path\nfrom framework.train.metrics import MetricsFile, MetricsRow\n"
        f"metrics = MetricsFile(Path({str(tmp_path / 'm.csv')!r}))\n"
        "for step in range(1, 8): metrics.append(MetricsRow(step=step, epoch=0.5, loss=1.0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT)
    assert [row.step for row in read_metrics(tmp_path / "m.csv")] == [1, 2, 3, 4, 5, 6, 7]


def test_a_torn_last_line_is_dropped_by_readers_and_by_the_next_writer(tmp_path):
    path = tmp_path / "m.csv"
    write(path, TRAIN)
    with path.open("a") as file:
        file.write("11,0.3,2.")
    assert read_metrics(path) == [TRAIN]
    write(path, VALIDATION)
    assert read_metrics(path) == [TRAIN, VALIDATION]


@pytest.mark.parametrize("rows", [1, 12, 200])
def test_the_plot_is_drawn_from_one_row_on(tmp_path, rows):
    norms = [1.0 + 100 * (step == 9) for step in range(rows)]
    training = [MetricsRow(step=n, epoch=0.1, loss=3 / n, lr=1e-5 * n, grad_norm=norm, tokens=n) for n, norm in enumerate(norms, start=1)]
    write(tmp_path / "m.csv", *training, MetricsRow(step=rows, epoch=0.1, val_loss=1.0))
    assert plot_metrics(tmp_path / "m.csv", tmp_path / "plot.png", title="a run")
    image = (tmp_path / "plot.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 10_000


def test_nothing_logged_gives_no_plot(tmp_path):
    write(tmp_path / "m.csv")
    assert not plot_metrics(tmp_path / "m.csv", tmp_path / "plot.png")
    assert not (tmp_path / "plot.png").exists()
