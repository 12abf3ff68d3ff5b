"""Where the time of a step goes on one rank: by operator (torch's profiler) and by Python function (cProfile), in milliseconds per step."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


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
