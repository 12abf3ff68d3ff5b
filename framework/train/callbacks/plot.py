"""plot.png: loss, learning rate and gradient norm over the steps of a run, drawn from its metrics.csv.

`plot_metrics` is a pure function of the file, so a plot can be drawn again at any time, also of a run that was killed.

Unusual: long noisy curves are drawn faint, with a centred running average (loss) or median (gradient norm) on top. Gradient norms far
above the usual are cut off at the top of their panel and marked, or a single spike would flatten the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median

import lightning.pytorch as pl

from framework.train.metrics import MetricsRow, read_metrics, series
from framework.train.run_dir import METRICS, PLOT

BLUE, ORANGE, GREEN, PURPLE = "#2563eb", "#ea580c", "#0d9488", "#7c3aed"
INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
SMOOTH_ABOVE_POINTS = 60
SMOOTHED_SHARE = 0.03
SPIKE = 4.0
"""Gradient norms above this many times the 95th percentile are cut off."""


class PlotMetrics(pl.Callback):
    """Draws the plot on rank 0 when training ends, whether done, stopped or failed. Put it behind `Progress`."""

    def __init__(self, run_dir: Path, title: str) -> None:
        self.run_dir, self.title = run_dir, title

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._draw(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._draw(trainer)

    def _draw(self, trainer: pl.Trainer) -> None:
        if not trainer.is_global_zero or not (self.run_dir / METRICS).exists():
            return
        try:
            plot_metrics(self.run_dir / METRICS, self.run_dir / PLOT, title=self.title)
        except Exception as error:  # a full disk, say: the model is still to be saved
            print(f"no plot: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def plot_metrics(csv_path: Path, png_path: Path, *, title: str = "") -> bool:
    """Draw `csv_path` into `png_path`; False, and no file, when nothing was logged yet."""
    rows = read_metrics(csv_path)
    if not rows:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID}):
        figure, (loss, lr, norm) = pyplot.subplots(3, 1, sharex=True, figsize=(9, 8), height_ratios=(2.2, 1, 1))
        # A fixed layout: one that measures all text, and labels aligned by it, take longer than the drawing.
        figure.subplots_adjust(left=0.1, right=0.98, bottom=0.06, top=0.94, hspace=0.08)
        _loss_panel(loss, rows)
        _lr_panel(lr, rows)
        _norm_panel(norm, rows)
        for axes in (loss, lr, norm):
            _tidy(axes)
        norm.set_xlabel("optimizer step", color=MUTED)
        if title:
            loss.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=12)
        loss.set_title(_facts(rows), loc="right", fontsize=9, color=MUTED, pad=12)
        figure.savefig(png_path, dpi=150, facecolor="white")
        pyplot.close(figure)
    return True


def _loss_panel(axes, rows: list[MetricsRow]) -> None:
    _curve(axes, *series(rows, "loss"), BLUE, fmean, "training")
    steps, values = series(rows, "val_loss")
    if steps:
        axes.plot(steps, values, color=ORANGE, marker="o", markersize=5, linewidth=1.6, label="validation", zorder=4)
        axes.annotate(
            f"{values[-1]:.3f}", (steps[-1], values[-1]), xytext=(4, 7), textcoords="offset points", color=ORANGE, fontsize=9, ha="right"
        )
        axes.legend(frameon=False, loc="upper right", labelcolor=INK)
    axes.set_ylabel("loss")


def _lr_panel(axes, rows: list[MetricsRow]) -> None:
    steps, values = series(rows, "lr")
    axes.plot(steps, values, color=GREEN, linewidth=1.8, **_dots(steps))
    axes.fill_between(steps, values, color=GREEN, alpha=0.08, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    axes.yaxis.get_offset_text().set(color=MUTED, fontsize=8)
    axes.set_ylabel("learning rate")


def _norm_panel(axes, rows: list[MetricsRow]) -> None:
    steps, values = series(rows, "grad_norm")
    _curve(axes, steps, values, PURPLE, median, "gradient norm")
    axes.set_ylim(bottom=0)
    if values:
        usual = sorted(values)[int(0.95 * (len(values) - 1))]
        if max(values) > SPIKE * usual > 0:
            axes.set_ylim(top=SPIKE / 2 * usual)
            cut = [step for step, value in zip(steps, values, strict=True) if value > SPIKE / 2 * usual]
            axes.plot(cut, [SPIKE / 2 * usual] * len(cut), "^", color=PURPLE, markersize=6, clip_on=False, zorder=5)
    axes.set_ylabel("gradient norm")


def _curve(axes, steps: Sequence[int], values: Sequence[float], color: str, smooth: Callable[[Sequence[float]], float], label: str) -> None:
    """A line; a long one faint, under its smoothed form."""
    if len(steps) <= SMOOTH_ABOVE_POINTS:
        axes.plot(steps, values, color=color, linewidth=1.8, label=label, **_dots(steps))
        return
    axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
    reach = max(2, round(SMOOTHED_SHARE * len(values)))
    smoothed = []
    for i in range(len(values)):
        here = min(reach, i, len(values) - 1 - i)  # symmetric, so narrower at both ends
        smoothed.append(smooth(values[i - here : i + here + 1]))
    axes.plot(steps, smoothed, color=color, linewidth=2, label=label)


def _dots(steps: Sequence[int]) -> dict[str, object]:
    """Few points are shown as such."""
    return {"marker": "o", "markersize": 3.5} if len(steps) <= SMOOTH_ABOVE_POINTS // 2 else {}


def _tidy(axes) -> None:
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors=MUTED)
    axes.margins(x=0.02)
    axes.locator_params(axis="x", integer=True)
    axes.yaxis.set_label_coords(-0.08, 0.5)  # the same in all panels


def _facts(rows: list[MetricsRow]) -> str:
    """`400 steps · 1.2M tokens · final loss 1.834`."""
    facts = [f"{rows[-1].step:,} " + ("step" if rows[-1].step == 1 else "steps")]
    _, tokens = series(rows, "tokens")
    if tokens:
        facts.append(f"{_short(tokens[-1])} trained tokens")
    _, losses = series(rows, "loss")
    if losses:
        facts.append(f"final loss {losses[-1]:.3f}")
    return "  ·  ".join(facts)


def _short(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
