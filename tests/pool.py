"""Worker processes that last a whole run of pytest, so that a test over several ranks costs milliseconds and no import of torch.

`pool.run(4, function, *args)` calls a module-level `function` on each of 4 processes, which already share a gloo process group of world
size 4 as their default group, and returns what they returned, in rank order. Processes are forked from a server that has imported torch
once; those of one world size (a crew) and their group are kept between calls. Before each call seeds, gradient mode, default dtype,
environment and working directory are put back.

If a rank raises, dies or does not return in time, `RanksFailed` shows every rank's traceback or stack and the end of its output, first
failure first. The crew is then thrown away and the next call forks a new one: one failed test never spoils another.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

START_SECONDS = 180
GRACE_SECONDS = 3
"""After the first failure the others may still report: a peer's death ends their collectives with an error that says where they were."""
OUTPUT_BYTES_SHOWN = 6000
STACK_SIGNAL = signal.SIGUSR2
SLOW_COLLECTION_SECONDS = 0.1
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=1)
"""Never reached: the timeout of a call is shorter, and shows where each rank was."""
SLOW_IMPORTS = ("lightning.pytorch", "transformers", "hypothesis", "hydra", "pytest")
"""Imported once, by the server, where the tests have imported them: its forks then have them too."""


class RanksFailed(Exception):
    """A call did not return on every rank. The message holds what is known of each."""


class Pool:
    """Crews of worker processes by world size; made when first needed."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.context = get_context("forkserver")
        self.context.set_forkserver_preload(["numpy", "torch.distributed", *(name for name in SLOW_IMPORTS if name in sys.modules)])
        self.crews: dict[int, Crew] = {}

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """`function(*args)` on each of `world_size` ranks; results in rank order, or `RanksFailed` after about `timeout` seconds."""
        __tracebackhide__ = True
        crew = self.crews.pop(world_size, None) or Crew(self.context, world_size, self.folder)
        try:
            results = crew.run(function, args, timeout)
        except BaseException:  # Ctrl-C and test timeouts too: whatever state the crew is in, nobody needs it any more
            crew.kill()
            raise
        self.crews[world_size] = crew
        return results

    def close(self) -> None:
        for crew in self.crews.values():
            crew.kill()
        self.crews.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


class Crew:
    """The processes of one world size, with one pipe and one output file each."""

    def __init__(self, context: Any, world_size: int, folder: Path) -> None:
        self.world_size = world_size
        self.folder = Path(tempfile.mkdtemp(prefix=f"world-{world_size}-", dir=folder))
        self.outputs = [self.folder / f"rank_{rank}.log" for rank in range(world_size)]
        self.pipes, self.processes = [], []
        self.calls, self.group_is_new = 0, True
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(theirs, rank, world_size, str(self.outputs[rank])), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple, timeout: float) -> list[Any]:
        __tracebackhide__ = True
        if self.calls == 0:
            self._collect(START_SECONDS)  # each says that it is up
        self.calls += 1
        group = str(self.folder / f"group_{self.calls}") if self.group_is_new else None
        call = pickle.dumps((function, args))  # plain pickle: copies tensors, where torch's own pickler would share their memory
        for pipe in self.pipes:
            pipe.send((group, call))
        replies = [pickle.loads(reply) for reply in self._collect(timeout)]
        self.group_is_new = any(touched for _, touched in replies)
        return [result for result, _ in replies]

    def _collect(self, timeout: float) -> list[bytes]:
        """One reply of every rank; `RanksFailed` when a rank fails, dies or is late."""
        __tracebackhide__ = True
        replies: dict[int, bytes] = {}
        failures: dict[int, str] = {}  # in the order in which they happened
        deadline = time.monotonic() + timeout
        while waiting := [rank for rank in range(self.world_size) if rank not in replies and rank not in failures]:
            ready = connection.wait([self.pipes[rank] for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in waiting:
                if self.pipes[rank] in ready:
                    outcome, value = self._receive(rank)
                    (replies if outcome == "returned" else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not waiting and not failures:
            return [replies[rank] for rank in range(self.world_size)]
        late = "had not returned" if failures else f"did not return within {timeout:g} s"
        for rank in waiting:
            failures[rank] = f"{late}; it was here:\n{self._stack(rank)}"
        raise RanksFailed("\n".join(["", *(self._report(rank, what) for rank, what in failures.items())]))

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            return self.pipes[rank].recv()
        except (EOFError, OSError):
            self.processes[rank].join(GRACE_SECONDS)
            code = self.processes[rank].exitcode
            cause = f"of signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit status {code}"
            return "died", f"died {cause}"

    def _stack(self, rank: int) -> str:
        """The stacks of a rank's threads, which its faulthandler writes into its output file."""
        size = self.outputs[rank].stat().st_size
        os.kill(self.processes[rank].pid, STACK_SIGNAL)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            time.sleep(0.05)
            if "(most recent call first)" in (text := self.outputs[rank].read_text(errors="replace")[size:]):
                return text
        return "(no stack: the process does not answer signals)"

    def _report(self, rank: int, what: str) -> str:
        output = self.outputs[rank].read_text(errors="replace")[-OUTPUT_BYTES_SHOWN:].strip()
        shown = f"\n--- output of rank {rank}\n{output}" if output and output not in what else ""
        return f"=== rank {rank} of {self.world_size} {what}{shown}"

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            process.close()
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _worker(pipe: connection.Connection, rank: int, world_size: int, output: str) -> None:
    """The life of one worker: calls, one after the other, until the pipe closes or a call fails."""
    threading.Thread(target=_end_with_pytest, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then ends its workers
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)

    import torch

    torch.set_num_threads(1)
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
    }
    directory = os.getcwd()
    gc.freeze()  # what is alive now stays: collecting after each call then looks at that call's objects only
    pipe.send(("returned", b""))
    while True:
        try:
            group, call = pipe.recv()
        except EOFError:
            return
        os.truncate(output, 0)
        _reset(environment, directory)
        try:
            reply = _call(group, rank, world_size, call)
        except BaseException as error:  # SystemExit too: it is the test's, not ours
            pipe.send(("raised", f"raised {type(error).__name__}\n{traceback.format_exc()}"))
            sys.stdout.flush()
            os._exit(1)  # closes the sockets, so that peers that wait in a collective fail at once
        pipe.send(("returned", reply))


def _end_with_pytest() -> None:
    """No orphans, not even of a pytest that was killed: a worker in a hanging collective would not notice that its pipe has closed."""
    parent_process().join()
    os._exit(1)


def _reset(environment: dict[str, str], directory: str) -> None:
    """Undo what an earlier call may have left in global state."""
    import numpy
    import torch

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    if torch.are_deterministic_algorithms_enabled():  # asked first, because setting it imports torch's compiler
        torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


def _call(group: str | None, rank: int, world_size: int, call: bytes) -> bytes:
    """Run one call in the process group; the reply holds its result and whether the next call needs a new group."""
    import torch.distributed as dist

    if group is not None:
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.FileStore(group, world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    world, groups = dist.group.WORLD, dist.get_pg_count()
    function, args = pickle.loads(call)
    result = function(*args)
    touched = dist.group.WORLD is not world or dist.get_pg_count() != groups
    if not touched:
        dist.barrier()  # a rank that made one collective more or less than the others hangs here, in the test whose fault it is
    reply = pickle.dumps((result, touched))
    del function, args, result
    began = time.perf_counter()
    gc.collect()
    if time.perf_counter() - began > SLOW_COLLECTION_SECONDS:
        gc.freeze()  # calls have imported much that stays, such as a compiler, and every later one would look at it again
    return reply
