"""The fp32 masters in a checkpoint of DeepSpeed's ZeRO stages 1, 2 and 3, by element range of named parameters, to start a training from.

    FOLDER/latest                                              the name of the newest TAG
    FOLDER/TAG/mp_rank_00_model_states.pt                      stages 1 and 2: names and shapes of all parameters, one dict for each group
    FOLDER/TAG/zero_pp_rank_R_mp_rank_00_model_states.pt       stage 3: the same, of every rank R
    FOLDER/TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt     rank R's part of the masters and moments

Stages 1 and 2 lay the parameters of a group one after another into a flat vector, each with its `param_alignment_paddings` behind it, and
give each rank one R-th of the vector (`single_partition_of_fp32_groups`). Stage 3 gives each rank ceil(elements / ranks) elements of each
parameter, one parameter after another, in a list of vectors that are to be read as one (`fp32_flat_groups`). Frozen parameters lie in the
model states, in the data type of computation. Source: deepspeed/utils/zero_to_fp32.py and runtime/engine.py, of DeepSpeed 0.19.

Unusual: DeepSpeed is not needed. Its classes in the pickles are replaced by inert ones, any other name is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework.checkpoint.source import MODEL_STATES, OPTIMIZER_STATES
from framework.checkpoint.torch_archive import Inert, StoredTensor, checked_bytes, read_archive, shape_of
from framework.config.errors import Problem, UserError
from framework.models.safetensors_io import RangeReader

LAYOUT = "parameters sharded by ZeRO stage 1, 2 or 3 of DeepSpeed 0.19, or of an older one with the same layout"
CLASSES = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Inert,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Inert,
    "deepspeed.utils.tensor_fragment.fragment_address": Inert,
}
RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_")


@dataclass(frozen=True)
class _Run:
    """Elements [start, stop) of a stored vector."""

    entry: StoredTensor
    start: int
    stop: int


class DeepSpeedWeights:
    """Every parameter of the checkpoint in `folder` (FOLDER/TAG above): `shapes`, `dtypes`, `read`, and where its bytes are."""

    only_parameters = True

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, RangeReader()
        _refuse_other_kinds(folder)
        self._fix = f"python {folder.parent / 'zero_to_fp32.py'} {folder.parent} NEW_FOLDER --safe_serialization --tag {folder.name}"
        try:
            self._understand()
        except UserError:
            raise
        except Exception as error:  # a damaged pickle may hold anything in the place of anything
            got = f"a damaged description, or that of another layout ({type(error).__name__}: {error})"
            raise UserError(Problem(path=str(folder), got=got, expected=LAYOUT, fix=self._fix)) from error

    def _understand(self) -> None:
        folder, ranks = self.folder, self._by_rank(OPTIMIZER_STATES)
        optimizers = [self._state(file) for file in ranks]
        self.stage = int(self._of(optimizers[0], "zero_stage", ranks[0]))
        if self.stage not in (1, 2, 3):
            raise UserError(Problem(path=str(ranks[0]), got=f"ZeRO stage {self.stage}", expected=LAYOUT))
        described = self._by_rank(MODEL_STATES) if self.stage == 3 else [folder / "mp_rank_00_model_states.pt"]
        self._models, self._files = [self._load(file) for file in described], [*described, *ranks]
        first = self._models[0]
        self.version, self.step = str(first.get("ds_version")), first.get("global_steps")
        self._check_parallel(first, described[0])
        self.world_size = _largest(self._of(optimizers[0], "partition_count", ranks[0]))
        for kind, files in (("optim_states", ranks), *((("model_states", described),) if self.stage == 3 else ())):
            if len(files) != self.world_size:
                got, expected = f"{len(files)} files *_{kind}.pt", f"{self.world_size}, one of each rank"
                raise UserError(Problem(path=str(folder), got=got, expected=expected, fix="copy the missing files, too"))
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        vectors = [
            [self._vector(entry, file) for entry in self._of(state, key, file)] for state, file in zip(optimizers, ranks, strict=True)
        ]
        groups = self._of(first, "param_shapes", described[0])
        self.shapes = {name: shape_of(shape) for group in groups for name, shape in group.items()}
        self._runs = self._stage_3(vectors) if self.stage == 3 else self._stages_1_and_2(vectors, groups, optimizers[0])
        self._add_frozen()
        for alias, name in self._of(first, "shared_params", described[0]).items():  # tied parameters are stored under one of their names
            if name in self._runs:
                self.shapes[alias], self._runs[alias] = self.shapes[name], self._runs[name]
        if not all(isinstance(name, str) for name in self.shapes):
            raise TypeError("a parameter whose name is no word")
        self.dtypes = {name: runs[0].entry.dtype_name for name, runs in self._runs.items()}

    def check(self) -> tuple[int, list[str]]:
        """Compare the checksums that there are: (bytes that were compared, files that have none). Raises UserError where one differs."""
        sizes = {file: checked_bytes(file, self._fix) for file in self._files}
        return sum(nbytes or 0 for nbytes in sizes.values()), [file.name for file, nbytes in sizes.items() if nbytes is None]

    # ---- what it holds
    def describe(self) -> str:
        return f"DeepSpeed {self.version}, ZeRO stage {self.stage}, {self.world_size} ranks, step {self.step}"

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter `name`, 1-D on the CPU: fp32, frozen ones as they are stored."""
        found, at = [], 0
        for run in self._runs[name]:
            low, high = max(start, at), min(stop, at + run.stop - run.start)
            if low < high:
                found.append(self._reader.read(run.entry, run.start + low - at, run.start + high - at))
            at += run.stop - run.start
        return torch.cat(found) if found else torch.empty(0)

    def places(self, name: str) -> list[str]:
        """FILE:BYTE of each run of elements of `name`, in order."""
        return [f"{run.entry.file.name}:{run.entry.offset + run.start * run.entry.dtype.itemsize}" for run in self._runs[name]]

    # ---- reading the descriptions
    def _load(self, file: Path) -> dict[str, Any]:
        return read_archive(file, CLASSES, self._fix)

    def _state(self, file: Path) -> dict[str, Any]:
        return self._of(self._load(file), "optimizer_state_dict", file)

    def _of(self, state: dict[str, Any], key: str, file: Path) -> Any:
        if not isinstance(state, dict) or key not in state:
            raise UserError(Problem(path=str(file), got=f"no {key!r}", expected=LAYOUT, fix=self._fix))
        return state[key]

    def _by_rank(self, pattern: str) -> list[Path]:
        found = {int(match[1]): file for file in self.folder.glob(pattern) if (match := RANK.search(file.name))}
        if sorted(found) != list(range(len(found))) or not found:
            got = f"{pattern} of the ranks {sorted(found)}" if found else f"no {pattern} of a rank, which ZeRO stage 0 does not write"
            raise UserError(Problem(path=str(self.folder), got=got, expected=LAYOUT))
        return [found[rank] for rank in sorted(found)]

    def _vector(self, entry: Any, file: Path) -> StoredTensor:
        if not isinstance(entry, StoredTensor) or entry.dtype is None or not entry.contiguous:
            raise UserError(Problem(path=str(file), got="a part of the masters that is no vector", expected=LAYOUT, fix=self._fix))
        return entry

    def _check_parallel(self, state: dict[str, Any], file: Path) -> None:
        degrees = state.get("checkpoint_parallel_dimensions") or {}
        for what, degree in (
            ("tensor parallelism", max(state.get("mp_world_size") or 1, degrees.get("tp_degree", 1))),
            ("pipeline parallelism", degrees.get("pp_degree", 1)),
        ):
            if degree > 1:
                raise UserError(Problem(path=str(file), got=f"{what} over {degree} ranks", expected=LAYOUT))

    # ---- where each parameter lies
    def _stages_1_and_2(self, vectors: list[list[StoredTensor]], groups: list[dict], optimizer: dict) -> dict[str, list[_Run]]:
        paddings = optimizer.get("param_alignment_paddings") or [[0] * len(group) for group in groups]
        runs: dict[str, list[_Run]] = {}
        for number, (group, padding) in enumerate(zip(groups, paddings, strict=True)):
            parts = [vectors_of_rank[number] for vectors_of_rank in vectors]
            at = 0
            for (name, shape), behind in zip(group.items(), padding, strict=True):
                runs[name] = _cut(parts, at, at + prod(shape))
                at += prod(shape) + behind
            self._check_length(sum(part.shape[0] for part in parts) - at, 2 * self.world_size)
        return runs

    def _stage_3(self, vectors: list[list[StoredTensor]]) -> dict[str, list[_Run]]:
        runs: dict[str, list[_Run]] = {}
        at = 0
        for name, shape in self.shapes.items():
            share, left = -(-prod(shape) // self.world_size), prod(shape)
            runs[name] = []
            for parts in vectors:
                runs[name] += _cut(parts, at, at + min(share, left))
                left -= min(share, left)
            at += share
        self._check_length(sum(part.shape[0] for part in vectors[0]) - at, 1)
        return runs

    def _check_length(self, left: int, at_most: int) -> None:
        """Raises UserError unless the vectors end where the parameters do; DeepSpeed pads groups of stages 1 and 2 for alignment."""
        if not 0 <= left < at_most:
            got = f"{abs(left):,} elements of masters {'more' if left > 0 else 'fewer'} than the parameters have"
            raise UserError(Problem(path=str(self.folder), got=got, expected=LAYOUT, fix=self._fix))

    def _add_frozen(self) -> None:
        shapes = self._models[0].get("frozen_param_shapes") or {}
        for name, shape in shapes.items():
            fragments = [model["frozen_param_fragments"][name] for model in self._models]
            parts = [self._vector(fragment, self.folder) for fragment in fragments]
            self.shapes[name] = shape_of(shape)
            self._runs[name] = _cut(parts, 0, prod(shape))
            if sum(run.stop - run.start for run in self._runs[name]) != prod(shape):
                raise ValueError(f"fewer elements of {name} than {list(shape)}")


def _cut(parts: list[StoredTensor], start: int, stop: int) -> list[_Run]:
    """Elements [start, stop) of vectors that are to be read as one."""
    runs, at = [], 0
    for part in parts:
        low, high = max(start, at), min(stop, at + prod(part.shape))
        if low < high:
            runs.append(_Run(part, low - at, high - at))
        at += prod(part.shape)
    return runs


def _largest(partition_count: Any) -> int:
    """Stages 1 and 2 have a count for each group."""
    return max(partition_count) if isinstance(partition_count, list | tuple) else int(partition_count)


def _refuse_other_kinds(folder: Path) -> None:
    for pattern, what in (
        ("*mp_rank_0[1-9]*", "tensor parallelism"),
        ("*mp_rank_[1-9]*", "tensor parallelism"),
        ("*expert_*", "a mixture of experts"),
        ("expp_rank_*", "a mixture of experts"),
        ("layer_*", "pipeline parallelism"),
        ("zero/*", "a universal checkpoint"),
    ):
        if found := sorted(folder.glob(pattern)):
            raise UserError(Problem(path=str(folder), got=f"{what} ({found[0].name})", expected=LAYOUT))
