"""All ranks must be about to do the same: they compare a hash of their plans before the first step."""

from __future__ import annotations

import lightning.pytorch as pl

from framework.config.errors import Problem, UserError


class Agreement(pl.Callback):
    """Raises UserError on every rank when the ranks' fingerprints differ."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = trainer.strategy.engine.world.gather_objects(self.fingerprint)
        others = [rank for rank, fingerprint in enumerate(found) if fingerprint != found[0]]
        if others:
            raise UserError(
                Problem(
                    path="plan",
                    got=f"another plan on rank {', '.join(map(str, others))} than on rank 0",
                    expected="the same recipe, model and data files on every machine",
                )
            )
