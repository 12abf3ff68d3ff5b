"""Where the time of a step goes on one rank: by operator (torch's profiler) and by Python function (cProfile), in milliseconds per step; or
when what runs, as a timeline that a browser shows, where our engine's transfers lie in lanes of their own beside the operators.

A transfer is drawn from its issue until somebody takes its result. What of it was really waited for is the "wait" among the operators.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from framework.zero import ZeroEngine
from framework.zero.comm import Comm, Handle


def profile_steps(step: Callable[[], float], steps: int, rows: int) -> str:
    """Two tables over `steps` steps each. Time in a function or operator itself, without what it calls."""
    with profile(activities=[ProfilerActivity.CPU]) as operators:
        for _ in range(steps):
            step()
    lines = ["| operator | ms/step | calls/step |", "| --- | ---: | ---: |"]
    for event in sorted(operators.key_averages(), key=lambda e: -e.self_cpu_time_total)[:rows]:
        lines.append(f"| {event.key} | {event.self_cpu_time_total / 1e3 / steps:.2f} | {event.count / steps:.0f} |")

    functions = cProfile.Profile()
    functions.enable()
    for _ in range(steps):
        step()
    functions.disable()
    lines += ["", "| function | ms/step | calls/step |", "| --- | ---: | ---: |"]
    found = pstats.Stats(functions).stats.items()  # (file, line, name) -> (_, calls, own seconds, ...)
    for (file, line, name), (_, calls, own_s, *_) in sorted(found, key=lambda item: -item[1][2])[:rows]:
        where = name if file == "~" else f"{'/'.join(file.split('/')[-2:])}:{line} {name}"
        lines.append(f"| {where} | {1e3 * own_s / steps:.2f} | {calls / steps:.0f} |")
    return "\n".join(lines)


def timeline(step: Callable[[], float], steps: int, engine: ZeroEngine | None) -> dict[str, Any]:
    """`steps` steps in Chrome's trace format. `engine`: ours, if it makes them."""
    with _named_transfers(engine), profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            with record_function("step"):
                step()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(f"{folder}/trace.json").read_text())
    trace["traceEvents"] += _transfers(trace["traceEvents"])
    return trace


@contextmanager
def _named_transfers(engine: ZeroEngine | None) -> Iterator[None]:
    """Inside, the profiler sees "begin KIND UNIT" and "wait KIND UNIT" of gathers and reductions."""
    if engine is None:
        yield
        return
    gather, reduce, wait = Comm.all_gather, Comm.reduce_scatter, Handle.wait
    names: dict[Handle, str] = {}

    def begun(kind: str, method: Callable[..., Handle], comm: Comm, out: Any, shard: Any, tag: int, **options: Any) -> Handle:
        name = f"{kind} {engine.buffers[tag // 2].layout.unit or 'root'}"
        with record_function(f"begin {name}"):
            handle = method(comm, out, shard, tag, **options)
        names[handle] = name
        return handle

    def waited(handle: Handle) -> None:
        with record_function(f"wait {names.pop(handle, 'sums')}"):
            wait(handle)

    Comm.all_gather = lambda comm, *args: begun("gather", gather, comm, *args)
    Comm.reduce_scatter = lambda comm, *args, **options: begun("reduce", reduce, comm, *args, **options)
    Handle.wait = waited
    try:
        yield
    finally:
        Comm.all_gather, Comm.reduce_scatter, Handle.wait = gather, reduce, wait


def _transfers(events: list[dict]) -> list[dict]:
    """One span for each transfer, from the beginning of its "begin" to the end of its "wait"."""
    begun: dict[str, dict] = {}
    found = []
    for event in sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: e["ts"]):
        what, _, name = event["name"].partition(" ")
        if what == "begin":
            begun[name] = event
        elif what == "wait" and name in begun:
            first = begun.pop(name)
            lane = {"name": name, "cat": "transfer", "id": len(found), "pid": first["pid"], "tid": first["tid"]}
            found += [lane | {"ph": "b", "ts": first["ts"]}, lane | {"ph": "e", "ts": event["ts"] + event["dur"]}]
    return found
