"""Lightning checkpoints: files that are whole or not there (written beside, flushed to disk, renamed), and the named tensors in them.

Unusual: files are mapped, not read, when they are loaded, so that each rank touches only the pages of its own shards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from torch import Tensor, nn

from framework.disk import sync


class AtomicCheckpointIO(TorchCheckpointIO):
    """`torch.save` to a local file, atomically; other storage (`s3://...`) is left to Lightning."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or not _is_local_file_protocol(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with open(partial, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        sync(path.parent)

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        if not _is_local_file_protocol(path) or not os.path.exists(path):
            return super().load_checkpoint(path, map_location, weights_only)
        return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=True)


def persistent_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of `module.state_dict()`, tied ones under each name, without touching what they hold."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        prefix = f"{prefix}." if prefix else ""
        buffers = ((name, buffer) for name, buffer in part._buffers.items() if name not in part._non_persistent_buffers_set)
        for name, tensor in (*part._parameters.items(), *buffers):
            if tensor is not None:
                yield prefix + name, tensor


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], strict: bool) -> None:
    """`module.load_state_dict`, also for modules on the meta device, whose tensors become those of `weights`."""
    if not any(parameter.is_meta for parameter in module.parameters()):
        module.load_state_dict(weights, strict=strict)
        return
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the same objects, so that tied ones stay tied
    try:
        module.load_state_dict(weights, strict=strict, assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped)
