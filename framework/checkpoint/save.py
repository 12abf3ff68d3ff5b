"""Writing a checkpoint: every rank its own part, rank 0 the index and the folder's name; at once, or while training goes on.

    save(engine, step_folder(run_dir, step), run={...})                             collective; returns when it is on the disk
    under_way = Save(engine, folder, run={...}, staging=Staging())                  collective; returns when it has been copied
    ...                                                                             steps
    under_way.advance()                                                             collective; see `Save`

What an engine has on a disk is not copied: the thread reads it, and the update of a block waits until that was done.

A thread writes this rank's files, its description last. Rank 0's thread then waits until the descriptions of all ranks are in the folder,
writes the index and gives the folder its name. So nothing is sent for a save that succeeds, and threads never communicate: whether it has
succeeded is asked by the main threads, at a step at which all of them are known to be ready (`ZeroEngine.busy`). The format is described
in README.md.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from framework.checkpoint.contents import Contents, FlatTensor, contents_of
from framework.checkpoint.folder import EXTRA, FORMAT, INDEX, VERSION, begin, digest_of, finish, partial_folder, remove, sealed, unsealed
from framework.disk import write_whole
from framework.models.safetensors_io import StreamWriter
from framework.zero import ZeroEngine
from framework.zero.buffer import FlatBuffer
from framework.zero.nvme import Extent

CHUNK_BYTES = 1 << 22
"""A checksum covers so many bytes; a reader of a few elements reads and checks whole chunks."""
LOOK_SECONDS = 0.02
APPEAR_SECONDS = 300
"""A file that another machine has written must be seen here by then."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; earlier ones are as they were."""


def save(engine: ZeroEngine, folder: Path, *, run: dict[str, Any], **more: Any) -> int:
    """Write what `engine` trains to the new `folder`; the bytes that this rank wrote come back. Collective.

    `run` and `more` are those of `Save`. Raises SaveError on every rank where one could not write, with the first reason.
    """
    under_way = Save(engine, folder, run=run, **more)
    try:
        while not under_way.advance():
            pass
    except SaveError:
        raise
    except BaseException:  # Ctrl-C, or a rank is gone
        under_way.abandon()
        raise
    return under_way.nbytes


