"""What one rank does with a recipe: data, plan, build, fit, export. Each step is one call, in this order, in `run`.

Data are prepared before the ranks meet, by the first rank of each machine, so that tokenising may take as long as it takes. Rank 0
prints and writes; all ranks compute the same plan and compare it before the first step.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback

from framework.checkpoint.export import export_adapter, export_folder
from framework.checkpoint.folder import resolve
from framework.checkpoint.load import Checkpoint
from framework.config.errors import Problem, UserError
from framework.config.hardware import world_size
from framework.config.schema import KernelsConfig, RecipeConfig
from framework.data.batches import EvalBatches, StepBatches
from framework.data.dataset import TokenDataset
from framework.data.prepare import Prepared, prepare
from framework.data.show import render_sample
from framework.kernels.library import choose, missing
from framework.models.adapter import open_adapter
from framework.models.lora import AdapterReader
from framework.models.pretrained import Pretrained, open_pretrained
from framework.models.quantized import Read
from framework.models.selection import check_selection
from framework.models.tokenizer import load_tokenizer
from framework.plan.describe import describe
from framework.plan.plan import DataFacts, Plan, make_plan
from framework.plan.resume import check_resume, state_of
from framework.progress import busy
from framework.ranks import Place, launched
from framework.train.callbacks.agreement import Agreement
from framework.train.callbacks.checkpoint import Resume, SaveCheckpoints
from framework.train.callbacks.failure import FailureReporter
from framework.train.callbacks.plot import PlotMetrics
from framework.train.callbacks.progress import Progress
from framework.train.callbacks.stop import GracefulStop
from framework.train.loggers import Tracker, build_tracker
from framework.train.metrics import MetricsFile, continue_metrics
from framework.train.module import CausalLMModule
from framework.train.run_dir import EXPORT, LEDGER, METRICS, PLAN, PLOT, TOKENS, write_summary
from framework.train.strategy import ZeroStrategy
from framework.train.trainer import build_strategy, build_trainer
from framework.worker import is_supervised

WAIT_SECONDS = 0.1
DIGEST_ELEMENTS = 64


def run(recipe: RecipeConfig, run_dir: Path) -> None:
    """Train `recipe` as the rank that the environment says; everything that stays goes to `run_dir`.

    Raises UserError for what the user can mend, NonFiniteError when the loss or a gradient is.
    """
    place = launched(os.environ)
    is_first = place.rank == 0
    torch.manual_seed(int(np.random.SeedSequence([recipe.seed, place.rank]).generate_state(1)[0]))  # of dropout, the only draws in a run
    pretrained = opened(recipe)
    tokenizer = load_tokenizer(recipe.model) if place.local_rank == 0 else None
    prepared = prepare_once(recipe, tokenizer, run_dir, place)
    plan = plan_of(recipe, pretrained, prepared, place.world_size)
    if is_first:
        introduce(plan, prepared, tokenizer, run_dir)

    remembered = {**state_of(plan), "frozen": digest_of(pretrained) if plan.has_frozen else None}
    checkpoint = None if recipe.resume == "none" else resumed(plan, remembered, Path(recipe.resume), run_dir, is_first)
    first_step = checkpoint.step if checkpoint else 0

    run_id = checkpoint.run["tracker"] if checkpoint else None
    with busy("starting the dashboard", show=is_first):
        tracker = build_tracker(recipe, run_dir, run_id=run_id) if is_first else Tracker()
    metrics = MetricsFile(run_dir / METRICS) if is_first else None
    module = build_module(plan)
    weights = initial_weights(recipe, pretrained)
    strategy = build_strategy(recipe, checkpoint.reader(weights) if checkpoint else weights)
    watch = watch_over(plan, remembered, run_dir, tracker, metrics, checkpoint)
    trainer = build_trainer(
        recipe,
        strategy,
        total_steps=plan.steps.total_steps,
        first_step=first_step,
        run_dir=run_dir,
        callbacks=watch.callbacks,
        loggers=tracker.loggers,
    )
    succeeded = False
    try:
        trainer.fit(module, *batches(plan, prepared, place, first_step))
        with watch.stop.saving(strategy.engine.steps_done, is_first=is_first):
            try:
                if recipe.checkpoint.on_stop if watch.stop.stopped_at_step is not None else recipe.checkpoint.at_end:
                    watch.saves.save(trainer)
            finally:  # a disk that is too small for a checkpoint may still take the model
                if recipe.checkpoint.export:
                    export(strategy, plan, prepared, pretrained, tokenizer, run_dir)
        succeeded = True
        if is_first:
            conclude(strategy, module, watch, run_dir)
    finally:
        tracker.finish("success" if succeeded else "failed")
        if metrics is not None:
            metrics.close()
    strategy.close()


@dataclass(frozen=True, kw_only=True)
class Watch:
    """The callbacks of a run; those that are asked afterwards have names."""

    stop: GracefulStop
    progress: Progress
    saves: SaveCheckpoints
    callbacks: list[Callback]


def watch_over(
    plan: Plan, remembered: dict[str, Any], run_dir: Path, tracker: Tracker, metrics: MetricsFile | None, checkpoint: Checkpoint | None
) -> Watch:
    """Everything that happens beside the training itself; from `checkpoint` on where there is one. `remembered`: by the checkpoints."""
    recipe = plan.recipe
    stop = GracefulStop(run_dir if is_supervised() else None, supervised=is_supervised())
    progress = Progress(
        metrics,
        tracker,
        total_steps=plan.steps.total_steps,
        steps_per_epoch=plan.steps.steps_per_epoch,
        log_every_n_steps=recipe.trainer.log_every_n_steps,
    )
    saves = SaveCheckpoints(
        run_dir, recipe.checkpoint, lambda: {**remembered, "progress": progress.state_dict(), "tracker": tracker.run_id}
    )
    callbacks = [FailureReporter(run_dir), Agreement(plan.fingerprint), stop, progress, saves, PlotMetrics(run_dir, recipe.name)]
    if checkpoint:
        progress.load_state_dict(checkpoint.run["progress"])
        callbacks.insert(0, Resume(checkpoint))
    return Watch(stop=stop, progress=progress, saves=saves, callbacks=callbacks)


def preview(recipe: RecipeConfig) -> str:
    """What `run` would do on this machine, as it would print it. Reads and tokenises the data."""
    pretrained = opened(recipe)
    prepared = prepare(recipe.data, load_tokenizer(recipe.model), seed=recipe.seed, show_progress=True)
    plan = plan_of(recipe, pretrained, prepared, world_size(recipe.trainer))
    folder = resolve(recipe.resume, Path(recipe.runs_dir), recipe.name)
    if folder is None:
        return page(plan, prepared)
    checkpoint = Checkpoint(folder)
    changes = [f"changed since the checkpoint: {change}" for change in check_resume(plan, checkpoint.run, checkpoint.step)]
    return "\n".join([f"resumes after step {checkpoint.step:,} from {folder}", *changes, "", page(plan, prepared)])


def opened(recipe: RecipeConfig) -> Pretrained | None:
    """The pretrained model, None for random weights. Raises UserError, before anything slow, also for patterns that mean nothing in it."""
    pretrained = open_pretrained(recipe.model.path) if recipe.model.path is not None else None
    check_selection(recipe, recipe.model.arch if pretrained is None else pretrained.config)
    return pretrained


def page(plan: Plan, prepared: Prepared) -> str:
    """What became of the rows, and the plan."""
    return f"{prepared.ledger.table()}\n\n{describe(plan)}"


def prepare_once(recipe: RecipeConfig, tokenizer: Any, run_dir: Path, place: Place) -> Prepared:
    """The data, tokenised by this machine's first rank; its other ranks map what it has written."""
    if place.local_rank == 0:
        prepared = prepare(recipe.data, tokenizer, seed=recipe.seed, show_progress=place.rank == 0)
    if place.local_world_size == 1:
        return prepared
    folder = run_dir / TOKENS / f"node_{place.node_rank}"
    if place.local_rank == 0:
        prepared.save(folder)
        return prepared
    while not (
        folder / "train" / "ready"
    ).exists():  # no collective, so no time limit; the supervisor ends this rank when the first one fails
        time.sleep(WAIT_SECONDS)
    return Prepared.load(folder)


