"""The processes of one contestant: they live through the whole run and step only when it is their turn.

A contestant has processes and a gloo group of its own, so that nothing leaks from one into another; those that wait block on a pipe and
cost nothing. Their output goes to files and is shown when one fails.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TURN_SECONDS = 600
CENSUS_STEPS = 2


class Ranks:
    """`world_size` processes that train the contestant `name`. `task` is a `contestants.Task`."""

    def __init__(self, name: str, task: Any, world_size: int, threads: int) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        context = multiprocessing.get_context("forkserver")
        # Seconds, once; optimizers import the second.
        context.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo", "framework.zero", "framework.models.llama"])
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            args = (theirs, name, task, rank, world_size, threads, self._folder.name)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, method: str, *args: Any) -> list[Any]:
        """`_Rank.method(*args)` on every rank at once; the results, in rank order. Raises RuntimeError with a failed rank's traceback."""
        for pipe in self._pipes:
            pipe.send((method, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            try:
                done, result = pipe.recv() if pipe.poll(TURN_SECONDS) else (False, f"no answer within {TURN_SECONDS} s")
            except EOFError:
                done, result = False, "the process has ended"
            if not done:
                log = (Path(self._folder.name) / f"{rank}.log").read_text(errors="replace")[-4000:]
                raise RuntimeError(f"{self.name}, rank {rank}, {method}: {result}\n{log}")
            results.append(result)
        return results

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, name: str, task: Any, rank: int, world_size: int, threads: int, folder: str) -> None:
    """The life of one rank: calls until the pipe closes."""
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({key: str(value) for key, value in here.items()})
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world_size), rank=rank, world_size=world_size)
    served = _Rank(name, task)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:  # the run is over, or its process is gone
            break
        try:
            pipe.send((True, getattr(served, method)(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
            sys.stdout.flush()
            os._exit(1)  # closes the sockets: peers that wait for this rank fail at once
    os._exit(0)  # libraries' exit handlers would wait for peers


class _Rank:
    """One rank of one contestant."""

    def __init__(self, name: str, task: Any) -> None:
        self.name, self.task = name, task
        self.contestant: Any = None
        self.steps_done = 0

    def build(self) -> None:
        from contestants import build

        self.contestant = build(self.name, self.task)

    def count_memory(self) -> dict[str, int | None]:
        """Bytes in use after a step, and the most within a step, above those of a process that has everything loaded and holds no model."""
        from contestants import load_everything
        from measure import Census, memory_can_be_counted

        if not memory_can_be_counted():
            self.build()
            self._step()
            return self._memory(None, None)
        load_everything(self.name, self.task)
        census = Census()
        self.build()
        self._step()  # makes the optimizer's state
        with census:
            for _ in range(CENSUS_STEPS):
                self._step()
        return self._memory(census.held_bytes(), census.peak_bytes)

    def _memory(self, resting_bytes: int | None, peak_bytes: int | None) -> dict[str, int | None]:
        engine = self.contestant.engine
        measured = {"resting_bytes": resting_bytes, "peak_bytes": peak_bytes}
        if engine is None:
            return measured
        from theory import peak_bytes as most_bytes
        from theory import sent_bytes

        own = {"own_resting_bytes": engine.memory.current, "own_peak_bytes": engine.memory.peak}
        theory = {"peak_by_formula": most_bytes(engine, self.contestant.offload), "sent_by_theory": sent_bytes(engine)}
        return measured | own | theory

    def take_turn(self, steps: int) -> dict[str, Any]:
        """Time `steps` steps, each from its begin to its end on this rank."""
        import torch.distributed as dist
        from measure import bytes_sent

        engine = self.contestant.engine
        dist.barrier()
        sent, own_sent = bytes_sent(), engine.bytes_sent if engine else None
        seconds, losses = [], []
        for _ in range(steps):
            began = time.perf_counter()
            losses.append(self._step())
            seconds.append(time.perf_counter() - began)
        dist.barrier()  # all has been sent
        return {
            "median_s": statistics.median(seconds),
            "sent_bytes": None if sent is None else (bytes_sent() - sent) / steps,
            "own_sent_bytes": None if own_sent is None else (engine.bytes_sent - own_sent) / steps,
            "losses": losses,
        }

    def call(self, function: Callable, *args: Any) -> Any:
        """`function(what has the contestant's state, *args)`: a function of a module, which is sent by its name."""
        return function(self.contestant.holder, *args)

    def profile(self, steps: int, rows: int) -> str:
        from step_profile import profile_steps

        return profile_steps(self._step, steps, rows)

    def timeline(self, steps: int) -> dict[str, Any]:
        from step_profile import timeline

        return timeline(self._step, steps, self.contestant.engine)

    def _step(self) -> float:
        loss = self.contestant.step(*self.task.batch(self.steps_done))
        self.steps_done += 1
        return loss
