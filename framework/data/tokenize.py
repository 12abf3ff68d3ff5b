"""Many rows to tokens, in this process or in several, in the order of the rows.

Rows travel in groups, which the tokenizer encodes in one call. With more than one worker, at most a few groups per worker are under
way, so that memory does not grow with the data. Workers are started fresh ("spawn"): a forked copy of a process that already runs
torch's and the tokenizer's threads may hang.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from framework.config.errors import Problem, UserError
from framework.config.schema import TrainOn
from framework.data.conversations import Yields
from framework.data.plain import CHARACTERS_AT_ONCE, CompletionEncoder, IdsEncoder, TextEncoder
from framework.data.sources import Item
from framework.data.template import ChatEncoder, Encoded
from framework.data.turns import Passage

ROWS_PER_GROUP = 64
GROUPS_AHEAD_PER_WORKER = 4

Encoder = ChatEncoder | CompletionEncoder | TextEncoder | IdsEncoder
Group = list[tuple[str, Item]]


def encode_rows(
    rows: Iterable[tuple[str, Item]], tokenizer: Any, *, yields: Yields, train_on: TrainOn, num_workers: int
) -> Iterator[tuple[str, Encoded | UserError]]:
    """(place of the row, tokens or what is wrong) for each (place, what the row says), in order; `yields`: what all of them are.

    A document comes in one or several parts: `Encoded.more`.
    """
    encoder = _encoder_for(tokenizer, yields, train_on)  # here first: a tokenizer that won't do is refused at once
    groups = _groups(encoder.pieces(rows) if isinstance(encoder, TextEncoder) else rows)
    if num_workers <= 1:
        for group in groups:
            yield from zip((where for where, _ in group), encoder.encode(group), strict=True)
        return
    try:
        yield from _encoded_by_workers(groups, num_workers, (tokenizer, yields, train_on))
    except BrokenProcessPool as error:
        got = f"{num_workers}, of which one was killed, perhaps because the machine ran out of memory"
        fix = f"data.num_workers={max(1, num_workers // 2)}"
        raise UserError(Problem(path="data.num_workers", got=got, expected="as many processes as fit in memory", fix=fix)) from error


def _encoded_by_workers(groups: Iterator[Group], num_workers: int, encoder: tuple) -> Iterator[tuple[str, Encoded | UserError]]:
    """`encoder`: what `_encoder_for` takes."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=spawn, initializer=_start_worker, initargs=encoder) as pool:
        pending: deque = deque()
        for group in groups:
            pending.append((group, pool.submit(_encode_group, group)))
            if len(pending) > GROUPS_AHEAD_PER_WORKER * num_workers:
                yield from _finished(*pending.popleft())
        while pending:
            yield from _finished(*pending.popleft())


def _groups(rows: Iterable[tuple[str, Item]]) -> Iterator[Group]:
    """Of at most ROWS_PER_GROUP rows, and at most CHARACTERS_AT_ONCE of text where a piece is not longer itself."""
    group: Group = []
    characters = 0
    for where, item in rows:
        length = len(item.text) if isinstance(item, Passage) else 0
        if group and (len(group) == ROWS_PER_GROUP or characters + length > CHARACTERS_AT_ONCE):
            yield group
            group, characters = [], 0
        group.append((where, item))
        characters += length
    if group:
        yield group


def _finished(group: Group, future) -> Iterator[tuple[str, Encoded | UserError]]:
    return zip((where for where, _ in group), future.result(), strict=True)


def _encoder_for(tokenizer: Any, yields: Yields, train_on: TrainOn) -> Encoder:
    if yields == "conversations":
        return ChatEncoder(tokenizer, train_on)
    return {"completions": CompletionEncoder, "documents": TextEncoder, "ids": IdsEncoder}[yields](tokenizer)


def _start_worker(tokenizer: Any, yields: Yields, train_on: TrainOn) -> None:
    global _encoder  # one per worker process: sending the tokenizer with every group would cost more than the encoding
    _encoder = _encoder_for(tokenizer, yields, train_on)


def _encode_group(group: Group) -> list[Encoded | UserError]:
    return _encoder.encode(group)
