"""Gathering ahead: replay of the order in which units were used last time, under a budget of bytes.

The order is recorded in every pass (one forward with its backward, or one forward without gradients) and followed in the next one as
long as it holds. A deviation only stops prefetching for the rest of the pass; nothing has to be declared and nothing can go
stale: what was gathered in vain is released at the end of the pass.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from framework.zero.unit import Unit


class Prefetch:
    """The soft trace of one engine. Blocks gathered ahead of their use hold at most `budget_bytes`, or are one."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._last: dict[bool, list[Unit]] = {True: [], False: []}
        """Order of the last finished pass, with and without gradients."""
        self._grad = True
        self._forget()

    def begin(self) -> None:
        """A new pass: its first unit is about to be used."""
        self._forget()
        self._grad = torch.is_grad_enabled()

    def _forget(self) -> None:
        self._now: list[Unit] = []
        self._follows = True
        self._ahead: dict[Unit, int] = {}
        """What was gathered ahead and not used yet, with its bytes; `_next` is the first use that was not looked at."""
        self._ahead_bytes = self._next = 0

    def end(self, *, finished: bool = True) -> None:
        """The pass is over; where it was `finished`, the next one of its kind follows its order."""
        if self._now and finished:
            self._last[self._grad] = self._now
        self._forget()

    def use(self, unit: Unit, *, recompute: bool = False) -> None:
        """Make `unit`'s parameters usable now, and begin to gather those that will be needed next."""
        unit.gather()
        if not recompute:
            expected, position = self._last[self._grad], len(self._now)
            self._now.append(unit)
            self._follows = self._follows and position < len(expected) and expected[position] is unit
            self._ahead_bytes -= self._ahead.pop(unit, 0)
            self.ahead()
        unit.wait()

    def ahead(self) -> None:
        """Gather what comes next, as far as the budget allows. Called again whenever a unit was released."""
        if not (self._follows and self._now and self.budget_bytes):
            return
        expected, current = self._last[self._grad], self._now[-1]
        self._next = max(self._next, len(self._now))
        while self._next < len(expected):
            unit = expected[self._next]
            if unit.is_updating:  # whether it still is depends on time, and every rank must gather in the same order
                return
            if unit in self._ahead or (unit is current and unit.name and not self.follows_itself(unit)):
                return  # it will be released between that use and this one
            if unit.needs_gather:
                if self._ahead and self._ahead_bytes + unit.gather_bytes > self.budget_bytes:
                    return
                unit.gather()
            if unit is not current and unit.name and (held := unit.held_bytes):
                self._ahead[unit] = held
                self._ahead_bytes += held
            self._next += 1

    def follows_itself(self, unit: Unit) -> bool:
        """Whether `unit` is the next block to be used again, so that releasing it would be in vain (the last block of a forward)."""
        following = islice(self._last[self._grad], len(self._now), None)
        return self._follows and next((u for u in following if u.name), None) is unit
