"""Gathering ahead: replay of the order in which units were used last time, under a budget of bytes.

The order is recorded in every pass (one forward with its backward, or one forward without gradients) and followed in the next one as
long as it holds. A deviation only stops prefetching for the rest of the pass; nothing has to be declared and nothing can go
stale: what was gathered in vain is released at the end of the pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from framework.zero.memory import MemoryMeter

if TYPE_CHECKING:
    from framework.zero.unit import Unit


class Prefetch:
    """The soft trace of one engine. Blocks other than the one in use hold at most `budget_bytes`, or one block."""

    def __init__(self, budget_bytes: int, meter: MemoryMeter) -> None:
        self.budget_bytes, self._meter = budget_bytes, meter
        self._last: dict[bool, list[Unit]] = {True: [], False: []}
        """Order of the last finished pass, with and without gradients."""
        self._now: list[Unit] = []
        self._follows = True
        self._grad = True

    def begin(self) -> None:
        """A new pass: its first unit is about to be used."""
        self._now, self._follows, self._grad = [], True, torch.is_grad_enabled()

    def end(self, *, finished: bool = True) -> None:
        """The pass is over; where it was `finished`, the next one of its kind follows its order."""
        if self._now and finished:
            self._last[self._grad] = self._now
        self._now, self._follows = [], True

    def use(self, unit: Unit, *, recompute: bool = False) -> None:
        """Make `unit`'s parameters usable now, and begin to gather those that will be needed next."""
        unit.gather()
        if not recompute:
            expected, position = self._last[self._grad], len(self._now)
            self._now.append(unit)
            self._follows = self._follows and position < len(expected) and expected[position] is unit
            self.ahead()
        unit.wait()

    def ahead(self) -> None:
        """Gather what comes next, as far as the budget allows. Called again whenever a unit was released."""
        if not (self._follows and self._now and self.budget_bytes):
            return
        root, current = self._last[self._grad][0], self._now[-1]
        held = self._meter.by_kind.get("gathered", 0) - root.held_bytes - (0 if current is root else current.held_bytes)
        for unit in self._last[self._grad][len(self._now) :]:
            if unit.is_updating:  # whether it still is depends on time, and every rank must gather in the same order
                return
            if not unit.needs_gather:
                if unit.permanent and unit.buffers:
                    return  # nothing is ever released: all that follows was gathered with it
                continue
            cost = unit.gather_bytes
            if cost and held and held + cost > self.budget_bytes:
                return
            unit.gather()
            held += cost

    def follows_itself(self, unit: Unit) -> bool:
        """Whether `unit` is the next block to be used again, so that releasing it would be in vain (the last block of a forward)."""
        following = self._last[self._grad][len(self._now) :]
        return self._follows and next((u for u in following if u.name), None) is unit
