"""What is wrong with the shard groups and policies of `zero`: combinations that mean nothing, groups that do not divide the ranks. The
engine asks, too. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from framework.config.batch import divisors
from framework.config.errors import Problem
from framework.config.schema import PrecisionConfig, ZeroConfig


def zero_problems(zero: ZeroConfig, world_size: int | None) -> list[Problem]:
    """`world_size`: None where it is not known."""
    return [*_groups(zero, world_size), *_kept(zero), *_modules(zero)]


def _groups(zero: ZeroConfig, world_size: int | None) -> Iterator[Problem]:
    shards, secondary = zero.shard_size, zero.secondary_shard_size
    if shards is not None and secondary is not None:
        got = f"{secondary} beside zero.shard_size={shards}"
        expected = "one of them: secondary shards belong to stage 3 over all ranks"
        yield Problem(path="zero.secondary_shard_size", got=got, expected=expected, fix="zero.shard_size=null")
        return
    if shards is not None:
        yield from _size("zero.shard_size", shards, world_size, "zero=0")
        if not any(zero.stage if rule.stage is None else rule.stage for rule in [zero, *zero.modules]):
            got = f"{shards} with zero={zero.stage}, which shards nothing"
            yield Problem(path="zero.shard_size", got=got, expected="null, or zero=1, 2 or 3", fix="zero.shard_size=null")
    elif zero.shard_optimizer == "world":
        got, expected = "world with zero.shard_size=null, where all ranks are one group", "group, or groups"
        yield Problem(path="zero.shard_optimizer", got=got, expected=expected, fix="zero.shard_optimizer=group")
    if secondary is not None:
        yield from _size("zero.secondary_shard_size", secondary, world_size, "zero.reshard_after_forward=false")
        if zero.stage != 3:
            got = f"{secondary} with zero={zero.stage}, where every rank has all parameters"
            yield Problem(path="zero.secondary_shard_size", got=got, expected="null, or zero=3", fix="zero=3")
        elif not zero.reshard_after_forward:
            got = f"{secondary} with zero.reshard_after_forward=false, which keeps whole blocks until their backward"
            fix = "zero.reshard_after_forward=true"
            yield Problem(path="zero.secondary_shard_size", got=got, expected="one of them", fix=fix)


def _size(path: str, size: int, world_size: int | None, for_one: str) -> Iterator[Problem]:
    """`for_one`: what a user may write who wants no sharding inside a group."""
    if size < 2:
        yield Problem(path=path, got=f"{size}, a group in which nothing is sharded", expected="2 or more, or null", fix=for_one)
    elif world_size is not None and world_size % size:
        sizes = [number for number in divisors(world_size) if number > 1]
        expected = f"a divisor of the {world_size} ranks: {', '.join(map(str, sizes))}" if sizes else "null: there is one rank"
        near = min(sizes, key=lambda number: abs(number - size), default="null")
        yield Problem(path=path, got=str(size), expected=expected, fix=f"{path}={near}")


def _kept(zero: ZeroConfig) -> Iterator[Problem]:
    kept = zero.keep_gathered_bytes
    if kept < 0:
        yield Problem(path="zero.keep_gathered_bytes", got=str(kept), expected="at least 0", fix="zero.keep_gathered_bytes=0")
    elif kept and zero.stage != 3 and all(rule.stage != 3 for rule in zero.modules):
        got = f"{kept} with zero={zero.stage}, where nothing is ever released"
        yield Problem(path="zero.keep_gathered_bytes", got=got, expected="0, or zero=3", fix="zero.keep_gathered_bytes=0")


def _modules(zero: ZeroConfig) -> Iterator[Problem]:
    for index, rule in enumerate(zero.modules):
        where, stage = f"zero.modules[{index}]", zero.stage if rule.stage is None else rule.stage
        try:
            re.compile(rule.pattern)
            why_not = "" if rule.pattern else "means nothing"
        except re.error as error:
            why_not = str(error)
        if why_not:
            got, fix = f"{rule.pattern!r} ({why_not})", "zero.modules=[{pattern: embed_tokens, stage: 2}]"
            yield Problem(path=f"{where}.pattern", got=got, expected="a name or a regular expression", fix=fix)
        if rule.stage is None and rule.reshard_after_forward is None:
            yield Problem(path=where, got=f"{rule.pattern} without a setting", expected="a stage or reshard_after_forward of its own")
        if rule.reshard_after_forward is not None and stage != 3:
            got = f"{str(rule.reshard_after_forward).lower()} at stage {stage}, where nothing is released after forward"
            yield Problem(path=f"{where}.reshard_after_forward", got=got, expected="null, or stage: 3")


def compression_problems(zero: ZeroConfig, precision: PrecisionConfig) -> Iterator[Problem]:
    """What is sent in fewer bits where nothing of the kind is sent, or has to be exact."""
    for name, least_stage in (("gather_compression", 3), ("reduce_compression", 1)):
        value, where = getattr(zero, name), f"zero.{name}"
        if value == "none":
            continue
        if zero.stage < least_stage:
            expected = f"none, or zero={least_stage}" + ("" if least_stage == 3 else " or higher")
            yield Problem(path=where, got=f"{value} with zero={zero.stage}", expected=expected, fix=f"zero={least_stage}")
        if precision.compute_dtype == "float64":
            got = f"{value} with float64, whose point is to be exact"
            yield Problem(path=where, got=got, expected="none, or another precision", fix=f"{where}=none")
    if zero.gather_compression != "none":
        if zero.secondary_shard_size or (zero.shard_size and zero.shard_optimizer == "world"):
            nested = "zero.secondary_shard_size" if zero.secondary_shard_size else "zero.shard_optimizer=world"
            got = f"{zero.gather_compression} with {nested}"
            yield Problem(path="zero.gather_compression", got=got, expected="one of them", fix="zero.gather_compression=none")
        if precision.master_weights != "full":
            got = f"{zero.gather_compression} with precision.master_weights={precision.master_weights}, which is a part of the parameters"
            yield Problem(path="zero.gather_compression", got=got, expected="one of them", fix="precision.master_weights=full")
    if zero.error_feedback and zero.reduce_compression != "int8":
        got = f"true with zero.reduce_compression={zero.reduce_compression}"
        yield Problem(path="zero.error_feedback", got=got, expected="false, or int8", fix="zero.reduce_compression=int8")
