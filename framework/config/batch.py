"""Batch arithmetic: micro-batch size x accumulated micro-batches x data-parallel ranks = global batch size.

A recipe sets two of the three numbers (or one: `accumulate` is then 1) and the ranks are known, so the missing one is computed. What
cannot be solved is reported with the arithmetic written out and the nearest values that can.
"""

from __future__ import annotations

from dataclasses import dataclass

from framework.config.errors import Problem, UserError
from framework.config.schema import TrainerConfig

MANY = 6
"""At most so many legal values are listed."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The solved batch: `micro_batch_size * accumulate * world_size == global_batch_size`."""

    micro_batch_size: int
    """Samples per rank in one forward."""
    accumulate: int
    """Micro-batches per rank and optimizer step."""
    global_batch_size: int
    """Samples per optimizer step over all ranks."""
    world_size: int
    """Data-parallel ranks."""

    def __str__(self) -> str:
        return self.counted("samples")

    def counted(self, unit: str) -> str:
        """The product in words; `unit`: what a batch is made of."""
        product = f"{self.micro_batch_size} micro x {self.accumulate} accumulated x {self.world_size} {_ranks(self.world_size)}"
        return f"{product} = {self.global_batch_size} {unit} per step"


def solve_batch(trainer: TrainerConfig, world_size: int) -> BatchPlan:
    """The batch of `trainer` on `world_size` data-parallel ranks. Raises UserError where there is none."""
    micro, accumulate, total = trainer.micro_batch_size, trainer.accumulate, trainer.global_batch_size
    _refuse_below_one(micro_batch_size=micro, accumulate=accumulate, global_batch_size=total)
    if micro is None and total is None:
        raise UserError(
            Problem(
                path="trainer.micro_batch_size",
                got="neither trainer.micro_batch_size nor trainer.global_batch_size",
                expected="at least one of them; the rest of micro x accumulate x ranks = global is computed",
                fix=f"trainer.global_batch_size={8 * world_size}",
            )
        )
    if total is None:
        accumulate = accumulate or 1
        total = micro * accumulate * world_size
    elif micro is None:
        accumulate = accumulate or 1
        micro = _divided(total, accumulate, "accumulate", world_size)
    elif accumulate is None:
        accumulate = _divided(total, micro, "micro_batch_size", world_size)
    elif micro * accumulate * world_size != total:
        raise UserError(_contradiction(micro, accumulate, total, world_size))
    return BatchPlan(micro_batch_size=micro, accumulate=accumulate, global_batch_size=total, world_size=world_size)


def _divided(total: int, given: int, name: str, world_size: int) -> int:
    """total / (given x world_size), which must be whole."""
    per_unit = given * world_size
    if total % per_unit == 0:
        return total // per_unit
    missing = "accumulate" if name == "micro_batch_size" else "micro_batch_size"
    nearest = nearest_multiples(total, per_unit)
    expected = f"trainer.global_batch_size a multiple of {per_unit}: {' or '.join(map(str, nearest))}"
    if total % world_size == 0:
        expected += f"; or trainer.{name} one of {_listed(divisors(total // world_size), given)}"
    raise UserError(
        Problem(
            path="trainer.global_batch_size",
            got=f"{total} / ({given} {name} x {world_size} {_ranks(world_size)}) = {total / per_unit:.4g} {missing}, not a whole number",
            expected=expected,
            fix=f"trainer.global_batch_size={nearest[0]}",
        )
    )


def _contradiction(micro: int, accumulate: int, total: int, world_size: int) -> Problem:
    product = micro * accumulate * world_size
    return Problem(
        path="trainer.global_batch_size",
        got=f"{total}, but {micro} micro x {accumulate} accumulated x {world_size} {_ranks(world_size)} = {product}",
        expected="two of the three set, the third null (it is computed), or numbers that agree",
        fix=f"trainer.global_batch_size={product}  (or trainer.accumulate=null)",
    )


def nearest_multiples(number: int, unit: int) -> list[int]:
    """The multiples of `unit` around `number`, nearest first; never 0."""
    below = number // unit * unit
    around = [value for value in (below, below + unit) if value > 0]
    return sorted(around, key=lambda value: abs(value - number))


def divisors(number: int) -> list[int]:
    """All whole divisors of `number`, ascending."""
    return [value for value in range(1, number + 1) if number % value == 0]


def _refuse_below_one(**values: int | None) -> None:
    low = [
        Problem(path=f"trainer.{name}", got=str(value), expected="1 or more, or null to have it computed", fix=f"trainer.{name}=null")
        for name, value in values.items()
        if value is not None and value < 1
    ]
    if low:
        raise UserError(*low)


def _listed(values: list[int], near: int) -> str:
    shown = sorted(sorted(values, key=lambda value: abs(value - near))[:MANY])
    return ", ".join(map(str, shown))


def _ranks(world_size: int) -> str:
    return "rank" if world_size == 1 else "ranks"
