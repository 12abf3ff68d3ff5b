"""ZeroEngine: trains any module with its model state sharded over data-parallel ranks (ZeRO stages 0 to 3).

    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    loss_sum = engine.module(**micro_batch)        # hooks gather and release parameters, block by block
    engine.backward(loss_sum, tokens)              # gradients are reduced while backward runs
    stats = engine.step()                          # one small all-reduce, clip, update this rank's shard

A loss is a SUM and comes with its share of the denominator (`tokens`): ranks and micro-batches contribute sums, `step` divides once by
the global number. So batch split, accumulation and world size do not change the result.

[Note: canonical reduce order] Gradients are reduced in reverse registration order of the units, on every rank, whatever its control flow:
a unit that a rank did not use contributes zeros at its turn. What must be the same on all ranks is the order in which *units* run
forward; rank-dependent branches belong inside a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from framework import torch_private
from framework.config.schema import OffloadConfig, PrecisionConfig, ZeroConfig
from framework.zero import by_hand, load, norm, refuse, state, wire
from framework.zero.autocast import Autocast
from framework.zero.buffer import FlatBuffer
from framework.zero.fp32_modules import lay_out
from framework.zero.grad_pool import GradPool
from framework.zero.grid import grid_of, keep_gathered
from framework.zero.groups import Groups
from framework.zero.layout import Slot, UnitLayout
from framework.zero.load import Read
from framework.zero.memory import MemoryMeter
from framework.zero.norm import NonFiniteError, StepStats
from framework.zero.offload import HostMemory
from framework.zero.optimizer import ShardedOptimizer
from framework.zero.policy import FULL, check_settings, group_size, offloaded, policy_of
from framework.zero.prefetch import Prefetch
from framework.zero.scaler import LossScaler
from framework.zero.unit import Unit


class ZeroEngine:
    """See the module's docstring.

    Args:
        module: real (rank 0's values are taken) or on the meta device (then filled by `read`, or by seeded `reset_parameters`).
            Its parameters stay the same objects unless they were on the meta device.
        zero: what is sharded over which ranks, and prefetching.
        precision: data type of parameters in forward and backward, and how masters are kept; gradient sums are fp32 (fp64 for float64),
            and for float16 the loss is scaled.
        offload: which model state lies in host memory or on a disk.
        optimizer: a new torch optimizer over parameters of `module`, element-wise or Muon or Adafactor; it is moved onto the shards.
            None: evaluation only.
        grad_clip: largest global gradient norm; None: no clipping.
        group: data-parallel ranks; None: the default group where torch.distributed is initialised, else this process alone.
        device: where shards live; None: the current CUDA device for a CUDA backend, else the CPU. meta: a step can be traced, with no data.
        read: source of weights for a meta module: `read(name, start, stop)` gives elements of the flattened parameter.
        seed: of the random initialisation of a meta module.
        show_progress: show the loading of weights (on one rank).

    Raises:
        ValueError, TypeError: for an optimizer or module that cannot be sharded, saying why.
        UserError: for a disk that cannot be used or has no room for what is offloaded to it.
    """

    def __init__(
        self,
        module: nn.Module,
        zero: ZeroConfig | None = None,
        precision: PrecisionConfig | None = None,
        offload: OffloadConfig | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        grad_clip: float | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        read: Read | None = None,
        seed: int = 0,
        show_progress: bool = False,
    ) -> None:
        torch_private.self_test()
        self.module, self.zero = module, zero or ZeroConfig()
        self.policy = policy_of(self.zero)
        self.grad_clip = grad_clip
        self._precision = precision = precision or PrecisionConfig()
        check_settings(precision, offload or OffloadConfig(), grad_clip)
        self.compute_dtype = getattr(torch, precision.compute_dtype)
        self.master_dtype = torch.float64 if self.compute_dtype is torch.float64 else torch.float32
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.device = torch.device(device) if device is not None else _default_device(group)
        wire.check(self.zero, self.master_dtype, precision.master_weights)
        self._groups = Groups(group, self.device)
        self.world = self._groups.world
        self._group_size = group_size(self.zero, self.world.size)
        self._autocast = Autocast(precision, self.device)
        self.scaler = LossScaler(precision, self.device) if precision.scales_loss else None

        self.memory, self.host_memory, self.disk = MemoryMeter(), MemoryMeter(), MemoryMeter()
        """Bytes of model state on the device, and what is offloaded."""
        self._host = HostMemory(offload or OffloadConfig(), self.device, self.host_memory, self.disk)
        if self._host.config.params != "none" and self.policy.params_at_rest is FULL:
            raise ValueError(f"offloaded parameters need ZeRO stage 3, where ranks hold shards of them; got stage {self.zero.stage}")
        self.pool = GradPool(self.memory)
        self.prefetch = Prefetch(self.zero.prefetch_bytes)
        self.stop_requested = False
        """Set it on any rank (from a signal handler, say): `StepStats.stop` is positive on all ranks after the same step."""
        self.busy: Callable[[], bool] = lambda: False
        """Asked in every step: whether this rank still has work in the background; `StepStats.busy` tells all ranks how many have."""
        self.reading: torch.cuda.Event | None = None
        """Somebody copies masters and optimizer state until this event; the next update waits for it on the device."""
        self.steps_done = 0
        """Steps that were called, those that were skipped for an overflow included; optimizer state counts updates."""
        self.skipped_steps = 0
        """For an overflow under the loss scale (on CUDA that of the last step shows with the next)."""
        self._task: int | None = None
        self._depth = 0
        self._release_on_leaving = False
        self._verdict: norm.Verdict | None = None
        self._counted_states = 0
        self.updating = False
        """Whether a step has begun to change parameters and not come to its end."""
        self.by_hand: by_hand.ManualStep | None = None
        """The `manual()` that is entered."""
        self.names_only = False
        """Set while `module.state_dict(keep_vars=True)` is asked for which tensors there are, and not for what parameters hold."""
        self._new_step()

        originals = dict(module.named_parameters(remove_duplicate=False))
        refuse.unfit_parameters(originals)
        planned, self.boundaries = lay_out(module, precision.fp32_modules, self.compute_dtype, self.zero)
        self.layouts = keep_gathered(planned, self.zero, self.world.size, self.compute_dtype.itemsize)
        trained = [layout for unit in self.layouts for layout in unit.layouts if layout.requires_grad]
        on_host = offloaded(self._host.config, [layout.numel for layout in trained])
        self._on_host = {layout for layout, lies in zip(trained, on_host, strict=True) if lies}
        self.buffers: list[FlatBuffer] = []
        self.units = [self._build_unit(layout, originals, read, seed) for layout in self.layouts]
        if read is not None:
            load.fill_from_reader(self.buffers, read, show=show_progress and self.world.rank == 0)
        load.place_module_buffers(module, self.device, self.world)
        for unit in self.units:
            unit.wait()
            unit.release()
        self.trained = [buffer for buffer in self.buffers if buffer.layout.requires_grad]
        self._reduce_order = list(reversed(self.units))
        self._offsets: dict[int, int] = {}
        for buffer in self.trained:
            self._offsets[id(buffer)] = sum(len(b.layout.slots) for b in self.trained[: len(self._offsets)])
        now = dict(module.named_parameters(remove_duplicate=False))
        replaced = {id(old): now[name] for name, old in originals.items()}
        self.sharded_optimizer = ShardedOptimizer(optimizer, self.trained, replaced, self._host) if optimizer is not None else None
        self._originals = originals  # keeps the ids above from being reused
        self._enter_root_through_forward()

    @property
    def bytes_sent(self) -> int:
        """By this rank, over all its process groups."""
        return self._groups.traffic.bytes_sent

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer, over this rank's shards; set `param_groups[i]["lr"]` before `step`."""
        if self.sharded_optimizer is None:
            raise RuntimeError("this engine was made without an optimizer")
        return self.sharded_optimizer.torch

    # -- the step -------------------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, tokens: int | torch.Tensor = 1, *, last: bool = True) -> None:
        """Backward of one micro-batch. `loss` is a sum, `tokens` its share of the denominator.

        `last=False` while more micro-batches of the step follow lets stages 0 and 1 reduce once per step; the result is the same.
        """
        if not loss.requires_grad:
            raise ValueError("the loss depends on no trained parameter (it has no graph): every rank must run backward through the model")
        refuse.moved_or_thawed(self)
        self._last = last
        self.count(loss, tokens)
        try:
            with self._autocast.off():
                loss.backward(None if self.scaler is None else self.scaler.scale.to(loss.dtype))
        except BaseException:
            self.reset()
            raise

    def count(self, loss: torch.Tensor, tokens: int | torch.Tensor) -> None:
        """Add a micro-batch's loss and denominator to those of the step: for whoever runs backward without `engine.backward`."""
        self.loss_sum += loss.detach().double()
        self._tokens += tokens

    def step(self) -> StepStats:
        """Finish the reduction, clip, update, and forget the gradients. Collective.

        Raises NonFiniteError naming step, rank and parameter where the loss or a gradient is not finite, before anything has changed
        (on CUDA with a fused optimizer the update is skipped on the device; the error comes with the next step or when state is asked for).
        Under a loss scale (`scaler.py`) that is an overflow first: nothing is updated, and the next step has a smaller scale.
        """
        self.check_last_step()
        refuse.assigned_gradients(self)
        if self.sharded_optimizer is not None:
            self.sharded_optimizer.check_options()
        self._reduce_leftovers()
        self.pool.give_back()
        sums = norm.sum_over_ranks(self.trained, self.world, self.loss_sum, self._tokens, self.stop_requested, self.busy(), self.device)
        sound = (sums.tokens > 0) & sums.same_order
        finite = torch.isfinite(sums.square_sum + sums.loss_sum) & sound
        scale = None if self.scaler is None else self.scaler.scale
        fatal = ~finite if self.scaler is None else ~finite & (self.scaler.exhausted | ~sound)
        grad_norm = sums.square_sum.sqrt() / sums.tokens
        factor = 1.0 / sums.tokens
        if scale is not None:
            grad_norm, factor = grad_norm / scale, factor / scale
        if self.grad_clip is not None:
            factor = factor * (self.grad_clip / (grad_norm + 1e-6)).clamp(max=1.0)
        in_kernel = self.device.type == "cuda" and self.sharded_optimizer is not None and self.sharded_optimizer.scales_in_kernel
        looks = not in_kernel and self.device.type != "meta"  # tensors without values are traced as if all went well
        if looks and bool(fatal):
            refuse.not_finite(self, sums)
        if self.scaler is not None:
            self.scaler.update(finite)
        if not looks or bool(finite):
            self._update(factor, finite, sums)
        else:
            self.skipped_steps += 1
        for buffer in self.trained:
            buffer.end_step()
        if self.zero.error_feedback and (scale is not None or in_kernel):
            kept = (torch.ones_like(factor) if scale is None else self.scaler.scale / scale).masked_fill(~finite, 0)
            for buffer in self.trained:
                buffer.scale_residuals(kept)
        self._verdict = norm.Verdict(finite, fatal) if in_kernel else None
        self.steps_done += 1
        self._new_step()
        self.updating = False
        return StepStats(sums.loss_sum / sums.tokens, grad_norm, sums.tokens, sums.stop, sums.busy, ~finite, scale)

    def _update(self, factor: torch.Tensor, finite: torch.Tensor, sums: norm.GlobalSums) -> None:
        """The optimizer's step, where it is `finite`, on gradients times `factor`."""
        self.wait_for_readers()
        self.updating = True
        if self.sharded_optimizer is not None:
            self.sharded_optimizer.step(factor, finite, self._used_by_any(sums.used), self._offsets)
            if len(self.sharded_optimizer.torch.state) != self._counted_states:
                self.count_optimizer_state()
        optimizer = self.sharded_optimizer
        for buffer in self.trained:
            written = optimizer is not None and (optimizer.writes_shards if buffer.blocks is None else optimizer.writes_blocks)
            buffer.publish(written=written and buffer.is_written_with_master)

    def wait_for_readers(self) -> None:
        """Before masters change: let the device wait for who copies them."""
        if self.reading is not None:
            torch.cuda.current_stream(self.device).wait_event(self.reading)
            self.reading = None

    def count_optimizer_state(self) -> None:
        self._counted_states = len(self.sharded_optimizer.torch.state)
        for meter, on_host in ((self.memory, False), (self.host_memory, True)):
            meter.set("optimizer", self.sharded_optimizer.state_nbytes(on_host=on_host))

    def _used_by_any(self, used: torch.Tensor) -> list[bool]:
        """Which parameters any rank used. Where this rank used all, nothing needs to be read from the device."""
        mine = [index in buffer.used for buffer in self.trained for index in range(len(buffer.layout.slots))]
        return mine if all(mine) else [count > 0 for count in used.tolist()]

    def check_last_step(self) -> None:
        """Raise NonFiniteError for a bad step that was not reported yet, and wait for what the host still does for the last one; `step`,
        `full_tensors` and `state_dict` begin with it."""
        refuse.torn_update(self)
        self.flush()
        finite, fatal = (True, False) if self._verdict is None else self._verdict.read()
        if fatal:
            why = f"the loss or a gradient was not finite, or no micro-batch had a trained token, or {norm.NOT_THE_SAME_ORDER}"
            raise NonFiniteError(f"step {self.steps_done}: {why}; that step's update was skipped")
        if not finite:
            self.sharded_optimizer.take_back_count()
            self.skipped_steps += 1
        self._verdict = None

    def _new_step(self) -> None:
        self._last = True
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._tokens = torch.zeros((), dtype=torch.float64, device=self.device)

    # -- backward, as the units report it -------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Called by every hook of a backward; the first call counts the gradients that are to come."""
        task = torch_private.backward_id()
        if task == self._task:
            return
        if self._task is not None:
            raise RuntimeError(
                "a backward began inside another one: activation checkpointing must be non-reentrant (use_reentrant=False); "
                "if a backward failed before, call engine.reset()"
            )
        self._task = task
        self._turn = 0
        for unit in self.units:
            unit.expect()
        torch_private.on_backward_end(self._end_backward)

    def reduce_complete_units(self) -> None:
        """Begin the reductions whose turn it is and whose gradients are complete."""
        while self.by_hand is None and self._turn < len(self._reduce_order) and not self._reduce_order[self._turn].pending:
            self._reduce(self._reduce_order[self._turn])
            self._turn += 1

    def _reduce(self, unit: Unit) -> None:
        for buffer in unit.trained:
            buffer.reduce(last=self._last)

    def _end_backward(self) -> None:
        for unit in self._reduce_order[self._turn :] if self.by_hand is None else ():
            self._reduce(unit)
        self.pool.finish()
        self._task = None
        self.prefetch.end()
        for unit in self.units:
            unit.end_pass()
            if unit.name or not self._depth:
                unit.release()
        self._release_on_leaving = self._depth > 0  # backward was called inside a wrapped method, which may go on using the root

    def _reduce_leftovers(self) -> None:
        """Gradients of micro-batches that were all said not to be the last one."""
        if self._last:
            return
        for unit in self._reduce_order:
            for buffer in unit.trained:
                buffer.reduce_leftovers()
        self.pool.finish()
        self._last = True

    def reduce_all(self) -> None:
        """Sum what a manual step has collected."""
        self._last = True
        for unit in self._reduce_order:
            self._reduce(unit)
        self.pool.finish()

    # -- entering the model ---------------------------------------------------------------------------------------------------

    def wrap_method(self, module: nn.Module, name: str) -> None:
        """Make `module.name(...)` an entry like `engine.module(...)`: parameters of the root are gathered around it. A generator is entered
        until it ends. Raises TypeError for an asynchronous method."""
        by_hand.wrap_method(self, module, name)

    def gathered(self, chosen: by_hand.Chosen | None = None, *, modify: bool = False) -> AbstractContextManager[nn.Module]:
        """Parameters are whole on every rank inside, until the next `step`, in the compute dtype (the masters: `full_tensors`). Collective.

        `chosen`: some parameters or modules, the same on all ranks, which come with the rest of their blocks; None: all. `modify`: rank 0's
        changes are taken over by every rank and by the masters; an exception inside undoes them. Optimizer state stays. Raises RuntimeError
        at the end where parameters were changed without `modify`.
        """
        return by_hand.gathered(self, chosen, modify)

    def manual(self) -> AbstractContextManager[by_hand.ManualStep]:
        """Micro-batches of one step in an order of one's own, with or without `backward` of this engine; then call `step`. Collective.

        Losses that `backward` does not see are told with `count`; gradients are sums over tokens, and in float16 times `scaler.scale`.
        Costs the memory of whole gradients, and at stage 3 of whole parameters, until the end. See `by_hand.py`.
        """
        return by_hand.manual(self)

    def full_tensors(self, *, trained_only: bool = False) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield (name, whole parameter on rank 0, None elsewhere). Collective. See `state.full_tensors`."""
        return state.full_tensors(self, trained_only=trained_only)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and optimizer state as whole tensors on rank 0. Collective. See `state.state_dict`."""
        return state.state_dict(self)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take what `state_dict` gave; every rank gets the same. See `state.load_state_dict`."""
        state.load_state_dict(self, saved)
        self.updating, self._verdict = False, None  # of a step that is forgotten

    def flush(self) -> None:
        """Wait for the updates that run on the host: masters, optimizer state and shards are those after the last step."""
        for buffer in self.trained:
            buffer.finish_update()

    def reset(self) -> None:
        """After an exception in forward, backward or step, on every rank: forget this step. Parameters and optimizer state stay.

        Training can go on where all ranks failed at the same point; else the next communication raises RuntimeError, and so does the next
        step after an exception in the middle of an update.
        """
        self.flush()
        finite, fatal = (True, False) if self._verdict is None else self._verdict.read()
        if not finite:
            self.sharded_optimizer.take_back_count()
            self.steps_done -= fatal
            self.skipped_steps += not fatal
        self._autocast.leave_all()
        self._task, self._depth, self._verdict, self._release_on_leaving = None, 0, None, False
        for buffer in self.buffers:
            buffer.reset()
        self.pool.drop()
        self.prefetch.end(finished=False)
        for unit in self.units:
            unit.end_pass()
        for kind in ("gathered", "gathering", "reducing", "secondary"):
            self.memory.set(kind, 0)  # an exception may have come between an allocation and its being counted
        self._new_step()

    def enter(self, args: tuple, kwargs: dict) -> None:
        if torch_private.backward_id() < 0:
            if not self._depth:
                self.prefetch.begin()
            self._depth += 1
        self.units[0].enter(args, kwargs)
        self._autocast.enter()

    def leave(self, out: Any) -> Any:
        self._autocast.leave()
        if torch_private.backward_id() >= 0:
            return None
        self._depth = max(self._depth - 1, 0)  # it is 0 already where a backward inside failed and has called `reset`
        if not self._depth and (self._release_on_leaving or not torch.is_grad_enabled()):
            self._release_on_leaving = False
            self.prefetch.end()
            for unit in self.units:
                unit.release()
        return self.units[0].watch_outputs(out)

    def _enter_root_through_forward(self) -> None:
        only_mine = self.units[0].only_mine
        self.module.register_forward_pre_hook(only_mine(self.enter), with_kwargs=True, prepend=True)
        self.module.register_forward_hook(only_mine(lambda args, out: self.leave(out)), always_call=True)

    # -- construction ---------------------------------------------------------------------------------------------------------

    def _build_unit(self, planned: UnitLayout, originals: dict[str, nn.Parameter], read: Read | None, seed: int) -> Unit:
        """Allocate a unit's buffers, make its parameters views of them, and fill them unless a reader will."""
        buffers = []
        for layout in planned.layouts:
            policy = layout.policy or self.policy
            buffer = FlatBuffer(
                layout,
                policy,
                self.zero,
                grid_of(policy, self.world.size, self._group_size, self.world.rank),
                self._groups,
                compute_dtype=self.compute_dtype,
                master_dtype=self.master_dtype,
                device=self.device,
                meter=self.memory,
                pool=self.pool,
                tag=wire.TAGS * len(self.buffers),
                host=self._host,
                master_on_host=layout in self._on_host,
                master_weights=self._precision.master_weights,
            )
            old = [originals[slot.name] for slot in layout.slots]
            if any(p.is_meta for p in old) and self.device.type != "meta":
                buffer.bind([self._replace_meta(slot, p, buffer) for slot, p in zip(layout.slots, old, strict=True)])
            else:
                if self.device.type != "meta":
                    load.fill_from_module(buffer, old, self.world)
                buffer.bind(old)
            buffers.append(buffer)
            self.buffers.append(buffer)
        slots = [slot for layout in planned.layouts for slot in layout.slots]
        on_meta = [slot.name for slot in slots if originals[slot.name].is_meta]
        if on_meta and read is None and self.device.type != "meta":
            if real := [slot.name for slot in slots if slot.name not in on_meta]:
                raise ValueError(
                    f"{on_meta[0]} is on the meta device and {real[0]}, which is initialised with it, is not: build all of "
                    f"{planned.name or 'the model'} on the meta device or nothing of it, or give the engine a `read` function"
                )
            load.fill_by_reset(self.module, buffers, seed)
        for buffer in buffers:
            buffer.release()
        unit_module = self.module.get_submodule(planned.name)
        return Unit(self, planned.name, unit_module, buffers)

    def _replace_meta(self, slot: Slot, old: nn.Parameter, buffer: FlatBuffer) -> nn.Parameter:
        """A real parameter in the place of one on the meta device, under all its names."""
        new = nn.Parameter(buffer.view(slot), requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
        for name in (slot.name, *slot.aliases):
            parent, _, leaf = name.rpartition(".")
            setattr(self.module.get_submodule(parent), leaf, new)  # not `_parameters[leaf]`: nn.RNN keeps a list of its own
        return new


def _default_device(group: dist.ProcessGroup | None) -> torch.device:
    if torch.cuda.is_available() and (group is None or "nccl" in dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
