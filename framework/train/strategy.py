"""`Trainer(strategy=ZeroStrategy(stage=3))`: Lightning runs the loops, our ZeRO engine holds parameters, gradients and optimizer.

Lightning decides when a batch is trained on, when gradients have been accumulated, when to validate, log and save. The engine does
backward, reduction, clipping and the step, and shards what its stage says. The user's torch optimizer goes on living: its param groups
are pointed at flat fp32 shards in place, so learning-rate schedulers keep working.

Unusual: parameters of the LightningModule can be read only while they are gathered, which a step, `forward` and
`with strategy.gathered():` see to. After a run the module is an ordinary one again and holds the trained weights on every rank.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor

from framework.checkpoint.folder import remove_checkpoint
from framework.config.check_zero import zero_problems
from framework.config.errors import Problem, UserError
from framework.config.schema import OffloadConfig, PrecisionConfig, ZeroConfig
from framework.train.cluster import RankEnvironment
from framework.train.held import HeldModule, sharded_part
from framework.train.lightning_checkpoint import (
    belongs_to,
    load_state,
    local_path,
    read_checkpoint,
    restore_optimizer,
    state_without_parameters,
    take_over,
    write_checkpoint,
)
from framework.train.options import optimizer_problems, trainer_problems
from framework.train.precision import EnginePrecision
from framework.zero import StepStats, ZeroEngine
from framework.zero.by_hand import Chosen
from framework.zero.load import Read

RENDEZVOUS_SECONDS = 300
"""The least time that ranks wait for each other at the start: their imports may take long on a busy machine."""


class ZeroStrategy(ParallelStrategy):
    """ZeRO data parallelism over all ranks.

    Args:
        stage: 0 replicates everything, 1 shards optimizer state, 2 and gradients, 3 and parameters; default 3. Short for `zero`.
        zero: the same with its details.
        offload: which model state lies in host memory or on a disk.
        precision: data type of parameters in forward and backward; masters and gradients are fp32. Takes the place of
            `Trainer(precision=)`.
        grad_clip: largest global gradient norm; `Trainer(gradient_clip_val=)` does the same.
        seed: for parameters that are on the meta device and that `read` does not fill.
        read: `read(name, start, stop)` gives elements of the flattened parameter `name`: the initial weights.
        timeout_seconds: a rank that waits longer for the others ends the run.
        meta_init: build `configure_model` on the meta device, so that no rank ever holds the whole model. Its modules must have
            `reset_parameters`, or `read` must know them: initialisation written into constructors is lost on the meta device.
        gather_after_fit: give every rank the full weights when a run ends, in CPU memory. False keeps them sharded, for models that
            do not fit: read them through `strategy.engine`, and end with `strategy.close()`.
    """

    strategy_name = "zero"

    def __init__(
        self,
        stage: Literal[0, 1, 2, 3] | None = None,
        *,
        zero: ZeroConfig | None = None,
        offload: OffloadConfig | None = None,
        precision: PrecisionConfig | None = None,
        grad_clip: float | None = None,
        seed: int = 0,
        read: Callable[[str, int, int], Tensor] | None = None,
        timeout_seconds: float = 1800,
        meta_init: bool = False,
        gather_after_fit: bool = True,
    ) -> None:
        if stage is not None and zero is not None:
            raise UserError(Problem(path="ZeroStrategy", got=f"stage={stage} and zero={zero}", expected="one of the two"))
        self.zero = zero or ZeroConfig(stage=3 if stage is None else stage)
        if self.zero.stage not in (0, 1, 2, 3):
            raise UserError(Problem(path="ZeroStrategy(stage=)", got=repr(self.zero.stage), expected="0, 1, 2 or 3"))
        self.offload = offload or OffloadConfig()
        if self.offload.params != "none" and self.zero.stage != 3:
            got = f"params={self.offload.params!r} at stage {self.zero.stage}, where every rank has all parameters"
            raise UserError(Problem(path="ZeroStrategy(offload=)", got=got, expected="stage=3, or params='none'"))
        if "nvme" in (self.offload.optimizer, self.offload.params) and not self.offload.nvme_path:
            raise UserError(Problem(path="ZeroStrategy(offload=)", got="nvme without nvme_path", expected="a folder on a local disk"))
        self.precision = precision or PrecisionConfig()
        super().__init__(cluster_environment=RankEnvironment(), precision_plugin=EnginePrecision(self.precision))
        self.grad_clip, self.seed, self.read = grad_clip, seed, read
        self.timeout_seconds, self.meta_init, self.gather_after_fit = timeout_seconds, meta_init, gather_after_fit
        self.num_nodes = 1

        self.engine: ZeroEngine | None = None
        """Of the last `fit`: optimizer, masters and their checkpoints."""
        self.last_stats: StepStats | None = None
        """Loss, gradient norm and tokens of the last step, over all ranks, on the device."""
        self._held: HeldModule | None = None
        """The module, while an engine has it: that of `fit`, or one without optimizer for `validate`, `test` and `predict`."""
        self._filled = False
        """Whether weights were trained or loaded already, so that `read` must not put them back."""
        self._loaded: Read | None = None
        """Parameters of a checkpoint, for the engine that takes the module next."""
        self._owns_group = False
        self._failed = False
        self._accumulating = False
        self._stepping = False
        """Whether a backward has run since the last step."""

    # -- ranks and their process group ------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning gives each rank its own samples. Alone, data order is that of a plain Trainer."""
        return self.world_size > 1

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    @property
    def root_device(self) -> torch.device:
        first = self.parallel_devices[0]
        if first.type != "cuda":
            return first
        return self.parallel_devices[self.local_rank] if self.local_rank < self.num_processes else torch.device("cuda", self.local_rank)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share the model; None for one rank alone."""
        return dist.group.WORLD if dist.is_initialized() and self.world_size > 1 else None

    def set_world_ranks(self) -> None:
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = utilities_rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        """Without a launcher, `Trainer(devices=N)` in a script starts the other ranks by running the script again."""
        if self.cluster_environment.creates_processes_externally or self.num_processes * self.num_nodes == 1:
            return
        if "hydra" in sys.modules and _inside_hydra():
            raise UserError(
                Problem(
                    path="Trainer(devices=)",
                    got=f"{self.num_processes} in a Hydra application",
                    expected="a launcher: Lightning would run the application again for each rank, sweeps and all",
                    fix=f"torchrun --nproc-per-node {self.num_processes} {sys.argv[0]}",
                )
            )
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        trainer = self.lightning_module.trainer
        problems = trainer_problems(trainer, self.lightning_module, self.grad_clip, self.world_size)
        if problems := [*problems, *zero_problems(self.zero, self.world_size)]:
            raise UserError(*problems)
        if self._failed and self._held is not None:
            raise UserError(
                Problem(
                    path="trainer.fit",
                    got="a model whose last run ended with an exception on several ranks, its weights still in shards",
                    expected="a new model, ZeroStrategy and Trainer",
                )
            )
        self._failed, self._loaded = False, None
        if self.world_size > 1:
            reset_seed()  # the seed of `seed_everything`, so that ranks that were started later draw the same numbers
            if not dist.is_initialized():
                self._join_group()

    def _join_group(self) -> None:
        environment, cuda = self.cluster_environment, self.root_device.type == "cuda"
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        patience = timedelta(seconds=max(self.timeout_seconds, RENDEZVOUS_SECONDS))
        store, rank, world_size = next(dist.rendezvous("env://", self.global_rank, self.world_size, timeout=patience))
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=self.timeout_seconds),
            device_id=self.root_device if cuda else None,
        )
        self._owns_group = True
        atexit.register(self.close)

    def close(self) -> None:
        """End the process group, if it is this strategy's own; also done when the interpreter exits. Collective on GPUs.

        Between the runs of a Trainer the group stays, for `trainer.save_checkpoint` after `fit` and for the next run: under torchrun,
        ranks cannot meet a second time.
        """
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False
        atexit.unregister(self.close)

    def _leave_group(self) -> None:
        """After an exception on this rank. Closed connections tell the others, which may wait in a collective; NCCL would wait for them
        instead, so there the end of the process does it."""
        if self.root_device.type == "cuda":
            self._owns_group = False
            atexit.unregister(self.close)
        self.close()

    # -- the module and its engine ----------------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Around `configure_model`. On the CPU, from which the engine fetches its shards, or on the meta device."""
        with torch.device("meta" if empty_init or (empty_init is None and self.meta_init) else "cpu"):
            yield

    def model_to_device(self) -> None:
        """Nothing: the engine moves what belongs on the device."""

    def setup(self, trainer: Trainer) -> None:
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._held is not None and (fitting or self._held.module is not self.lightning_module):
            self._give_back()
        if self._held is None:
            self._take(trainer, fitting)
        self._held.share_buffers()
        self.setup_precision_plugin()

    def _take(self, trainer: Trainer, fitting: bool) -> None:
        """Hand the module's parameters, and for `fit` the user's optimizer, to an engine."""
        module = self.lightning_module
        reads = any(parameter.is_meta for parameter in module.parameters()) or not self._filled
        if fitting and self._layer_sync is not None and self.world_size > 1:
            self._layer_sync.apply(module)
        optimizer = None
        if fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)  # configure_optimizers
            if problems := optimizer_problems(self.optimizers):
                raise UserError(*problems)
            (optimizer,) = self.optimizers
        self._held = HeldModule(
            module,
            lambda sharded: ZeroEngine(
                sharded,
                self.zero,
                self.precision,
                self.offload,
                optimizer=optimizer,
                grad_clip=self.grad_clip,
                group=self.group,
                device=self.root_device,
                read=self._loaded or (self.read if reads else None),
                seed=self.seed,
                show_progress=True,
            ),
        )
        self._filled, self._loaded, self._stepping = True, None, False
        if fitting:
            self.engine = self._held.engine

    def _give_back(self) -> None:
        self._held.give_back()
        if self._layer_sync is not None:
            self._layer_sync.revert(self._held.module)
        self._held = None

    @contextmanager
    def gathered(self, chosen: Chosen | None = None, *, modify: bool = False) -> Iterator[None]:
        """Parameters of the module, or `chosen` ones, can be read on every rank inside, and with `modify` rank 0 may change them, as in
        `ZeroEngine.gathered`. Outside of a run they are whole anyway. Collective."""
        with self._held.engine.gathered(chosen, modify=modify) if self._held is not None else nullcontext():
            yield

    def on_validation_start(self) -> None:
        self._held.share_buffers()

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if self._held is not None:
            self._held.engine.reset()

    def teardown(self) -> None:
        if self._failed and self.group is not None:
            self._leave_group()
        elif self._held is not None and self.gather_after_fit:
            self._give_back()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # -- a step -----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning wraps every micro-batch that does not end an accumulation in this."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def engine_backward(self, loss: Tensor) -> None:
        """Backward of one micro-batch. Losses of a step are added up and divided by the number of ranks, as DDP's average does: a step
        counts one token per rank, whatever the accumulation (by which Lightning has divided `loss` already)."""
        self._held.engine.backward(loss, tokens=0 if self._stepping else 1, last=not self._accumulating)
        self._stepping = True
        if not self.lightning_module.automatic_optimization:
            self._held.resume_step()

    def engine_step(self, clip_norm: float | None) -> None:
        """Reduce, clip, update. `clip_norm` takes the place of the strategy's own for this step."""
        if not self._stepping and self.lightning_module.automatic_optimization:
            return  # training_step returned None for every micro-batch: like torch, which finds no gradient anywhere
        self._held.engine.grad_clip = self.grad_clip if clip_norm is None else clip_norm
        self.last_stats = self._held.engine.step()
        self._stepping = False
        if not self.lightning_module.automatic_optimization:
            self._held.resume_step()

    # -- collectives for Lightning ----------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        if self.group is not None:
            dist.barrier(self.group, device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.group is None:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src, group=self.group)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: dist.ReduceOp | str | None = "mean") -> Any:
        """The sum, mean, ... of every rank's `tensor`; what is no tensor comes back as it is."""
        group = group or self.group
        if not isinstance(tensor, Tensor) or group is None:
            return tensor
        mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if isinstance(reduce_op, str):
            reduce_op = dist.ReduceOp.SUM if mean else getattr(dist.ReduceOp, reduce_op.upper())
        reduced = tensor.clone()
        dist.all_reduce(reduced, op=reduce_op or dist.ReduceOp.SUM, group=group)
        return reduced / dist.get_world_size(group) if mean else reduced

    # -- checkpoints ------------------------------------------------------------------------------------------------------------
    # Folders that every rank writes its part of; see lightning_checkpoint.py. What is loaded goes to the engine when it takes the module.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Names and buffers; parameters without values, which `save_checkpoint` writes from the engine."""
        engine = None if self._held is None else self._held.engine
        return state_without_parameters(self.lightning_module, sharded_part(self.lightning_module), engine)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The options of its groups; the state is the engine's."""
        return {"param_groups": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise UserError(Problem(path="save_checkpoint(storage_options=)", got=repr(storage_options), expected="a folder on a disk"))
        if self.world_size > 1 and self.group is None:
            raise UserError(Problem(path="save_checkpoint", got="ranks that do not meet", expected="a save after `fit` and before `close`"))
        folder = local_path(self.broadcast(str(filepath)))
        with self._engine_to_save(with_optimizer=bool(checkpoint.get("optimizer_states"))) as engine:
            write_checkpoint(engine, folder, checkpoint)

    @contextmanager
    def _engine_to_save(self, with_optimizer: bool) -> Iterator[ZeroEngine]:
        """The engine that has the module; after a run, that of `fit`, or one for this save."""
        if self._held is None and self.engine is not None and belongs_to(self.engine, self.lightning_module):
            take_over(self.engine)
            yield self.engine
        elif with_optimizer and (self._held is None or self._held.engine is not self.engine):
            got = "optimizer state of other parameters, or a save during validate, test or predict"
            expected = "a save during or after `fit` of this model, or of its weights alone"
            raise UserError(Problem(path="save_checkpoint", got=got, expected=expected, fix="save_checkpoint(PATH, weights_only=True)"))
        elif self._held is None:
            self._take(self.lightning_module.trainer, fitting=False)
            try:
                yield self._held.engine
            finally:
                self._give_back()
        else:
            yield self._held.engine

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero and os.path.lexists(folder := local_path(filepath)):
            remove_checkpoint(folder)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Nothing but tensors and plain data is ever loaded, whatever `weights_only` says."""
        return read_checkpoint(checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._held is not None:
            self._give_back()
        module = self.lightning_module
        self._loaded = load_state(module, sharded_part(module), checkpoint["state_dict"], strict, self.read)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        restore_optimizer(self.engine, self._held.module, self._held.sharded, checkpoint)


def _inside_hydra() -> bool:
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.initialized()
