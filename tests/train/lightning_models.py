"""LightningModules as users write them, and runs of a Trainer that return plain numbers; at module level, for worker processes."""

from __future__ import annotations

import logging
import os
import warnings

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from framework.train.strategy import ZeroStrategy

SAMPLES, GLOBAL_BATCH = 32, 4
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


def loader(world_size: int = 1) -> DataLoader:
    """In order, each rank with its share of a global batch. A sampler of Lightning's own would shuffle."""
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(7))
    dataset = TensorDataset(x, x[:, :1] * 2 - x[:, 1:2])
    if world_size == 1:
        return DataLoader(dataset, batch_size=GLOBAL_BATCH)
    sampler = DistributedSampler(dataset, world_size, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(dataset, batch_size=GLOBAL_BATCH // world_size, sampler=sampler)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Regressor(LightningModule):
    """Repeated blocks, two param groups, a scheduler that changes the rate every step."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(8, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(12, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen += 1
        return F.mse_loss(self(x), y)

    def validation_step(self, batch, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        matrices = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.parameters() if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Mixed(Regressor):
    """With all that a checkpoint must bring back: random numbers in training, statistics, frozen layers, hyper-parameters."""

    def __init__(self, seed: int = 1, width: int = 12) -> None:
        super().__init__(seed)
        self.save_hyperparameters()
        self.before = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)).requires_grad_(False)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.codes = nn.Parameter(torch.randint(0, 9, (8,), dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(self.dropout(x + self.before(x) / (1 + self.codes))))

    def predict_step(self, batch, batch_idx: int) -> Tensor:
        return self(batch[0])


class OnMeta(LightningModule):
    """Built in `configure_model`, with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = None

    def configure_model(self) -> None:
        if self.first is None:
            self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
            self.second.weight = self.first.weight
            self.was_meta = self.first.weight.is_meta

    def training_step(self, batch, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(batch[0]))))
        return F.mse_loss(self.head(hidden), batch[1])

    def validation_step(self, batch, batch_idx: int) -> None:
        self.log("val_loss", OnMeta.training_step(self, batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Recorder(Callback):
    """The loss of every micro-batch, as Lightning hands it to callbacks."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(outputs["loss"]))


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def plain_fit(module: LightningModule, max_epochs: int = 2, **options):
    """Lightning's own single-process training: (losses, weights)."""
    recorder = Recorder()
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=max_epochs, callbacks=[recorder], **QUIET, **options)
    trainer.fit(module, loader())
    return recorder.losses, weights(module)


def zero_fit(module: LightningModule, strategy: ZeroStrategy, max_epochs: int = 2, world_size: int = 1, callbacks=(), **options):
    """The same under `strategy`."""
    recorder = Recorder()
    options = {**QUIET, **options, "callbacks": [recorder, *callbacks]}
    trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=max_epochs, **options)
    trainer.fit(module, loader(world_size))
    return recorder.losses, weights(module)