def plan_of(recipe: RecipeConfig, pretrained: Pretrained | None, prepared: Prepared, world_size: int) -> Plan:
    """The plan, which every rank computes for itself. Raises UserError where recipe, model, data and machine do not fit together."""
    architecture = recipe.model.arch if pretrained is None else pretrained.config
    validation = None if prepared.validation is None else facts_of(prepared.validation)
    plan = make_plan(recipe, architecture, facts_of(prepared.train, prepared.source_of), validation, world_size)
    choose_kernels(recipe.kernels, plan)
    return plan


def choose_kernels(config: KernelsConfig, plan: Plan) -> None:
    """For this process. Raises UserError where compiled kernels are demanded and there are none."""
    choose(config.mode)
    if config.mode == "compiled" and (why_not := missing(plan.device_type, plan.compute_dtype)) is not None:
        expected = "auto, or an installation with kernels (csrc/README.md)"
        raise UserError(Problem(path="kernels", got=f"compiled, but {why_not}", expected=expected, fix="kernels=auto"))


def digest_of(pretrained: Pretrained) -> str:
    """Of some elements of each tensor: enough to tell models apart, and quick."""
    digest = hashlib.sha256()
    for name, shape in pretrained.names().items():
        digest.update(name.encode())
        digest.update(pretrained.read(name, 0, min(DIGEST_ELEMENTS, shape.numel())).float().numpy())
    return digest.hexdigest()


