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
from framework.checkpoint.folder import resolve, run_of
from framework.checkpoint.load import Checkpoint
from framework.checkpoint.open import digest_of, for_export, open_model, tokenizer_config
from framework.config.errors import Problem, UserError
from framework.config.hardware import world_size
from framework.config.schema import KernelsConfig, RecipeConfig
from framework.cores import gpu_node, settle
from framework.data.batches import EvalBatches, StepBatches
from framework.data.dataset import TokenDataset
from framework.data.mix import Mix
from framework.data.prepare import Prepared, prepare
from framework.data.prompts import encode_prompts, read_prompts
from framework.data.show import render_sample
from framework.data.sources import holds_conversations
from framework.kernels.library import choose, missing
from framework.models.adapter import open_adapter, other_base
from framework.models.generate import inference_stop_ids
from framework.models.lora import AdapterReader
from framework.models.pretrained import Pretrained
from framework.models.quantized import Read
from framework.models.selection import check_selection
from framework.models.tokenizer import load_tokenizer
from framework.plan.describe import describe
from framework.plan.plan import DataFacts, Plan, make_plan
from framework.plan.resume import check_resume, state_of, validates_alike
from framework.progress import busy
from framework.ranks import Place, launched
from framework.train.callbacks.agreement import Agreement
from framework.train.callbacks.answers import Answers, Questions, continue_answers
from framework.train.callbacks.checkpoint import Resume, SaveCheckpoints
from framework.train.callbacks.failure import FailureReporter
from framework.train.callbacks.patience import Patience
from framework.train.callbacks.plot import PlotMetrics
from framework.train.callbacks.progress import Progress, ValidationBar
from framework.train.callbacks.stop import GracefulStop
from framework.train.loggers import Tracker, build_tracker
from framework.train.metrics import MetricsFile, continue_metrics
from framework.train.module import CausalLMModule
from framework.train.run_dir import ANSWERS, EXPORT, LEDGER, METRICS, PLAN, PLOT, TOKENS, read_environment, write_summary
from framework.train.source_loss import perplexity
from framework.train.strategy import ZeroStrategy
from framework.train.trainer import build_strategy, build_trainer
from framework.worker import is_supervised

WAIT_SECONDS = 0.1


def run(recipe: RecipeConfig, run_dir: Path) -> None:
    """Train `recipe` as the rank that the environment says; everything that stays goes to `run_dir`.

    Raises UserError for what the user can mend, NonFiniteError when the loss or a gradient is.
    """
    place = launched(os.environ)
    is_first = place.rank == 0
    torch.manual_seed(int(np.random.SeedSequence([recipe.seed, place.rank]).generate_state(1)[0]))  # of dropout, the only draws in a run
    pretrained = starting_point(recipe)
    tokenizer = load_tokenizer(tokenizer_config(recipe.model, pretrained)) if place.local_rank == 0 else None
    prepared = prepare_once(recipe, tokenizer, run_dir, place)
    plan = plan_of(recipe, pretrained, prepared, place.world_size)
    cores = settle(  # after tokenising, which takes all cores
        place.local_rank, place.local_world_size, inherited=is_supervised(), gpu_nodes=gpu_nodes(plan.device_type, place.local_world_size)
    )
    if is_first:
        introduce(plan, prepared, tokenizer, run_dir, cores)

    remembered = {
        **state_of(plan),
        "frozen": digest_of(pretrained) if plan.has_frozen else None,
        "export": for_export(recipe.model, pretrained, prepared.stop_ids),
    }
    checkpoint = None if recipe.resume == "none" else resumed(plan, prepared, remembered, Path(recipe.resume), run_dir, is_first)
    first_step = checkpoint.step if checkpoint else 0

    with busy("starting the dashboard", show=is_first):
        tracker = build_tracker(recipe, run_dir, run_id=dashboard_run(checkpoint, run_dir)) if is_first else Tracker()
    metrics = MetricsFile(run_dir / METRICS, prepared.source_names) if is_first else None
    module = build_module(plan)
    weights = initial_weights(recipe, pretrained)
    strategy = build_strategy(recipe, checkpoint.reader(weights) if checkpoint else weights)
    asked = questions(plan, prepared, pretrained, tokenizer) if is_first and recipe.eval.prompts is not None else None
    watch = watch_over(plan, remembered, run_dir, tracker, metrics, checkpoint, asked)
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
        with watch.stop:
            trainer.fit(module, *batches(plan, prepared, place, first_step))
            with watch.stop.saving(strategy.engine.steps_done, is_first=is_first):
                try:
                    if recipe.checkpoint.on_stop if watch.stop.stopped_at_step is not None else recipe.checkpoint.at_end:
                        watch.saves.save(trainer)
                    watch.saves.finish(trainer)
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
    patience: Patience
    saves: SaveCheckpoints
    callbacks: list[Callback]