class Staging:
    """One copy of what a rank writes, in host memory: made by the first save and used again by the later ones. What lies on a disk is not
    copied."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        self._pinned = False

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def copy(self, tensors: list[FlatTensor], device: torch.device) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        """The tensors' values of this moment, by name; on CUDA they are there when the event has come, and must not be changed before."""
        tensors = [tensor for tensor in tensors if not tensor.extents]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if nbytes > self.nbytes:
            self.free()
            with torch.inference_mode(False):  # a save may follow a validation
                self._memory = torch.empty(nbytes, dtype=torch.uint8)
            self._pin(device)
        copies, at = {}, 0
        for tensor in tensors:
            copies[tensor.name] = self._memory[at : at + tensor.nbytes].view(tensor.dtype)
            at += tensor.nbytes
        if device.type != "cuda":
            for tensor in tensors:
                tensor.copy_into(copies[tensor.name])
            return copies, None
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                tensor.copy_into(copies[tensor.name])
            return copies, self._stream.record_event()

    def _pin(self, device: torch.device) -> None:
        """Registered, because torch's allocator of pinned memory rounds up to a power of two. Unpinned memory works, too: it is slower."""
        if device.type == "cuda" and self.nbytes:
            self._pinned = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self.nbytes, 0)) == 0

    def free(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._pinned = torch.empty(0, dtype=torch.uint8), False


class Save:
    """One save under way. Making it is collective and takes as long as the copy into `staging`; without one, training waits for the end.

    It has two parts, at the end of which the ranks ask each other how it went: all files are on the disk; the folder has its name.
    `advance()` waits for the present part and is collective. To lose no time in it, call it when no rank is `busy`.

    Args:
        run: what else is needed to go on, as JSON.
        staging: where to copy to first. None: written from the engine's own memory.
        frozen: buffers of the engine that it does not train, and which are written, too.
        extra: further tensors, which rank 0 writes; they must not change until all is written.
        with_optimizer: whether optimizer state is written.
        afterwards: rank 0 calls it when the folder has its name, from the thread.

    Raises SaveError on all ranks, here and in `advance`, where one of them failed; what there is of the checkpoint is then removed.
    """

    def __init__(
        self,
        engine: ZeroEngine,
        folder: Path,
        *,
        run: dict[str, Any],
        staging: Staging | None = None,
        frozen: Sequence[FlatBuffer] = (),
        extra: Mapping[str, Tensor] | None = None,
        with_optimizer: bool = True,
        afterwards: Callable[[], None] = lambda: None,
    ) -> None:
        engine.check_last_step()
        for buffer in engine.trained:
            buffer.scale_residuals(0)  # a run that is resumed has none: this one goes on like it
        self._began = time.perf_counter()
        self.step, self.folder, self.nbytes = engine.steps_done, folder, 0
        self.write_seconds = 0.0
        """From the beginning until this rank's files were on the disk."""
        self._world, self._afterwards = engine.world, afterwards
        self._token, self._error, self._all_written = uuid.uuid4().hex, None, False
        self._written, self._ended, self._given_up = threading.Event(), threading.Event(), threading.Event()
        self._wait_until = float("inf")
        self._held: list[Extent] = []
        """What no step may change on a disk, because it is still to be read."""
        self._agree(self._begin)
        self._extra = extra if self._world.rank == 0 else None
        buffers = [*engine.trained, *frozen]
        self._index = _index(engine, buffers, self._token, run, with_optimizer)
        thread = None
        try:
            contents = contents_of(engine, buffers, with_optimizer)
            copies, engine.reading = ({}, None) if staging is None else staging.copy(contents.tensors, engine.device)
            for tensor in contents.tensors:
                self._hold(tensor)
            thread = threading.Thread(target=self._run, args=(contents, copies, engine.reading), name="checkpoint", daemon=True)
            thread.start()
        except Exception as error:  # like one in the thread: the other ranks hear of it when they ask
            self._let_go(*self._held)
            self._fail(error)
        except BaseException:  # Ctrl-C
            if thread is not None and thread.ident is not None:
                self.abandon()
            self._let_go(*self._held)
            raise
        self.stall_seconds = time.perf_counter() - self._began

    @property
    def busy(self) -> bool:
        """Whether this rank's work on the present part is still to be done."""
        return not (self._ended if self._all_written else self._written).is_set()

    def advance(self) -> bool:
        """Finish the present part; True after the last one."""
        (self._ended if self._all_written else self._written).wait()
        try:
            self._agree(lambda: None)
        except SaveError:
            self.abandon()
            raise
        self._all_written, done = True, self._all_written
        self._wait_until = time.monotonic() + APPEAR_SECONDS
        return done

    def give_up(self, seconds: float) -> None:
        """Without communication: finish this rank's files; on rank 0, wait so long for those of others, and name what is whole then."""
        self._written.wait()
        self._ended.wait(seconds)
        self._given_up.set()
        self._ended.wait()

    def abandon(self) -> None:
        """Without communication: when this returns, nothing is read from the engine's memory or written any more."""
        self.give_up(0)
        if self._world.rank == 0:
            remove(partial_folder(self.folder))

    def _agree(self, action: Callable[[], None]) -> None:
        """`action()`; SaveError on all ranks where it, or what came before it, failed on one. The save's word is rank 0's."""
        try:
            action()
        except Exception as error:  # whatever it is, the other ranks must not wait
            self._error = error
        found = self._world.gather_objects((self._token, None if self._error is None else self._named(self._error)))
        self._token = found[0][0]
        if errors := [error for _, error in found if error is not None]:
            raise SaveError(errors[0]) from self._error

    def _named(self, error: Exception) -> str:
        return f"rank {self._world.rank}: {error if isinstance(error, OSError) else f'{type(error).__name__}: {error}'}"

    def _begin(self) -> None:
        if self._world.rank == 0:
            begin(self.folder)

    def _hold(self, tensor: FlatTensor) -> None:
        for extent in tensor.extents:
            extent.hold()
            self._held.append(extent)

    def _let_go(self, *extents: Extent) -> None:
        for extent in extents:
            self._held.remove(extent)
            extent.let_go()

    # ---- in the thread
    def _run(self, contents: Contents, copies: dict[str, Tensor], copied: torch.cuda.Event | None) -> None:
        partial = partial_folder(self.folder)
        try:
            if copied is not None:
                copied.synchronize()
            self.nbytes = _write_rank(partial, self._world.rank, self._token, contents, self._values(contents, copies))
            if self._extra:
                self._index["extra"] = _write_extra(partial, self._extra)
                self.nbytes += self._index["extra"]["file_bytes"]
            self.write_seconds = time.perf_counter() - self._began
            self._written.set()
            if self._world.rank == 0:
                self._index["ranks"] = [self._described(partial / f"rank_{rank}.json") for rank in range(self._world.size)]
                _write_json(partial / INDEX, self._index)
                finish(self.folder)
                self._afterwards()
        except Exception as error:
            self._fail(error)
        finally:
            self._let_go(*self._held)
        self._ended.set()

    def _values(self, contents: Contents, copies: dict[str, Tensor]) -> Iterator[Tensor]:
        """Of each tensor: its copy, or what the engine's memory or disk holds. A step may change an extent as soon as it was read."""
        for tensor in contents.tensors:
            value = copies[tensor.name] if tensor.name in copies else tensor.in_host_memory()
            self._let_go(*tensor.extents)
            yield value

    def _described(self, file: Path) -> str:
        """The checksum of a rank's description, once it is there."""
        while True:
            try:
                text = file.read_text()
                if unsealed(text)["save"] == self._token:
                    return digest_of(text)
            except (OSError, ValueError):  # not there yet, or not all of it
                pass
            if self._given_up.is_set() or time.monotonic() > self._wait_until:
                raise FileNotFoundError(f"{file} has not appeared")
            time.sleep(LOOK_SECONDS)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._written.set()
        self._ended.set()


def _index(engine: ZeroEngine, buffers: Sequence[FlatBuffer], token: str, run: dict[str, Any], with_optimizer: bool) -> dict[str, Any]:
    groups = engine.optimizer.param_groups if with_optimizer and engine.sharded_optimizer is not None else []
    return {
        "format": FORMAT,
        "version": VERSION,
        "save": token,
        "step": engine.steps_done,
        "world_size": engine.world.size,
        "buffers": [
            {
                "unit": buffer.layout.unit,
                "total": buffer.layout.total,
                "parameters": [
                    {"name": slot.name, "shape": list(slot.shape), "offset": slot.offset, "aliases": list(slot.aliases)}
                    for slot in buffer.layout.slots
                ],
            }
            | ({} if buffer.layout.requires_grad else {"frozen": True})
            for buffer in buffers
        ],
        "loss_scaler": None if engine.scaler is None else engine.scaler.state_dict(),
        "param_groups": [{key: _number(value) for key, value in group.items() if key != "params"} for group in groups],
        "run": run,
    }


def _number(option: Any) -> Any:
    """An option of a param group, also where it is a tensor, as a learning rate may be."""
    return option.item() if isinstance(option, Tensor) else option


def _write_rank(folder: Path, rank: int, token: str, contents: Contents, values: Iterable[Tensor]) -> int:
    """rank_N.safetensors with the flat tensors, then rank_N.json with what they are and their checksums."""
    shapes = {tensor.name: ((tensor.stop - tensor.start,), tensor.dtype) for tensor in contents.tensors}
    written, checksums = _write_tensors(folder / f"rank_{rank}.safetensors", shapes, values)
    described = {tensor.name: {"start": tensor.start, "stop": tensor.stop, "xxh3": checksums[tensor.name]} for tensor in contents.tensors}
    _write_json(
        folder / f"rank_{rank}.json",
        {
            "save": token,
            **written,
            "tensors": described,
            "optimizer": contents.optimizer,
            "random": contents.random,
        },
    )
    return written["file_bytes"]


def _write_extra(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    written, checksums = _write_tensors(folder / EXTRA, shapes, (tensor.cpu().contiguous() for tensor in tensors.values()))
    return written | {"xxh3": checksums}


def _write_tensors(
    file: Path, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], values: Iterable[Tensor]
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Write one file, durably: (what is to be said of it, checksums of each tensor's chunks)."""
    writer = StreamWriter(file, shapes)
    checksums = {
        name: [xxh3_64_intdigest(chunk) for chunk in writer.write_in_chunks(name, value, CHUNK_BYTES)]
        for name, value in zip(shapes, values, strict=True)
    }
    writer.close(durably=True)
    return {"file_bytes": writer.file_bytes, "chunk_bytes": CHUNK_BYTES, "header_sha256": writer.header_sha256}, checksums


def _write_json(file: Path, content: dict[str, Any]) -> None:
    """As soon as all descriptions are seen, rank 0 gives the folder another name; it syncs the folder before."""
    write_whole(file, sealed(content), folder_too=False)
