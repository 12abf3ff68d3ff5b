"""How each contestant saves, loads and exports what it trains: our checkpoints, torch's distributed checkpoint (DCP) on FSDP2, DeepSpeed.

Every function runs on all ranks of a contestant at once and gives seconds of this rank, from a barrier on. `stall` is what a training loop
waits for; the rest of a save goes on in the background.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from framework.checkpoint.load import Checkpoint, load_optimizer
from framework.checkpoint.save import Save, Staging, save
from framework.models.safetensors_io import StreamWriter
from framework.zero.load import fill_from_reader

BLOCK_BYTES = 1 << 22
_staging = Staging()


def timed(action: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


# ---- the disk
def plain_write(_: object, nbytes: int, folder: Path) -> float:
    """As many bytes as the ranks of a contestant write, from memory, in blocks, with one fsync: what the disk can do."""
    data = memoryview(os.urandom(BLOCK_BYTES))

    def write() -> None:
        file = os.open(folder / f"plain_{dist.get_rank()}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for _ in range(0, nbytes // dist.get_world_size(), BLOCK_BYTES):
            os.write(file, data)
        os.fsync(file)
        os.close(file)

    return timed(write)


# ---- save: {"stall": seconds, "save": seconds until it is on the disk}
def save_ours(engine: Any, folder: Path, background: bool) -> dict[str, float]:
    dist.barrier()
    began = time.perf_counter()
    if not background:
        save(engine, folder, run={})
        return _both(time.perf_counter() - began)
    under_way = Save(engine, folder, run={}, staging=_staging)
    stall = time.perf_counter() - began
    while not under_way.advance():
        pass
    return {"stall": stall, "save": time.perf_counter() - began}


def save_dcp(holder: Any, folder: Path, background: bool) -> dict[str, float]:
    import torch.distributed.checkpoint as dcp

    dist.barrier()
    began = time.perf_counter()
    if not background:
        dcp.save(_dcp_state(holder), checkpoint_id=folder)
        return _both(time.perf_counter() - began)
    done = dcp.async_save(_dcp_state(holder), checkpoint_id=folder)
    stall = time.perf_counter() - began
    getattr(done, "upload_completion", done).result()
    return {"stall": stall, "save": time.perf_counter() - began}


def save_deepspeed(engine: Any, folder: Path, background: bool) -> dict[str, float]:
    assert not background
    dist.barrier()
    began = time.perf_counter()
    engine.save_checkpoint(str(folder), tag="saved")
    return _both(time.perf_counter() - began)


def save_deepspeed_flushed(engine: Any, folder: Path, background: bool) -> dict[str, float]:
    """Until the files are on the disk, as with the others: DeepSpeed itself leaves that to the system."""
    saved = save_deepspeed(engine, folder, background)["save"]

    def flush() -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in files[dist.get_rank() :: dist.get_world_size()]:
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.close(file)

    return _both(saved + timed(flush))


def _both(seconds: float) -> dict[str, float]:
    return {"stall": seconds, "save": seconds}


def _dcp_state(holder: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(*holder)
    return {"model": model, "optimizer": optimizer}


# ---- load into what is there
def load_ours(engine: Any, folder: Path) -> float:
    def load() -> None:
        checkpoint = Checkpoint(folder)
        fill_from_reader(engine.buffers, checkpoint.read, show=False)
        load_optimizer(engine, checkpoint)

    return timed(load)


def load_dcp(holder: Any, folder: Path) -> float:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    def load() -> None:
        state = _dcp_state(holder)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(*holder, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    return timed(load)


def load_deepspeed(engine: Any, folder: Path) -> float:
    return timed(lambda: engine.load_checkpoint(str(folder), tag="saved"))


# ---- the whole model in one file
def export_ours(engine: Any, file: Path) -> float:
    def export() -> None:
        shapes = {slot.name: (tuple(slot.shape), torch.bfloat16) for buffer in engine.buffers for slot in buffer.layout.slots}
        writer = StreamWriter(file, shapes) if dist.get_rank() == 0 else None
        for name, tensor in engine.full_tensors():
            if writer is not None:
                writer.write(name, tensor)
        if writer is not None:
            writer.close(durably=True)

    return timed(export)


def export_dcp(holder: Any, file: Path) -> float:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    def export() -> None:
        whole = get_model_state_dict(holder[0], options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            with open(file, "wb") as stream:
                torch.save({name: tensor.bfloat16() for name, tensor in whole.items()}, stream)
                stream.flush()
                os.fsync(stream.fileno())

    return timed(export)


# ---- what a check compares
def digest(holder: Any) -> float:
    """A number that any lost, doubled or changed element of this rank's shards would change."""
    if isinstance(holder, tuple):
        model, optimizer = holder
        tensors = [parameter.to_local() for parameter in model.parameters()]
        tensors += [value.to_local() for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    else:
        states = [state for _, _, state in holder.sharded_optimizer.state_pieces()]
        tensors = [buffer.master for buffer in holder.trained] + [
            value for state in states for key, value in state.items() if key != "step"
        ]
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


def clear(_: object, folder: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
