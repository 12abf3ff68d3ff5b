"""A LightningModule in the hands of a ZeRO engine: taken for a run, given back as an ordinary module afterwards.

Unusual: Lightning calls `training_step` and its like on the module directly, not through `forward`, so these are made entries of the
engine, too. Everything that is hung onto the module is taken off again, so that it can be copied, saved, called on one rank, or trained
by another Trainer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn

from framework.zero import ZeroEngine

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def sharded_part(module: LightningModule) -> nn.Module:
    """What an engine takes of `module`: its attribute `sharded_module`, if it has one, else all of it."""
    return getattr(module, "sharded_module", module)


class HeldModule:
    """`module` while its parameters are views of an engine's flat buffers."""

    def __init__(self, module: LightningModule, make_engine: Callable[[nn.Module], ZeroEngine]) -> None:
        self.module, self.sharded = module, sharded_part(module)
        self._dtypes = {name: parameter.dtype for name, parameter in self.sharded.named_parameters(remove_duplicate=False)}
        hooks = self.sharded._forward_pre_hooks, self.sharded._forward_hooks
        before = [set(table) for table in hooks]
        self.engine = make_engine(self.sharded)
        self._root_hooks = [(table, key) for table, known in zip(hooks, before, strict=True) for key in table if key not in known]
        if self.sharded is module:
            for name in STEPS:
                self.engine.wrap_method(module, name)

    def resume_step(self) -> None:
        """After a backward or an update in the middle of `training_step`: what follows finds the root's parameters, as they are now."""
        if self.sharded is self.module:
            root = self.engine.units[0]
            root.release()
            root.gather()
            root.wait()

    def share_buffers(self) -> None:
        """Rank 0's buffers for all ranks, such as the running statistics of batch norm."""
        if self.engine.world.size > 1:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, 0, group=self.engine.world.group)

    @torch.no_grad()
    def give_back(self) -> None:
        """Whole parameters on every rank, in CPU memory and their own data types; one unit at a time is held besides. Collective.

        The engine keeps its shards and optimizer state, and can still be saved.
        """
        self.share_buffers()
        engine = self.engine
        engine.flush()
        for unit in engine.units:
            unit.remove_hooks()
        for table, key in self._root_hooks:
            table.pop(key, None)
            self.sharded._forward_pre_hooks_with_kwargs.pop(key, None)
            self.sharded._forward_hooks_always_called.pop(key, None)
        if self.sharded is self.module:
            for name in STEPS:
                delattr(self.module, name)
        for buffer in engine.buffers:
            shard = buffer.masters()
            whole = torch.empty(buffer.padded, dtype=shard.dtype, device=buffer.full.device)
            buffer.shard_comm.all_gather(whole, shard.to(whole.device), buffer.gather_tag).wait()
            for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True):
                parameter.data = whole[slot.offset : slot.stop].view(slot.shape).to("cpu", self._dtypes[slot.name], copy=True)
        self.module.cpu()
