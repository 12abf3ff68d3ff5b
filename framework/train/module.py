"""The LightningModule of our recipes: one Lightning batch is one optimizer step, a list of this rank's micro-batches.

Optimization is manual, so that a step can be read here from top to bottom. The loss of a step is the sum over the trained tokens of the
global batch divided by their number, whatever the micro-batches and ranks; validation likewise.

Unusual: `self.log` is not used in training (0.35 ms a call, and a wait for the GPU). What a step did stays on the device in `last_stats`;
callbacks read it every n steps.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from framework.config.schedule import lr_factor
from framework.config.schema import LlamaConfig, ModelConfig, OptimizerConfig, PeftConfig, ScheduleConfig
from framework.models.documents import require_isolation
from framework.models.llama import Llama
from framework.models.selection import choose_trained, parameter_groups
from framework.train.source_loss import SourceLoss, total
from framework.zero import StepStats
from framework.zero.activations import HostActivations
from framework.zero.optimizer_by_name import build_optimizer

MicroBatch = dict[str, Any]
"""input_ids [B, T] and labels [B, T] int64 (shifted; -100: not trained), trained_tokens: int; packs: document_lengths of each row;
in validation source: int, the place of its name in the loader's `source_names`."""


class CausalLMModule(LightningModule):
    """Trains a `Llama` under `ZeroStrategy`; the strategy's `read` or `seed` gives the initial weights."""

    def __init__(
        self,
        architecture: LlamaConfig,
        *,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        total_steps: int,
        activation_checkpointing: bool | Collection[int] = False,
        activation_offload: bool = False,
        compile_blocks: bool = False,
        peft: PeftConfig | None = None,
        frozen: ModelConfig | None = None,
    ) -> None:
        """`frozen`: its `freeze` and `train_last_n_blocks` say what of the model is not trained."""
        super().__init__()
        self.automatic_optimization = False
        self.architecture, self.optimizer_config = architecture, optimizer
        self.schedule, self.total_steps, self.peft, self.frozen = schedule, total_steps, peft or PeftConfig(), frozen or ModelConfig()
        self.activation_checkpointing, self.compile_blocks = activation_checkpointing, compile_blocks
        self.activation_offload = activation_offload
        self.model: Llama | None = None

        self.lr = 0.0
        """Of the last step; parameter groups have theirs in terms of it."""
        self.last_stats: StepStats | None = None
        """Of the last step, over all ranks, on the device."""
        self.last_validation: float | None = None
        """Validation loss over all ranks and sources, of the last validation that was not given up."""
        self.last_validation_by_source: list[SourceLoss] = []

    @property
    def sharded_module(self) -> nn.Module:
        """What the engine takes: names in `engine.full_tensors()` are then those of the model alone."""
        return self.model

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = Llama(
                    self.architecture, activation_checkpointing=self.activation_checkpointing, compile_blocks=self.compile_blocks
                )
            choose_trained(self.model, self.frozen, self.peft)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """By default without decay of norms and biases."""
        return build_optimizer(self.optimizer_config, parameter_groups(self.model, self.optimizer_config))

    # -- training ---------------------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        if self.activation_offload:
            self.model.model.input_saver = HostActivations(self.trainer.strategy.engine)

    def on_fit_end(self) -> None:
        self.model.model.input_saver = None

    def training_step(self, batch: list[MicroBatch], batch_idx: int) -> None:
        """One optimizer step. Raises NonFiniteError before a parameter is touched."""
        engine, optimizer = self.trainer.strategy.engine, self.optimizers()
        self.lr = self.optimizer_config.lr * lr_factor(self.schedule, self.global_step, self.total_steps)
        for group in optimizer.param_groups:
            group["lr"] = self.lr * group["lr_factor"]
        for number, micro in enumerate(batch, start=1):
            loss_sum = self.loss_sum(micro)
            engine.backward(loss_sum, micro["trained_tokens"], last=number == len(batch))  # and reduce over the ranks
        optimizer.step()  # engine.step(): norm over all ranks, clip, update. Called through Lightning, which counts global_step by it
        self.last_stats = self.trainer.strategy.last_stats

    def loss_sum(self, micro: MicroBatch) -> torch.Tensor:
        """The sum of the losses of the micro-batch's trained tokens. Raises UserError for packs that the model would not keep apart."""
        options = {}
        if "document_lengths" in micro:
            require_isolation(self.model)
            options["document_lengths"] = micro["document_lengths"]
        return self.model(micro["input_ids"], micro["labels"], trained_tokens=micro["trained_tokens"], **options)

    def on_train_batch_end(self, outputs: Any, batch: list[MicroBatch], batch_idx: int) -> None:
        if self.global_step >= self.total_steps:
            self.trainer.should_stop = True  # on a stop Lightning validates first, so the last step is always validated

    # -- validation -------------------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        names = self.trainer.val_dataloaders.source_names
        self._sums = torch.zeros(len(names), 2, dtype=torch.float64, device=self.device)  # of each source: loss, trained tokens

    def validation_step(self, batch: MicroBatch, batch_idx: int) -> None:
        of_source = self._sums[batch["source"]]
        of_source[0] += self.loss_sum(batch).double()
        of_source[1] += batch["trained_tokens"]

    def on_validation_epoch_end(self) -> None:
        batches = self.trainer.val_dataloaders
        if batches.given_up:
            return
        sums = self.trainer.strategy.reduce(self._sums, reduce_op="sum").tolist()
        self.last_validation_by_source = [
            SourceLoss(name=name, loss_sum=loss_sum, trained_tokens=round(tokens))
            for name, (loss_sum, tokens) in zip(batches.source_names, sums, strict=True)
        ]
        self.last_validation = total(self.last_validation_by_source).loss
        self.log("val_loss", self.last_validation, logger=False)  # for callbacks that monitor it