def watch_over(
    plan: Plan,
    remembered: dict[str, Any],
    run_dir: Path,
    tracker: Tracker,
    metrics: MetricsFile | None,
    checkpoint: Checkpoint | None,
    asked: Questions | None,
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
    patience = Patience(recipe.eval)

    def run_state() -> dict[str, Any]:
        return {**remembered, "progress": progress.state_dict(), "patience": patience.state_dict(), "tracker": tracker.run_id}

    saves = SaveCheckpoints(
        run_dir,
        recipe.checkpoint,
        run_state,
        validate_every_n_steps=None if plan.validation is None else recipe.eval.every_n_steps,
        copy_bytes=plan.checkpoint_bytes,
    )
    callbacks = [FailureReporter(run_dir), Agreement(plan.fingerprint), stop, ValidationBar(), progress, patience, saves]
    if recipe.eval.prompts is not None:
        place = {"file": run_dir / ANSWERS, "tracker": tracker, "progress": progress, "stop": stop}
        callbacks.append(Answers(recipe.eval, asked, seed=recipe.seed, **place))
    callbacks.append(PlotMetrics(run_dir, recipe.name))
    if checkpoint:
        progress.load_state_dict(checkpoint.run["progress"])
        if validates_alike(recipe, checkpoint.run["recipe"]):  # else its best loss is one of other data
            patience.load_state_dict(checkpoint.run["patience"])
        callbacks.insert(0, Resume(checkpoint))
    return Watch(stop=stop, progress=progress, patience=patience, saves=saves, callbacks=callbacks)


def questions(plan: Plan, prepared: Prepared, pretrained: Pretrained | None, tokenizer: Any) -> Questions:
    """What the model is asked on the way. Raises UserError for prompts that are too long for it."""
    recipe, longest = plan.recipe, plan.architecture.max_position_embeddings
    as_turns = holds_conversations(recipe.data)
    prompts = encode_prompts(read_prompts(recipe.eval.prompts), tokenizer, as_turns=as_turns, longest=longest)
    stop_ids = inference_stop_ids(tokenizer, pretrained.generation_config if pretrained else {})
    return Questions(prompts=prompts, stop_ids=[*prepared.stop_ids, *stop_ids], tokenizer=tokenizer)


def preview(recipe: RecipeConfig) -> str:
    """What `run` would do on this machine, as it would print it. Reads and tokenises the data."""
    pretrained = starting_point(recipe)
    tokenizer = load_tokenizer(tokenizer_config(recipe.model, pretrained))
    prepared = prepare(recipe.data, tokenizer, seed=recipe.seed, show_progress=True)
    plan = plan_of(recipe, pretrained, prepared, world_size(recipe.trainer))
    if recipe.eval.prompts is not None:
        questions(plan, prepared, pretrained, tokenizer)  # are they too long?
    folder = resolve(recipe.resume, Path(recipe.runs_dir), recipe.name)
    if folder is None:
        return page(plan, prepared)
    checkpoint = Checkpoint(folder)
    changes = [f"changed since the checkpoint: {change}" for change in check_resume(plan, checkpoint.run, checkpoint.step)]
    return "\n".join([f"resumes after step {checkpoint.step:,} from {folder}", *changes, "", page(plan, prepared)])


def starting_point(recipe: RecipeConfig) -> Pretrained | None:
    """The weights that the recipe names, None for random ones. Raises UserError, before anything slow, also for patterns that mean nothing
    in it and for an adapter that is not what the recipe says."""
    pretrained = None if recipe.model.path is None else open_model(recipe.model.path, arch=recipe.model.arch)
    check_selection(recipe, recipe.model.arch if pretrained is None else pretrained.config)
    if recipe.peft.path is not None:
        open_adapter(recipe.peft, pretrained.config)
    return pretrained


def page(plan: Plan, prepared: Prepared) -> str:
    """What became of the rows, and the plan; first of all that an adapter is put on another model than its own, if it is."""
    peft, model_path = plan.recipe.peft, plan.recipe.model.path
    base = None if peft.path is None else other_base(peft, model_path)
    note = "" if base is None else f"the adapter in {peft.path} was trained on {base}, and goes on here on {model_path}\n\n"
    return f"{note}{prepared.ledger.table()}\n\n{describe(plan)}"


def prepare_once(recipe: RecipeConfig, tokenizer: Any, run_dir: Path, place: Place) -> Prepared:
    """The data, tokenised by this machine's first rank, or by an earlier run; its other ranks map what the first one has written."""
    if place.local_rank == 0:
        prepared = prepare(recipe.data, tokenizer, seed=recipe.seed, show_progress=place.rank == 0)
    if place.local_world_size == 1:
        return prepared
    folder = run_dir / TOKENS / f"node_{place.node_rank}"
    if place.local_rank == 0:
        prepared.save(folder)
        return prepared
    while True:  # no collective, so no time limit; the supervisor ends this rank when the first one fails
        try:
            return Prepared.load(folder)
        except FileNotFoundError:
            time.sleep(WAIT_SECONDS)


def plan_of(recipe: RecipeConfig, pretrained: Pretrained | None, prepared: Prepared, world_size: int) -> Plan:
    """The plan, which every rank computes for itself. Raises UserError where recipe, model, data and machine do not fit together."""
    architecture = recipe.model.arch if pretrained is None else pretrained.config
    validation = None if prepared.validation is None else facts_of(prepared.validation)
    plan = make_plan(recipe, architecture, facts_of(prepared.train, prepared.mix), validation, world_size)
    choose_kernels(recipe.kernels, plan.device_type, plan.compute_dtype)
    return plan


def choose_kernels(config: KernelsConfig, device_type: str, dtype: torch.dtype) -> None:
    """For this process. Raises UserError where compiled kernels are demanded and there are none."""
    choose(config.mode)
    if config.mode == "compiled" and (why_not := missing(device_type, dtype)) is not None:
        expected = "auto, or an installation with kernels (csrc/README.md)"
        raise UserError(Problem(path="kernels", got=f"compiled, but {why_not}", expected=expected, fix="kernels=auto"))


def facts_of(dataset: TokenDataset, mix: Mix | None = None) -> DataFacts:
    """Of an epoch of `dataset`, with `mix` on average. Reads no token."""
    digest = hashlib.sha256()
    dataset.identify(digest)
    digest.update(b"" if mix is None else repr(mix).encode())
    documents = dataset.documents if mix is None else mix.documents_per_epoch
    return DataFacts(
        samples=len(dataset) if mix is None else mix.samples_per_epoch,
        tokens=dataset.total_tokens,
        trained_tokens=dataset.trained_tokens if mix is None else mix.trained_tokens_per_epoch,
        longest=dataset.longest,
        packed=documents if dataset.is_packed else None,
        largest_id=dataset.ids.largest,
        digest=digest.hexdigest(),
    )


def gpu_nodes(device_type: str, local_ranks: int) -> list[int | None]:
    """NUMA node of the GPU of each rank of this machine; empty on the CPU, or where a rank sees its own GPU only."""
    if device_type != "cuda" or torch.cuda.device_count() < local_ranks:
        return []
    gpus = [torch.cuda.get_device_properties(index) for index in range(local_ranks)]
    return [gpu_node(gpu.pci_domain_id, gpu.pci_bus_id, gpu.pci_device_id) for gpu in gpus]


def introduce(plan: Plan, prepared: Prepared, tokenizer: Any, run_dir: Path, cores: str) -> None:
    """Print and keep what is about to happen: ledger, plan, this rank's cores, one sample as it is trained on."""
    (run_dir / LEDGER).write_text(json.dumps(prepared.ledger.to_json(), indent=2) + "\n")
    text = f"{page(plan, prepared)}\n\ncores of this rank: {cores}, {torch.get_num_threads()} threads"
    (run_dir / PLAN).write_text(text + "\n")
    print(f"\n{text}\n\n{render_sample(tokenizer, prepared.train[0])}\n", flush=True)


def resumed(plan: Plan, prepared: Prepared, remembered: dict[str, Any], folder: Path, run_dir: Path, is_first: bool) -> Checkpoint:
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
        earlier = run_of(folder) or folder
        if not (earlier / METRICS).exists():
            print(f"{METRICS} begins after step {checkpoint.step:,}: there is no {earlier / METRICS} to go on with", flush=True)
        continue_metrics(earlier / METRICS, run_dir / METRICS, checkpoint.step, prepared.source_names)
        continue_answers(earlier / ANSWERS, run_dir / ANSWERS, checkpoint.step)
    return checkpoint


def dashboard_run(checkpoint: Checkpoint | None, run_dir: Path) -> str | None:
    """The id of the run in the dashboard that goes on (P39); None for a new one, which each job of a sweep gets."""
    if checkpoint is None or read_environment(run_dir)["sweep_job"] is not None:
        return None
    return checkpoint.run["tracker"]


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
        mix=prepared.mix,
        pinned=plan.device_type == "cuda",
    )
    return train, None if prepared.validation is None else validation_batches(recipe, batch.micro_batch_size, prepared, place)


