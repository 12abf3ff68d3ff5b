"""What watches a run, on the real strategy and engine with a very small model: progress, plot, stop on request, failure reports."""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import time
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist

import framework.train.callbacks.stop
from framework.config.schema import EvalConfig, LlamaConfig, OptimizerConfig, RecipeConfig, ScheduleConfig, TrainerConfig, ZeroConfig
from framework.data.batches import EvalBatches
from framework.data.dataset import TokenDatasetBuilder
from framework.data.prompts import Prompt
from framework.train.callbacks.answers import Answers, Questions
from framework.train.callbacks.failure import FailureReporter
from framework.train.callbacks.plot import PlotMetrics
from framework.train.callbacks.progress import Progress, ValidationBar
from framework.train.callbacks.stop import DelayedFlag, GracefulStop
from framework.train.failure import read_failure
from framework.train.loggers import Tracker
from framework.train.metrics import MetricsFile, read_metrics
from framework.train.module import CausalLMModule
from framework.train.run_dir import Finishing, read_finishing
from framework.train.trainer import build_strategy, build_trainer

TINY = LlamaConfig(
    vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16
)
TOKENS_PER_RANK = 12


class Steps:
    """A sized loader of `count` steps, each one micro-batch."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        for step in range(self.count):
            ids = torch.arange(16).reshape(1, 16) + step % 8
            labels = torch.where(torch.arange(16) < TOKENS_PER_RANK, (ids + 1) % 32, -100)
            yield [{"input_ids": ids, "labels": labels, "trained_tokens": TOKENS_PER_RANK}]


class Remembered(Tracker):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def log(self, step, values) -> None:
        self.seen.append((step, values))


class At(pl.Callback):
    """Does `what` after step `step` of rank `rank`."""

    def __init__(self, rank: int, step: int, what) -> None:
        self.rank, self.step, self.what = rank, step, what

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            self.what()


def validation_batches() -> EvalBatches:
    """20 on each rank, of two sources."""
    builder, samples = TokenDatasetBuilder(), 20 * dist.get_world_size()
    for _ in range(samples):
        builder.add(np.arange(16, dtype=np.int32), np.arange(16) > 8)
    sources = {"source_of": np.arange(samples) % 2, "source_names": ("chats", "qa")}
    return EvalBatches(builder.build(), micro_batch_size=1, rank=dist.get_rank(), world_size=dist.get_world_size(), **sources)


def fit(run_dir: Path, steps: int, *, every: int = 1, others=(), validation: bool = False) -> tuple[str, Progress, Tracker, GracefulStop]:
    """Train; console output, and the callbacks to look at."""
    rank = dist.get_rank()
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    recipe = RecipeConfig(zero=ZeroConfig(stage=2), trainer=TrainerConfig(accelerator="cpu", collective_timeout_seconds=30))
    module = CausalLMModule(TINY, optimizer=OptimizerConfig(lr=0.01), schedule=ScheduleConfig(name="constant"), total_steps=steps)
    tracker = Remembered()
    metrics = MetricsFile(run_dir / "metrics.csv", ("chats", "qa") if validation else ()) if rank == 0 else None
    progress = Progress(metrics, tracker, total_steps=steps, steps_per_epoch=4, log_every_n_steps=every)
    stop = GracefulStop(run_dir, supervised=True)
    callbacks = [FailureReporter(run_dir), ValidationBar(), progress, stop, PlotMetrics(run_dir, "tiny"), *others]
    trainer = build_trainer(recipe, build_strategy(recipe), total_steps=steps, run_dir=run_dir, callbacks=callbacks)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), stop:
        trainer.fit(module, Steps(steps), validation_batches() if validation else None)
    return output.getvalue(), progress, tracker, stop


# ---- progress
def train_and_look(run_dir: Path, steps: int, every: int, validation: bool = False):
    output, progress, tracker, _ = fit(run_dir, steps, every=every, validation=validation)
    return output, tracker.seen


def test_every_logged_step_is_on_the_console_in_the_file_and_in_the_dashboard(tmp_path, ranks):
    (output, seen), (other_output, other_seen) = ranks(2, train_and_look, tmp_path, 10, 4)
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [row.step for row in rows] == [1, 4, 8, 10], "the first, each 4th, the last"
    assert [row.epoch for row in rows] == [0.25, 1.0, 2.0, 2.5]
    assert [row.tokens for row in rows] == [2 * TOKENS_PER_RANK * row.step for row in rows], "of both ranks, also of steps between"
    assert [step for step, _ in seen] == [1, 4, 8, 10]
    assert seen[-1][1]["train/loss"] == rows[-1].loss and seen[-1][1]["tokens"] == rows[-1].tokens
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert len(lines) == 4
    assert lines[1].startswith(f"step  4/10  epoch 1.00  loss {rows[1].loss:.4f}  lr 1.00e-02  grad {rows[1].grad_norm:.3f}  ")
    assert (other_output, other_seen) == ("", [])


def test_a_logged_loss_does_not_depend_on_the_cadence(tmp_path, ranks):
    ranks(2, train_and_look, tmp_path / "each", 8, 1)
    ranks(2, train_and_look, tmp_path / "fourth", 8, 4)
    each = {row.step: (row.loss, row.grad_norm) for row in read_metrics(tmp_path / "each" / "metrics.csv")}
    fourth = {row.step: (row.loss, row.grad_norm) for row in read_metrics(tmp_path / "fourth" / "metrics.csv")}
    assert fourth == {step: each[step] for step in fourth}
    assert (tmp_path / "each" / "plot.png").exists()


def test_a_plot_that_cannot_be_written_does_not_cost_the_trained_model(tmp_path, ranks):
    (tmp_path / "plot.png").mkdir()
    ranks(1, train_and_look, tmp_path, 4, 2)
    assert [row.step for row in read_metrics(tmp_path / "metrics.csv")] == [1, 2, 4]


def test_a_validation_has_its_own_line_and_row(tmp_path, ranks):
    (output, seen), _ = ranks(2, train_and_look, tmp_path, 4, 1, True)
    *training, validation = read_metrics(tmp_path / "metrics.csv")
    assert [row.step for row in training] == [1, 2, 3, 4]
    assert (validation.step, validation.loss) == (4, None) and validation.val_loss > 0
    loss, of_sources = validation.val_loss, validation.val_loss_of
    shown = f"chats {of_sources['chats']:.4f}, qa {of_sources['qa']:.4f}"
    assert f"step 4/4  validation loss {loss:.4f}  perplexity {math.exp(loss):.2f}  ({shown})" in output
    logged = seen[-1][1]
    assert (logged["val/loss"], logged["val/perplexity"]) == (loss, validation.val_perplexity) == (loss, math.exp(loss))
    assert (logged["val/qa/loss"], logged["val/qa/perplexity"]) == (of_sources["qa"], math.exp(of_sources["qa"]))


# ---- stop
def stop_in_the_middle(run_dir: Path, rank: int, number: int):
    _, progress, _, stop = fit(run_dir, 200, others=[At(rank, 5, lambda: os.kill(os.getpid(), number))])
    return stop.stopped_at_step, signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path, ranks, rank, number):
    (first, restored_0), (second, restored_1) = ranks(2, stop_in_the_middle, tmp_path, rank, number)
    assert first == second == 6
    assert restored_0 and restored_1, "outside of training the signal ends the process again"
    assert read_finishing(tmp_path) == Finishing(step=6, stopped=True)
    assert [row.step for row in read_metrics(tmp_path / "metrics.csv")] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "plot.png").exists()


class InValidation(pl.Callback):
    """Sends itself a SIGTERM in the `batch`th batch of the validation after the last step, on one rank."""

    def __init__(self, rank: int, batch: int) -> None:
        self.rank, self.batch, self.batches = rank, batch, 0

    def on_validation_batch_start(self, trainer, *_) -> None:
        self.batches += 1
        if trainer.global_rank == self.rank and self.batches == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)


def stop_a_validation(run_dir: Path, rank: int):
    watch = InValidation(rank, batch=3)
    output, progress, _, stop = fit(run_dir, 4, others=[watch], validation=True)
    return stop.stopped_at_step, watch.batches, output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_ends_a_validation_on_all_ranks_after_the_same_batch(tmp_path, ranks, rank):
    (first, first_batches, output), (second, second_batches, _) = ranks(2, stop_a_validation, tmp_path, rank)
    assert (first, first_batches) == (second, second_batches) == (4, 3)
    assert read_finishing(tmp_path) == Finishing(step=4, stopped=True)
    assert [row.val_loss for row in read_metrics(tmp_path / "metrics.csv")] == [None] * 4, "half a validation has no result"
    assert "validation" not in output and "stop requested: all ranks stop after step 4" in output


def stop_while_answering(run_dir: Path, rank: int):
    """The signal comes just before the answers of step 6."""
    given = [Prompt("one", [1, 2, 3]), Prompt("two", [4]), Prompt("three", [5, 6])]
    asked = Questions(prompts=given, stop_ids=[], tokenizer=None) if dist.get_rank() == 0 else None
    config, tracker = EvalConfig(generate_every_n_steps=6, max_new_tokens=5), Tracker()
    progress = Progress(None, tracker, total_steps=20, steps_per_epoch=4, log_every_n_steps=1)
    stop = GracefulStop(run_dir, supervised=True)
    place = {"file": run_dir / "answers.jsonl", "tracker": tracker, "progress": progress, "stop": stop}
    others = [At(rank, 6, lambda: os.kill(os.getpid(), signal.SIGTERM)), Answers(config, asked, seed=0, **place)]
    _, _, _, stop = fit(run_dir, 20, others=others)
    return stop.stopped_at_step


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_gives_the_answers_of_a_step_up_on_all(tmp_path, ranks, rank):
    assert ranks(2, stop_while_answering, tmp_path, rank) == [7, 7]
    assert not (tmp_path / "answers.jsonl").exists()


def test_the_stop_flag_is_read_at_once_on_the_cpu():
    flag = DelayedFlag()
    assert [flag.above_zero(torch.tensor(value)) for value in (0.0, 2.0, 0.0)] == [False, True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_stop_flag_is_read_one_call_late_on_cuda():
    flag = DelayedFlag()
    assert [flag.above_zero(torch.tensor(value, device="cuda")) for value in (0.0, 2.0, 0.0, 0.0)] == [False, False, True, False]


# ---- failure
def boom() -> None:
    raise ValueError("boom")


def fail(run_dir: Path):
    try:
        fit(run_dir, 20, others=[At(0, 3, boom)])
    except ValueError as error:
        return read_failure(run_dir, 0), str(error), (run_dir / "plot.png").exists()


def test_an_exception_is_reported_and_what_was_logged_is_plotted(tmp_path, ranks):
    ((report, message, plotted),) = ranks(1, fail, tmp_path)
    assert (report.rank, report.kind, report.type, report.message) == (0, "error", "ValueError", "boom") and message == "boom"
    assert "in boom" in report.traceback
    assert plotted


def test_a_signal_while_saving_waits_and_another_one_later_does_not(tmp_path, monkeypatch):
    """Slurm sends its SIGTERM twice within milliseconds: that is one request."""
    monkeypatch.setattr(framework.train.callbacks.stop, "SAME_REQUEST_SECONDS", 0.2)
    (tmp_path / "logs").mkdir()
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("ended"))
    try:
        stop = GracefulStop(tmp_path, supervised=True)
        with stop, stop.saving(7, is_first=True):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == [] and read_finishing(tmp_path) == Finishing(step=7, stopped=False)  # the supervisor lets it go on
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == ["ended"]
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == ["ended"] * 2
    finally:
        signal.signal(signal.SIGTERM, before)