def facts_of(dataset: TokenDataset, source_of: np.ndarray | None = None) -> DataFacts:
    """`source_of`: the sources of a weighted mix, which the order of samples depends on."""
    digest = hashlib.sha256()
    for array in (dataset.ids, dataset.trained, dataset.offsets, dataset.document_offsets, source_of):
        digest.update(b"" if array is None else np.ascontiguousarray(array))
    return DataFacts(
        samples=len(dataset),
        tokens=dataset.total_tokens,
        trained_tokens=dataset.trained_tokens,
        longest=dataset.longest,
        packed=dataset.documents if dataset.is_packed else None,
        largest_id=int(dataset.ids.max()),
        digest=digest.hexdigest(),
    )


def introduce(plan: Plan, prepared: Prepared, tokenizer: Any, run_dir: Path) -> None:
    """Print and keep what is about to happen: ledger, plan, one sample as it is trained on."""
    (run_dir / LEDGER).write_text(json.dumps(prepared.ledger.to_json(), indent=2) + "\n")
    text = page(plan, prepared)
    (run_dir / PLAN).write_text(text + "\n")
    print(f"\n{text}\n\n{render_sample(tokenizer, prepared.train[0])}\n", flush=True)


def resumed(plan: Plan, remembered: dict[str, Any], folder: Path, run_dir: Path, is_first: bool) -> Checkpoint:
    """The checkpoint in `folder`, from which this run goes on; metrics.csv begins with what its run had logged until then.

    Raises UserError where the recipe is not one that it can go on with.
    """
    checkpoint = Checkpoint(folder)
    changes = check_resume(plan, checkpoint.run, checkpoint.step)
    if checkpoint.run["frozen"] != remembered["frozen"]:
        got = f"{plan.recipe.model.path}, whose weights are not those that were frozen in the checkpoint's run"
        raise UserError(Problem(path="model.path", got=got, expected=f"the model that was at {checkpoint.run['recipe']['model']['path']}"))
    if is_first:
        for change in changes:
            print(f"changed since the checkpoint: {change}", flush=True)
        continue_metrics(folder.parents[1] / METRICS, run_dir / METRICS, checkpoint.step)
    return checkpoint


def initial_weights(recipe: RecipeConfig, pretrained: Pretrained | None) -> Read | None:
    """`read(name, start, stop)` for the engine; None: random weights."""
    if pretrained is None or recipe.peft.method == "none":
        return None if pretrained is None else pretrained.read
    adapter = None if recipe.peft.path is None else open_adapter(recipe.peft, pretrained.config)
    return AdapterReader(pretrained, recipe.peft, recipe.seed, adapter).read