def validation_batches(recipe: RecipeConfig, micro_batch_size: int, prepared: Prepared, place: Place) -> EvalBatches:
    """This rank's micro-batches of the validation data."""
    return EvalBatches(
        prepared.validation,
        micro_batch_size=micro_batch_size,
        rank=place.rank,
        world_size=place.world_size,
        max_batches=recipe.eval.max_batches,
        source_of=prepared.validation_source_of,
        source_names=prepared.source_names,
    )


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
        ended="stopped" if stopped else "early" if watch.patience.ended else "done",
        reason=watch.patience.ended,
        steps=strategy.engine.steps_done,
        loss=row.loss if row else None,
        validation_loss=module.last_validation,
        validation_perplexity=None if module.last_validation is None else perplexity(module.last_validation),
        validation=[{"source": s.name, "loss": s.loss, "perplexity": s.perplexity} for s in module.last_validation_by_source],
        trained_tokens=row.tokens if row else None,
        seconds=row.seconds if row else None,
        peak_model_state_bytes=memory.peak,
        peak_model_state_bytes_by_kind=memory.peak_by_kind,
        checkpoint_copy_bytes=saves.staging.nbytes if saves.staging else 0,
        peak_offloaded_bytes=strategy.engine.host_memory.peak,
        bytes_sent=strategy.engine.world.bytes_sent,
        torch=torch.__version__,
        skipped_steps=strategy.engine.skipped_steps,
        checkpoint_step=saves.saved_step,
        failed_saves=saves.failures,
    )
    print(f"\npeak model state on rank 0: {memory.peak / 2**20:,.1f} MiB ({_kinds(memory.peak_by_kind)})")
    if host := strategy.engine.host_memory.peak_by_kind:
        print(f"in host memory: {sum(host.values()) / 2**20:,.1f} MiB ({_kinds(host)})")
    if saves.staging and saves.staging.nbytes:
        print(f"copy for checkpoints on rank 0: {saves.staging.nbytes / 2**20:,.1f} MiB of host memory")
    for what, name in (("plot", PLOT), ("metrics", METRICS), ("answers", ANSWERS), ("export", EXPORT)):
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