def build_module(plan: Plan) -> CausalLMModule:
    """The LightningModule; its weights come with the strategy's engine."""
    model = plan.recipe.model
    return CausalLMModule(
        plan.architecture,
        optimizer=plan.recipe.optimizer,
        schedule=plan.recipe.schedule,
        total_steps=plan.steps.total_steps,
        activation_checkpointing=model.activation_checkpointing,
        compile_blocks=model.compile,
        peft=plan.recipe.peft,
        frozen=model,
    )


def batches(plan: Plan, prepared: Prepared, place: Place, first_step: int) -> tuple[StepBatches, EvalBatches | None]:
    """This rank's training steps after the first `first_step`, and validation micro-batches."""
    recipe, batch = plan.recipe, plan.batch
    train = StepBatches(
        prepared.train,
        micro_batch_size=batch.micro_batch_size,
        accumulate=batch.accumulate,
        rank=place.rank,
        world_size=place.world_size,
        seed=recipe.seed,
        shuffle=recipe.data.shuffle,
        total_steps=plan.steps.total_steps,
        first_step=first_step,
        source_of=prepared.source_of,
    )
    if prepared.validation is None:
        return train, None
    validation = EvalBatches(
        prepared.validation,
        micro_batch_size=batch.micro_batch_size,
        rank=place.rank,
        world_size=place.world_size,
        max_batches=recipe.eval.max_batches,
    )
    return train, validation


def export(strategy: ZeroStrategy, plan: Plan, prepared: Prepared, pretrained: Pretrained | None, tokenizer: Any, run_dir: Path) -> None:
    """Write RUN/export: the model, or the adapter. Collective."""
    recipe, folder = plan.recipe, run_dir / EXPORT
    beside = {
        "tokenizer": tokenizer,
        "stop_token_ids": prepared.stop_ids,
        "generation_config": pretrained.generation_config if pretrained else None,
    }
    if recipe.peft.method == "lora":
        export_adapter(strategy.engine, plan.architecture, recipe.peft, recipe.model.path, folder, **beside)
        return
    export_folder(
        strategy.engine,
        plan.architecture,
        folder,
        dtype=recipe.checkpoint.export_dtype,
        max_shard_bytes=recipe.checkpoint.max_shard_bytes,
        **beside,
    )


def conclude(strategy: ZeroStrategy, module: CausalLMModule, watch: Watch, run_dir: Path) -> None:
    """Write summary.json and say where everything is."""
    row, memory, saves = watch.progress.last_row, strategy.engine.memory, watch.saves
    shutil.rmtree(run_dir / TOKENS, ignore_errors=True)
    stopped = watch.stop.stopped_at_step is not None
    write_summary(
        run_dir,
        ended="stopped" if stopped else "done",
        steps=strategy.engine.steps_done,
        loss=row.loss if row else None,
        validation_loss=module.last_validation,
        trained_tokens=row.tokens if row else None,
        seconds=row.seconds if row else None,
        peak_model_state_bytes=memory.peak,
        peak_model_state_bytes_by_kind=memory.peak_by_kind,
        bytes_sent=strategy.engine.world.bytes_sent,
        torch=torch.__version__,
        checkpoint_step=saves.saved_step,
        failed_saves=saves.failures,
    )
    print(f"\npeak model state on rank 0: {memory.peak / 2**20:,.1f} MiB ({_kinds(memory.peak_by_kind)})")
    for what, name in (("plot", PLOT), ("metrics", METRICS), ("export", EXPORT)):
        if (run_dir / name).exists():
            print(f"{what + ':':<9}{run_dir / name}")
    for failure in saves.failures:
        print(f"CHECKPOINT NOT SAVED at {failure}")
    if stopped and saves.saved_step is not None:
        print(f"go on:   the same command with resume={run_dir}")
    if (run_dir / EXPORT).exists():
        print(f'ask it:  framework generate --model {run_dir} "your question"', flush=True)


def _kinds(nbytes: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count / 2**20:,.1f}" for kind, count in nbytes.items() if count)
